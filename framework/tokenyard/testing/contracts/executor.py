"""ExecutorContract: what an executor must keep, with a real model that is small."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tokenyard.errors import ConfigError
from tokenyard.launch.assemble import build_engine
from tokenyard.request import EngineCoreRequest
from tokenyard.sampling_params import SamplingParams
from tokenyard.testing.contracts.base import Contract, Loaded, check_equal, expect, no_errors, seeded
from tokenyard.testing.contracts.logprobs import ReceivedLogprobs, check_logprobs, check_prompt_logprobs
from tokenyard.testing.contracts.recorders import Recorder, RecordingExecutor
from tokenyard.testing.errors import ContractViolation

if TYPE_CHECKING:
    from tokenyard.engine_outputs import EngineCoreOutputs
    from tokenyard.interfaces.executor import WorkerReport
    from tokenyard.launch.assemble import RunningEngine
    from tokenyard.runner_output import ModelRunnerOutput
    from tokenyard.scheduler_output import SchedulerOutput

_LENGTHS = (3, 17, 1, 8, 30)  # of the prompts
_MAX_TOKENS = 5
_GREEDY = SamplingParams(temperature=0.0, max_tokens=_MAX_TOKENS)
_MOST_STEPS = 500


class Rig:
    """An engine with the executor under test; `run` gives the tokens of some prompts."""

    def __init__(self, loaded: Loaded) -> None:
        self._recorder = Recorder()
        self.engine: RunningEngine = build_engine(loaded.config, loaded.catalogue, decorate=self._recorder.decorate)
        self.logprobs = ReceivedLogprobs()
        self._num_added = 0

    @property
    def executor(self) -> RecordingExecutor:
        if self._recorder.executor is None:
            raise ContractViolation("executor.order", "the engine was built without an executor")
        return self._recorder.executor

    @property
    def report(self) -> WorkerReport:
        return self.engine.report

    def prompts(self) -> list[list[int]]:
        draw = seeded(7)
        return [[draw.randrange(self.report.vocab_size) for _ in range(length)] for length in _LENGTHS]

    def run(
        self, prompts: list[list[int]], num_prompt: int = 0, *, params: SamplingParams = _GREEDY
    ) -> dict[str, list[int]]:
        """Tokens by the prompt's number, all in one batch as far as it goes; greedy unless `params` say otherwise."""
        tokens: dict[str, list[int]] = {}
        names = {}
        for number, prompt in enumerate(prompts, num_prompt):
            names[self._add(prompt, params)] = str(number)
            tokens[str(number)] = []
        for _ in range(_MOST_STEPS):
            if not self.engine.core.has_requests():
                return tokens
            outputs = self.engine.core.step()
            _take(outputs, names, tokens)
            self.logprobs.take(outputs, names)
        raise ContractViolation("progress.bounded", f"not done after {_MOST_STEPS} steps")

    def close(self) -> None:
        self.engine.core.shutdown()

    def _add(self, prompt: list[int], params: SamplingParams) -> str:
        name = f"x{self._num_added}"
        self._num_added += 1
        self.engine.core.add_request(
            EngineCoreRequest(
                request_id=name,
                prompt_token_ids=np.array(prompt, dtype=np.int32),
                params=params,
                arrival_time=self.engine.clock.now(),
            )
        )
        return name


