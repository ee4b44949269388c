"""ModelRunner: runs one step on one device: inputs, forward pass, sampling."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from tokenyard.interfaces.attention import AttentionBackend, AttentionBatch
from tokenyard.logprob_rows import of_kept_tokens
from tokenyard.model.causal_lm import CausalLM, PagedAttention
from tokenyard.runner_output import ModelRunnerOutput
from tokenyard.worker.prompt_logprobs import prompt_logprobs
from tokenyard.worker.sampler import NOT_FINITE, Sampler, SamplingBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenyard.arrays import IntArray, LongArray
    from tokenyard.interfaces.attention import AttentionLayer
    from tokenyard.runner_output import Logprobs, PromptLogprobs
    from tokenyard.scheduler_output import SchedulerOutput
    from tokenyard.worker.input_batch import InputBatch, PromptRows, StepInputs

_NO_TOKENS: IntArray = np.empty(0, dtype=np.int32)


class _Executed(NamedTuple):
    """A step whose tokens are not sampled yet."""

    output: SchedulerOutput
    prompts: tuple[PromptRows, ...]
    states: torch.Tensor  # of the rows that sample, then of those that tell of prompt tokens


class _SampledRows(NamedTuple):
    """Sampling parameters as columns, and the rows that they are of."""

    version: int  # of the batch
    slots: LongArray
    columns: SamplingBatch


class _Tokens(NamedTuple):
    """What was sampled. N = rows that sampled a token."""

    rows: LongArray  # [N] of the step
    token_ids: IntArray  # [N]
    logprobs: Logprobs | None


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
        seed: int,
    ) -> None:
        self._model = model
        self._backend = backend
        self._attention = PagedAttention(backend, layers, kv_caches)
        self._batch = batch
        self._sampler = sampler
        self._device = device
        self._seed = seed
        self._executed: _Executed | None = None
        self._sampling: _SampledRows | None = None  # of the last batch, while it stays the same

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> None:
        """Forward pass of a step, up to its hidden states; they wait for `sample`."""
        self._batch.apply(output)
        inputs = self._batch.build(output)
        self._attention.begin_step([self._backend.plan(batch) for batch in self._attention_batches(inputs)])
        rows = inputs.sampled_rows
        if inputs.prompts:
            rows = np.concatenate((rows, inputs.prompt_rows))
        states = self._model.states(
            self._to_device(inputs.token_ids), self._to_device(inputs.positions), self._to_device(rows), self._attention
        )
        self._executed = _Executed(output, inputs.prompts, states)

    @torch.inference_mode()
    def sample(self) -> ModelRunnerOutput:
        """Tokens of the step that was executed last, and prompt logprobs; a row that fails has neither."""
        if self._executed is None:
            raise RuntimeError("sample() without a step that was executed and not sampled yet")
        step, self._executed = self._executed, None
        output = step.output
        chunks, failed = self._prompt_logprobs(step)
        errors = dict.fromkeys(failed, NOT_FINITE)
        tokens = self._sample(step, errors)
        num_sampled = np.zeros(output.num_rows, dtype=np.int32)
        num_sampled[tokens.rows] = 1
        named = zip(self._batch.requests(output.slots[list(errors)]), errors.values(), strict=True) if errors else ()
        return ModelRunnerOutput(
            step=output.step,
            num_sampled=num_sampled,
            token_ids=tokens.token_ids,
            logprobs=tokens.logprobs,
            prompt_logprobs=chunks,
            errors={request.request_id: text for request, text in named},
        )

    def _prompt_logprobs(self, step: _Executed) -> tuple[Sequence[PromptLogprobs], Sequence[int]]:
        """What the step tells of prompts, and the rows that failed."""
        if not step.prompts:
            return (), ()
        states = step.states[np.count_nonzero(step.output.samples) :]
        return prompt_logprobs(step.prompts, states, self._model.logits, self._model.shape.vocab_size)

    def _sample(self, step: _Executed, errors: dict[int, str]) -> _Tokens:
        """Tokens of the rows that sample and have no error; to `errors` (row -> why) come those that fail here."""
        rows = np.flatnonzero(step.output.samples)
        if not len(rows):
            return _Tokens(rows, _NO_TOKENS, None)
        states = step.states[: len(rows)]
        if errors:
            is_good = ~np.isin(rows, list(errors))
            rows, states = rows[is_good], states[torch.from_numpy(is_good).to(states.device)]
            if not len(rows):
                return _Tokens(rows, _NO_TOKENS, None)
        return self._choose(step.output, rows, self._model.logits(states), errors)

    def _choose(
        self, output: SchedulerOutput, rows: LongArray, logits: torch.Tensor, errors: dict[int, str]
    ) -> _Tokens:
        slots, positions = output.slots[rows], (output.num_computed_tokens + output.num_scheduled_tokens)[rows]
        token_ids, logprobs, failed = self._sampler.sample(
            logits,
            self._columns(slots, logits.shape[-1]),
            positions,
            lambda row: self._batch.tokens(int(slots[row]), int(positions[row])),
        )
        if failed:
            errors |= {int(rows[index]): text for index, text in failed.items()}
            is_good = ~np.isin(np.arange(len(rows)), list(failed))
            rows, slots, positions, token_ids = rows[is_good], slots[is_good], positions[is_good], token_ids[is_good]
            logprobs = logprobs and of_kept_tokens(logprobs, is_good)
        self._batch.append(slots, positions, token_ids)
        return _Tokens(rows, token_ids, logprobs)

    def _columns(self, slots: LongArray, vocab_size: int) -> SamplingBatch:
        rows = self._sampling
        if rows is None or rows.version != self._batch.version or not np.array_equal(rows.slots, slots):
            columns = SamplingBatch.of(self._batch.requests(slots), vocab_size, self._device, self._seed)
            rows = self._sampling = _SampledRows(self._batch.version, slots, columns)
        return rows.columns

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
                host_block_table=table,
            )
            for table, mapping in zip(inputs.block_tables, inputs.slot_mappings, strict=True)
        ]

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)
