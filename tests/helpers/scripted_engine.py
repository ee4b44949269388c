"""A scheduler and a K/V manager driven step by step, with sampled tokens from a script instead of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from tokenyard.clock import VirtualClock
from tokenyard.config import SchedulerConfig
from tokenyard.interfaces import SchedulerContext, SchedulingPolicy
from tokenyard.kv_cache import PagedKVCacheManager
from tokenyard.request import EngineCoreRequest, FinishReason
from tokenyard.runner_output import ModelRunnerOutput
from tokenyard.sampling_params import SamplingParams
from tokenyard.scheduler import BatchScheduler

if TYPE_CHECKING:
    from tokenyard.engine_outputs import EngineCoreOutputs
    from tokenyard.scheduler_output import SchedulerOutput

EOS = 2
VOCAB = 1000


@dataclass
class Ended:
    reason: FinishReason
    stop_reason: int | str | None
    error: str | None


class ScriptedEngine:
    """Knows from the SchedulerOutputs alone what a worker would know, and checks that this is enough."""

    def __init__(
        self,
        *,
        num_blocks: int = 10000,
        block_size: int = 16,
        max_model_len: int = 8192,
        prefix_caching: bool = False,
        policy: SchedulingPolicy | None = None,
        kv: PagedKVCacheManager | None = None,
        **config: int | bool,
    ) -> None:
        settings = {"max_num_seqs": 16, "max_num_batched_tokens": 8192, **config}
        self.clock = VirtualClock()
        self.kv = kv or PagedKVCacheManager(
            num_blocks=num_blocks, block_size=block_size, enable_prefix_caching=prefix_caching
        )
        self.config = SchedulerConfig(**settings)
        self.scheduler = BatchScheduler(
            SchedulerContext(
                config=self.config,
                kv_cache_manager=self.kv,
                policy=policy,
                clock=self.clock,
                max_model_len=max_model_len,
                vocab_size=VOCAB,
                block_size=block_size,
                prefix_caching=prefix_caching,
                seed=0,
            )
        )
        self.block_size = block_size
        self.tokens: dict[str, list[int]] = {}  # request id -> output tokens delivered
        self.ended: dict[str, Ended] = {}
        self.owners: dict[int, str] = {}  # slot -> request id, as the worker would know it
        self.tables: dict[int, list[int]] = {}  # slot -> block table, as the worker would know it
        self.last: SchedulerOutput | None = None

    def add(
        self,
        request_id: str,
        prompt: int | Sequence[int],
        *,
        priority: int = 0,
        arrival: float = 0.0,
        deadline: float | None = None,
        **sampling: object,
    ) -> None:
        ids = (
            [(hash_of(request_id) + i) % (VOCAB - 10) + 10 for i in range(prompt)]
            if isinstance(prompt, int)
            else prompt
        )
        params = SamplingParams(**{"temperature": 0.0, **sampling})
        self.scheduler.add_request(
            EngineCoreRequest(
                request_id=request_id,
                prompt_token_ids=np.array(ids, dtype=np.int32),
                params=params,
                arrival_time=arrival,
                stop_token_ids=(*(() if params.ignore_eos else (EOS,)), *(params.stop_token_ids or ())),
                eos_token_ids=(EOS,),
                priority=priority,
                deadline=deadline,
            )
        )
        self.tokens[request_id] = []

    def schedule(self) -> SchedulerOutput | None:
        output = self.last = self.scheduler.schedule()
        if output is not None:
            self._check_step(output)
        return output

    def update(
        self,
        output: SchedulerOutput,
        script: Mapping[str, Sequence[int]] | Callable[[str], Sequence[int]] | None = None,
        errors: Mapping[str, str] | None = None,
    ) -> EngineCoreOutputs:
        rows = [self._sampled(output, row, script) for row in range(output.num_rows)]
        result = ModelRunnerOutput(
            step=output.step,
            num_sampled=np.array([len(row) for row in rows], dtype=np.int32),
            token_ids=np.array([token for row in rows for token in row], dtype=np.int32),
            errors=errors or {},
        )
        outputs = self.scheduler.update_from_output(output, result)
        self._take(outputs)
        return outputs

    def step(
        self, script: Mapping[str, Sequence[int]] | Callable[[str], Sequence[int]] | None = None
    ) -> EngineCoreOutputs | None:
        output = self.schedule()
        return None if output is None else self.update(output, script)

    def run(self, limit: int = 10000) -> int:
        """Steps until everything has ended."""
        for steps in range(limit):
            if not self.scheduler.has_requests():
                return steps
            assert self.step() is not None, f"nothing runs although requests wait: {self.scheduler.stats()}"
        raise AssertionError(f"not done after {limit} steps: {self.scheduler.stats()}")

    def finish(self, *request_ids: str, reason: FinishReason = FinishReason.ABORT) -> Sequence[str]:
        ended = self.scheduler.finish_requests(request_ids, reason)
        for request_id in ended:
            assert request_id not in self.ended
            self.ended[request_id] = Ended(reason, None, None)
        return ended

    def scheduled(self, output: SchedulerOutput | None = None) -> dict[str, int]:
        """Request id -> tokens in the step."""
        output = output or self.last
        assert output is not None
        return {
            self.owners[slot]: count
            for slot, count in zip(output.slots.tolist(), output.num_scheduled_tokens.tolist(), strict=True)
        }

    def check_idle(self) -> None:
        """Nothing is left behind once every request has ended (S25)."""
        stats = self.scheduler.stats()
        assert not self.scheduler.has_requests()
        assert stats.num_running == 0
        assert stats.num_waiting == 0
        assert stats.num_free_blocks == stats.num_total_blocks
        assert set(self.ended) == set(self.tokens)
        self.kv.check_invariants()

    def _sampled(
        self,
        output: SchedulerOutput,
        row: int,
        script: Mapping[str, Sequence[int]] | Callable[[str], Sequence[int]] | None,
    ) -> Sequence[int]:
        if not output.samples[row]:
            return ()
        request_id = self.owners.get(int(output.slots[row]), "gone")  # ended while the step was in flight
        if callable(script):
            return script(request_id)
        return (script or {}).get(request_id, [hash_of(request_id) + len(self.tokens.get(request_id, ()))])

    def _take(self, outputs: EngineCoreOutputs) -> None:
        start = 0
        for request_id, count in zip(outputs.request_ids, outputs.num_tokens.tolist(), strict=True):
            assert request_id not in self.ended, "a token for a request that has ended"
            self.tokens[request_id].extend(outputs.token_ids[start : start + count].tolist())
            start += count
        for end in outputs.finished:
            assert end.request_id not in self.ended, "a request ended twice"
            self.ended[end.request_id] = Ended(end.reason, end.stop_reason, end.error)
        self.kv.check_invariants()

    def _check_step(self, output: SchedulerOutput) -> None:
        """Section 9 of the engine behaviours, from the worker's side."""
        for slot in output.finished:
            del self.owners[slot.index], self.tables[slot.index]
        for update in output.block_table_updates:
            assert update.start == len(self.tables[update.slot.index])
            self.tables[update.slot.index].extend(update.block_ids.tolist())
        for start in (*output.new, *output.resumed):
            assert start.slot.index not in self.owners
            self.owners[start.slot.index] = start.request_id
            self.tables[start.slot.index] = start.block_ids[0].tolist()
        slots, counts = output.slots.tolist(), output.num_scheduled_tokens
        assert len(set(slots)) == len(slots)
        assert (counts >= 1).all()
        assert output.total_num_scheduled_tokens <= self.config.max_num_batched_tokens
        assert len(slots) <= self.config.max_num_seqs
        for row, slot in enumerate(slots):
            tokens = int(output.num_computed_tokens[row] + counts[row])
            table = self.tables[slot]
            assert len(table) >= -(-tokens // self.block_size), "the block table is too short for the step"
            assert 0 not in table, "the null block was handed out"
        self.kv.check_invariants()


def hash_of(text: str) -> int:
    """The same in every process, unlike hash()."""
    return sum(ord(char) * (i + 7) for i, char in enumerate(text)) % 400 + 10