class ExecutorContract(Contract):
    """Set `overrides` to the executor and a small model: `["executor=NAME", "model.name=FOLDER", ...]`.

    `model.dtype=float32` is needed: in a coarser type a token may depend on its batch mates.
    """

    _kind = "executor"
    _choice = "executor=NAME"

    def test_rows_keep_their_order(self) -> None:
        """`executor.row_order`: a prompt gets the tokens in a batch that it gets alone."""
        with_mates, alone = self._rig("scheduler.max_num_seqs=8"), self._rig("scheduler.max_num_seqs=1")
        together = with_mates.run(with_mates.prompts())
        apart: dict[str, list[int]] = {}
        for number, prompt in enumerate(alone.prompts()):
            apart |= alone.run([prompt], number)
        check_equal("executor.row_order", together, apart, "in a batch and alone")

    def test_chunks_change_no_token(self) -> None:
        """`executor.chunks`: a prompt computed over several steps gives the same tokens."""
        whole, chunked = self._rig(), self._rig("scheduler.max_num_batched_tokens=7", "scheduler.max_num_seqs=4")
        check_equal("executor.chunks", whole.run(whole.prompts()), chunked.run(chunked.prompts()), "whole and chunked")

    def test_steps_in_flight_run_in_order(self) -> None:
        """`executor.in_order`: with several steps in flight the tokens are those of one at a time."""
        plain, overlap = self._rig("engine=sync"), self._rig("engine=overlap")
        check_equal("executor.in_order", plain.run(plain.prompts()), overlap.run(overlap.prompts()), "the loops")
        self._check_results(overlap)

    def test_results_have_a_place_for_each_row(self) -> None:
        """`executor.result_shape`: a token for each row that samples, none for the others, all in the vocabulary."""
        rig = self._rig("scheduler.max_num_batched_tokens=7", "scheduler.max_num_seqs=4")
        rig.run(rig.prompts())
        self._check_results(rig)

    def test_a_result_can_be_read_twice(self) -> None:
        """`executor.result_again`: a future gives the same result again."""
        rig = self._rig()
        rig.run(rig.prompts()[:2])
        output, future = rig.executor.steps[-1]
        again = [future.result().token_ids.tolist() for _ in range(2)]
        expect(again[0] == again[1], "executor.result_again", f"step {output.step} gave {again[0]}, then {again[1]}")

    def test_it_reports_what_the_engine_needs(self) -> None:
        """`executor.report`: K/V groups, bytes for the cache and the vocabulary are told when the model is loaded."""
        report = self._rig().report
        groups = [group.num_layers * group.bytes_per_token for group in report.kv_cache_groups]
        expect(bool(groups) and min(groups) > 0, "executor.report", f"K/V groups are {report.kv_cache_groups}")
        expect(report.vocab_size > 0, "executor.report", f"vocab_size is {report.vocab_size}")
        expect(report.available_bytes >= 0, "executor.report", f"available_bytes is {report.available_bytes}")

    def test_logprobs_are_those_of_the_sampled_tokens(self) -> None:
        """`executor.logprobs`: rows that ask have them: the token's own, then as many of the likeliest as wanted."""
        rig = self._rig()
        for number, (prompt, count) in enumerate(zip(rig.prompts(), (None, 0, 1, 3, 3), strict=True)):
            params = dataclasses.replace(_GREEDY, logprobs=count)
            tokens = rig.run([prompt], number, params=params)
            check_logprobs(rig.logprobs, str(number), tokens[str(number)], count)

    def test_prompt_logprobs_do_not_depend_on_chunks(self) -> None:
        """`executor.prompt_logprobs`: every prompt token but the first has them, whole or in chunks, and the same."""
        whole, chunked = self._rig(), self._rig("scheduler.max_num_batched_tokens=7", "scheduler.max_num_seqs=4")
        params, prompts = dataclasses.replace(_GREEDY, prompt_logprobs=2), whole.prompts()
        for rig in (whole, chunked):
            rig.run(prompts, params=params)
        for number, prompt in enumerate(prompts):
            check_prompt_logprobs(whole.logprobs, chunked.logprobs, str(number), prompt)

    def test_an_unknown_function_is_refused(self) -> None:
        """`executor.unknown_rpc`: `collective_rpc` raises ConfigError, which names what there is."""
        rig = self._rig()
        try:
            answer = rig.executor.collective_rpc("no_such_function")
        except ConfigError as error:
            expect("no_such_function" in str(error), "executor.unknown_rpc", f"the error does not name it: {error}")
        except Exception as error:
            raise ContractViolation("executor.unknown_rpc", f"it raised {type(error).__name__}: {error}") from error
        else:
            raise ContractViolation("executor.unknown_rpc", f"it answered {answer!r}")

    def test_shutting_down_is_idempotent(self) -> None:
        """`executor.shutdown`: a second call does nothing, and nothing runs afterwards."""
        rig = self._rig()
        rig.run(rig.prompts()[:1])
        with no_errors("executor.shutdown"):
            rig.executor.check_health()
            rig.executor.shutdown()
            rig.executor.shutdown()
        output, _ = rig.executor.steps[-1]
        try:
            rig.executor.execute_model(output).result()
        except Exception:
            return
        raise ContractViolation("executor.shutdown", "a step ran after shutdown()")

    @pytest.fixture(autouse=True)
    def _close_rigs(self) -> Iterator[None]:
        self._rigs: list[Rig] = []
        yield
        for rig in self._rigs:
            rig.close()

    def _rig(self, *overrides: str) -> Rig:
        loaded = self.load(*overrides)
        with no_errors("executor.starts"):
            self._rigs.append(Rig(loaded))
        return self._rigs[-1]

    def _check_results(self, rig: Rig) -> None:
        for output, future in rig.executor.steps:
            _check_result(output, future.result(), rig.report.vocab_size)


def _check_result(output: SchedulerOutput, result: ModelRunnerOutput, vocab_size: int) -> None:
    expect(result.step == output.step, "executor.in_order", f"step {output.step} has the result of step {result.step}")
    counts = result.num_sampled.tolist()
    expect(
        counts == output.samples.astype(int).tolist(),
        "executor.result_shape",
        f"rows that sample are {output.samples.tolist()}, sampled were {counts}",
    )
    expect(
        len(result.token_ids) == sum(counts), "executor.result_shape", f"{len(result.token_ids)} tokens for {counts}"
    )
    legal = all(0 <= token < vocab_size for token in result.token_ids.tolist())
    expect(legal, "executor.result_shape", f"tokens {result.token_ids.tolist()} of a vocabulary of {vocab_size}")


def _take(outputs: EngineCoreOutputs, names: dict[str, str], tokens: dict[str, list[int]]) -> None:
    start = 0
    for name, count in zip(outputs.request_ids, outputs.num_tokens.tolist(), strict=True):
        tokens[names[name]].extend(outputs.token_ids[start : start + count].tolist())
        start += count
