"""ModelRunner: runs one step on one device: inputs, forward pass, sampling."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from tokenyard.interfaces.attention import AttentionBackend, AttentionBatch
from tokenyard.model.causal_lm import CausalLM, PagedAttention
from tokenyard.runner_output import ModelRunnerOutput
from tokenyard.worker.sampler import Sampler, SamplingBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenyard.arrays import IntArray, LongArray
    from tokenyard.interfaces.attention import AttentionLayer
    from tokenyard.scheduler_output import SchedulerOutput
    from tokenyard.worker.input_batch import InputBatch, StepInputs

_NOT_FINITE = "the model's logits are not finite numbers: its weights are damaged, or too large for this dtype"


class _SampledRows(NamedTuple):
    """Sampling parameters as columns, and the rows that they are of."""

    version: int  # of the batch
    slots: LongArray
    columns: SamplingBatch


class ModelRunner:
    """`execute` and `sample` alternate; both run under torch.inference_mode."""

    def __init__(
        self,
        *,
        model: CausalLM,
        backend: AttentionBackend,
        layers: Sequence[AttentionLayer],
        kv_caches: Sequence[tuple[torch.Tensor, torch.Tensor]],
        batch: InputBatch,
        sampler: Sampler,
        device: torch.device,
    ) -> None:
        self._model = model
        self._backend = backend
        self._attention = PagedAttention(backend, layers, kv_caches)
        self._batch = batch
        self._sampler = sampler
        self._device = device
        self._pending: tuple[SchedulerOutput, torch.Tensor] | None = None
        self._sampling: _SampledRows | None = None  # of the last batch, while it stays the same

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> None:
        """Forward pass of a step; its logits wait for `sample`."""
        self._batch.apply(output)
        inputs = self._batch.build(output)
        self._attention.begin_step([self._backend.plan(batch) for batch in self._attention_batches(inputs)])
        logits = self._model.forward(
            self._to_device(inputs.token_ids),
            self._to_device(inputs.positions),
            self._to_device(inputs.logits_rows),
            self._attention,
        )
        self._pending = (output, logits)

    @torch.inference_mode()
    def sample(self) -> ModelRunnerOutput:
        """Tokens of the step that was executed last."""
        if self._pending is None:
            raise RuntimeError("sample() without a step that was executed and not sampled yet")
        (output, logits), self._pending = self._pending, None
        rows = np.flatnonzero(output.samples)
        errors: dict[str, str] = {}
        if len(rows):
            is_finite = _finite_rows(logits)
            failed = self._batch.requests(output.slots[rows[~is_finite]])
            errors = {request.request_id: _NOT_FINITE for request in failed}
            rows, logits = rows[is_finite], logits if is_finite.all() else logits[torch.from_numpy(is_finite)]
        num_sampled = np.zeros(output.num_rows, dtype=np.int32)
        num_sampled[rows] = 1
        slots = output.slots[rows]
        positions = (output.num_computed_tokens + output.num_scheduled_tokens)[rows]
        token_ids = self._sample(logits, slots, positions) if len(rows) else np.empty(0, dtype=np.int32)
        self._batch.append(slots, positions, token_ids)
        return ModelRunnerOutput(step=output.step, num_sampled=num_sampled, token_ids=token_ids, errors=errors)

    def _sample(self, logits: torch.Tensor, slots: LongArray, positions: IntArray) -> IntArray:
        rows = self._sampling
        if rows is None or rows.version != self._batch.version or not np.array_equal(rows.slots, slots):
            columns = SamplingBatch.of(self._batch.requests(slots), logits.shape[-1], self._device)
            rows = self._sampling = _SampledRows(self._batch.version, slots, columns)
        tokens: IntArray = self._sampler.sample(logits, rows.columns, positions).to(torch.int32).cpu().numpy()
        return tokens

    def _attention_batches(self, inputs: StepInputs) -> list[AttentionBatch]:
        query_lens = np.diff(inputs.query_start)
        return [
            AttentionBatch(
                query_start_loc=self._to_device(inputs.query_start),
                seq_lens=self._to_device(inputs.seq_lens),
                block_table=self._to_device(table),
                slot_mapping=self._to_device(mapping),
                query_lens=query_lens.tolist(),
                context_lens=inputs.seq_lens.tolist(),
                max_query_len=int(query_lens.max()),
                max_seq_len=int(inputs.seq_lens.max()),
            )
            for table, mapping in zip(inputs.block_tables, inputs.slot_mappings, strict=True)
        ]

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


def _finite_rows(logits: torch.Tensor) -> np.ndarray:
    """[rows] whether a token can be chosen: the greatest logit is NaN when any is, infinite when one or all are."""
    finite: np.ndarray = torch.isfinite(logits.amax(dim=-1)).cpu().numpy()
    return finite
