"""Schedulers and executors with a fault each in their log probabilities, that a suite must find."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from planted_parts import WrappedScheduler
from tokenyard.engine_outputs import EngineCoreOutputs
from tokenyard.executor.inproc import InProcessExecutor
from tokenyard.interfaces import ExecutorContext, GrammarOutput, StepFuture
from tokenyard.runner_output import Logprobs, ModelRunnerOutput, PromptLogprobs
from tokenyard.scheduler_output import SchedulerOutput


class PassesLogprobsOn(WrappedScheduler):
    """As the executor sent them, whatever became of the tokens."""

    def update_from_output(self, output: SchedulerOutput, result: ModelRunnerOutput) -> EngineCoreOutputs:
        return dataclasses.replace(super().update_from_output(output, result), logprobs=result.logprobs)


class PassesPromptLogprobsOn(WrappedScheduler):
    """Whoever has ended meanwhile."""

    def update_from_output(self, output: SchedulerOutput, result: ModelRunnerOutput) -> EngineCoreOutputs:
        outputs = super().update_from_output(output, result)
        return dataclasses.replace(outputs, prompt_logprobs=result.prompt_logprobs)


class NeverAsks(WrappedScheduler):
    """Prompts are computed without a word about their log probabilities."""

    def schedule(self) -> SchedulerOutput | None:
        output = super().schedule()
        if output is None or output.wants_prompt_logprobs is None:
            return output
        silent = dataclasses.replace(output, wants_prompt_logprobs=None)
        self._outputs[output.step] = silent
        return silent


@dataclasses.dataclass(frozen=True)
class _Changed:
    inner: StepFuture[ModelRunnerOutput]
    change: Callable[[ModelRunnerOutput], ModelRunnerOutput]
    ready_at: float | None = None

    def result(self) -> ModelRunnerOutput:
        return self.change(self.inner.result())


class _Changes(InProcessExecutor):
    def __init__(self, context: ExecutorContext, change: Callable[[ModelRunnerOutput], ModelRunnerOutput]) -> None:
        super().__init__(context)
        self._change = change

    def sample_tokens(self, grammar: GrammarOutput | None = None) -> StepFuture[ModelRunnerOutput]:
        return _Changed(super().sample_tokens(grammar), self._change)


def forgets_logprobs(context: ExecutorContext) -> InProcessExecutor:
    return _Changes(context, lambda result: dataclasses.replace(result, logprobs=None))


def leaves_out_the_token_itself(context: ExecutorContext) -> InProcessExecutor:
    """Only the most likely ones."""

    def change(result: ModelRunnerOutput) -> ModelRunnerOutput:
        if result.logprobs is None or result.logprobs.token_ids.shape[1] == 1:
            return result
        less = dataclasses.replace(
            result.logprobs, token_ids=result.logprobs.token_ids[:, 1:], logprobs=result.logprobs.logprobs[:, 1:]
        )
        return dataclasses.replace(result, logprobs=less)

    return _Changes(context, change)


def loses_the_last_of_a_chunk(context: ExecutorContext) -> InProcessExecutor:
    """The token behind the last one of a chunk is in the next chunk, and is forgotten."""
    return _Changes(context, lambda result: _with_chunks(result, lambda one: _first(one, len(one.rows) - 1)))


def likely_tokens_in_any_order(context: ExecutorContext) -> InProcessExecutor:
    def change(one: Logprobs) -> Logprobs:
        order = [0, *range(one.token_ids.shape[1] - 1, 0, -1)]
        return dataclasses.replace(one, token_ids=one.token_ids[:, order], logprobs=one.logprobs[:, order])

    return _Changes(context, lambda result: _with_chunks(result, change))


def _with_chunks(result: ModelRunnerOutput, change: Callable[[Logprobs], Logprobs]) -> ModelRunnerOutput:
    chunks: list[PromptLogprobs] = [
        dataclasses.replace(chunk, logprobs=change(chunk.logprobs)) for chunk in result.prompt_logprobs
    ]
    return dataclasses.replace(result, prompt_logprobs=chunks)


def _first(one: Logprobs, count: int) -> Logprobs:
    return Logprobs(
        rows=np.arange(count, dtype=np.int32),
        token_ids=one.token_ids[:count],
        logprobs=one.logprobs[:count],
        sampled_ranks=one.sampled_ranks[:count],
    )
