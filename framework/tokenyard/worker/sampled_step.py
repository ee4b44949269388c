"""SampledStep: the result of a step whose tokens may still be on their way to the host."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tokenyard.logprob_rows import of_kept_tokens
from tokenyard.runner_output import ModelRunnerOutput
from tokenyard.worker.sampler import Sampler

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from tokenyard.arrays import IntArray, LongArray
    from tokenyard.runner_output import Logprobs, PromptLogprobs
    from tokenyard.scheduler_output import SchedulerOutput
    from tokenyard.worker.sampler import Chosen, SamplingBatch
    from tokenyard.worker.stream import Download


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRows:
    """N rows of a step and what was chosen for them."""

    rows: LongArray  # [N] of the step
    slots: LongArray  # [N]
    positions: IntArray  # [N] of the new tokens
    columns: SamplingBatch
    chosen: Chosen
    download: Download  # of `chosen.results`
    device_slots: torch.Tensor | None  # [N] `slots` on the device; None = their tokens do not stay there


class NewTokens(NamedTuple):
    """Tokens of rows that did not fail."""

    slots: LongArray
    positions: IntArray
    token_ids: IntArray


class _Landed(NamedTuple):
    output: ModelRunnerOutput
    tokens: NewTokens


class SampledStep:
    """A StepFuture. The first to ask waits for the device; any thread may be that."""

    def __init__(
        self,
        output: SchedulerOutput,
        sampled: SampledRows | None,  # None = no row sampled
        prompt_logprobs: Sequence[PromptLogprobs],
        errors: Mapping[str, str],  # request id -> why it failed before it could sample
    ) -> None:
        self._step, self._num_rows = output.step, output.num_rows
        self._sampled = sampled
        self._prompt_logprobs = prompt_logprobs
        self._errors = errors
        self._landed: _Landed | None = None
        self._lock = threading.Lock()

    @property
    def ready_at(self) -> float | None:
        return None

    def is_done(self) -> bool:
        """Whether `result` would return at once."""
        sampled = self._sampled
        return sampled is None or sampled.download.is_done()

    def result(self) -> ModelRunnerOutput:
        """Wait; a row that failed has no token."""
        return self._land().output

    def tokens(self) -> NewTokens:
        """Wait; what the host did not know before."""
        return self._land().tokens

    def _land(self) -> _Landed:
        with self._lock:
            if self._landed is None:
                self._landed = self._read()
                self._sampled = None  # with its tensors
            return self._landed

    def _read(self) -> _Landed:
        if self._sampled is None:
            none: LongArray = np.empty(0, dtype=np.int64)
            tokens = NewTokens(none, none.astype(np.int32), none.astype(np.int32))
            return self._landed_of(none, tokens, None, {})
        rows, slots, positions, columns, chosen, download = (
            self._sampled.rows,
            self._sampled.slots,
            self._sampled.positions,
            self._sampled.columns,
            self._sampled.chosen,
            self._sampled.download,
        )
        token_ids, logprobs, failed = Sampler.finish(chosen, download.arrays(), columns, positions)
        if failed:
            is_good = ~np.isin(np.arange(len(rows)), list(failed))
            rows, slots, positions, token_ids = rows[is_good], slots[is_good], positions[is_good], token_ids[is_good]
            logprobs = logprobs and of_kept_tokens(logprobs, is_good)
        errors = {columns.requests[index].request_id: text for index, text in failed.items()}
        return self._landed_of(rows, NewTokens(slots, positions, token_ids), logprobs, errors)

    def _landed_of(
        self, rows: LongArray, tokens: NewTokens, logprobs: Logprobs | None, errors: Mapping[str, str]
    ) -> _Landed:
        num_sampled = np.zeros(self._num_rows, dtype=np.int32)
        num_sampled[rows] = 1
        output = ModelRunnerOutput(
            step=self._step,
            num_sampled=num_sampled,
            token_ids=tokens.token_ids,
            logprobs=logprobs,
            prompt_logprobs=self._prompt_logprobs,
            errors={**self._errors, **errors},
        )
        return _Landed(output, tokens)
