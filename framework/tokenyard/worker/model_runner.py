"""ModelRunner: runs one step on one device: inputs, forward pass, sampling."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from tokenyard.model.causal_lm import CausalLM, PagedAttention
from tokenyard.model.ranks import ONE_RANK, RankGroup
from tokenyard.worker.decode_graphs import DecodeGraphs
from tokenyard.worker.last_tokens import LastTokens
from tokenyard.worker.prompt_logprobs import prompt_logprobs
from tokenyard.worker.rank_sampling import take_part, tell_tokens
from tokenyard.worker.sampled_step import SampledRows, SampledStep
from tokenyard.worker.sampler import NOT_FINITE, Sampler, SamplingBatch
from tokenyard.worker.step_tensors import upload_step
from tokenyard.worker.stream import DeviceStream, HostStream
from tokenyard.worker.uploads import to_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenyard.arrays import IntArray, LongArray
    from tokenyard.interfaces.attention import AttentionBackend, AttentionLayer
    from tokenyard.runner_output import PromptLogprobs
    from tokenyard.scheduler_output import HostTransfer, SchedulerOutput
    from tokenyard.worker.graph_recorder import GraphRecorder
    from tokenyard.worker.host_blocks import HostBlocks
    from tokenyard.worker.input_batch import InputBatch, PromptRows, StepInputs


class _Executed(NamedTuple):
    """A step whose tokens are not sampled yet."""

    output: SchedulerOutput
    prompts: tuple[PromptRows, ...]
    states: torch.Tensor  # of the rows that sample, then of those that tell of prompt tokens


class _Columns(NamedTuple):
    """Sampling parameters as columns, and the rows that they are of."""

    version: int  # of the batch
    slots: LongArray
    batch: SamplingBatch
    device_slots: torch.Tensor | None  # None = their tokens do not stay on the device


class ModelRunner:
    """`execute` and `sample` alternate; both run under torch.inference_mode, in one thread.

    On a device that works behind the host neither waits for it, but where a row needs to: the tokens stay on the device
    as the next step's inputs, and the result that `sample` returns is what waits for them. Of several ranks the leader
    samples; the others' results are empty, and the tokens come to them from it.
    """

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
        stream: DeviceStream | None = None,  # None = the device is a CPU
        ranks: RankGroup = ONE_RANK,
        num_slots: int = 0,  # that keep their last tokens on the device; the others' steps are waited for
        host_blocks: HostBlocks | None = None,  # None = no step has host transfers
    ) -> None:
        self._model = model
        self._backend = backend
        self._attention = PagedAttention(backend, layers, kv_caches)
        self._batch = batch
        self._sampler = sampler
        self._device = device
        self._seed = seed
        self._ranks = ranks
        self._stream = stream or HostStream()
        self._host_blocks = host_blocks
        self._last_tokens = LastTokens(num_slots, device)
        self._graphs: DecodeGraphs | None = None
        self._executed: _Executed | None = None
        self._in_flight: deque[SampledStep] = deque()  # steps whose tokens the batch does not know yet, oldest first
        self._columns: _Columns | None = None  # of the last batch, while it stays the same

    @torch.inference_mode()
    def record_graphs(self, recorder: GraphRecorder, sizes: Sequence[int], max_seq_len: int) -> None:
        """From now on replay decoding steps of up to so many rows. Raises what recording raises."""
        self._graphs = DecodeGraphs(
            forward=self._states,
            backend=self._backend,
            stream=self._stream,
            recorder=recorder,
            device=self._device,
            num_groups=self._batch.num_groups,
            max_blocks=self._batch.max_blocks,
            max_seq_len=max_seq_len,
            sizes=sizes,
        )

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> None:
        """Forward pass of a step, up to its hidden states; they wait for `sample`."""
        self._land(waits=False)
        if output.host_transfers:
            self._transfer(output.host_transfers)
        self._batch.apply(output)
        inputs = self._batch.build(output)
        if self._graphs is not None and self._graphs.can_run(inputs):
            states = self._replay(self._graphs, inputs)
        else:
            states = self._run(inputs)
        self._executed = _Executed(output, inputs.prompts, states)

    @torch.inference_mode()
    def sample(self) -> SampledStep:
        """Tokens of the step that was executed last, and prompt logprobs; a row that fails has neither."""
        if self._executed is None:
            raise RuntimeError("sample() without a step that was executed and not sampled yet")
        step, self._executed = self._executed, None
        if not self._ranks.is_leader:
            self._follow(step)
            return SampledStep(step.output, None, (), {})
        chunks, failed = self._prompt_logprobs(step)
        requests = self._batch.requests(step.output.slots[list(failed)]) if failed else ()
        sampled = self._sample(step, failed)
        tell_tokens(self._ranks, step.output, sampled, self._device)
        result = SampledStep(step.output, sampled, chunks, {request.request_id: NOT_FINITE for request in requests})
        if sampled is not None:
            self._keep(result, sampled)
        return result

    def _transfer(self, transfers: Sequence[HostTransfer]) -> None:
        if self._host_blocks is None:
            raise RuntimeError("a step copies blocks to host memory, and the plan of the K/V cache has none")
        self._host_blocks.transfer(transfers)

    def _replay(self, graphs: DecodeGraphs, inputs: StepInputs) -> torch.Tensor:
        graphs.load(inputs)
        states = graphs.replay()
        rows = inputs.sampled_rows
        return states if len(rows) == len(states) else states[to_device(rows, self._device)]

    def _run(self, inputs: StepInputs) -> torch.Tensor:
        """Kernel by kernel."""
        rows = inputs.sampled_rows
        tensors, wanted = upload_step(
            self._stream, inputs, np.concatenate((rows, inputs.prompt_rows)) if inputs.prompts else rows
        )
        token_ids = tensors.token_ids
        if self._stream.is_async and (inputs.token_ids < 0).any():  # also of a row that failed, and that nobody reads
            token_ids = self._last_tokens.fill(token_ids)
        plans = [self._backend.plan(batch) for batch in tensors.batches(inputs)]
        self._attention.begin_step(plans)
        return self._model.states(token_ids, tensors.positions, wanted, self._attention)

    def _states(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, plans: Sequence[object]
    ) -> torch.Tensor:
        """What a graph records: any of its rows may take its token from the device."""
        self._attention.begin_step(plans)
        return self._model.states(self._last_tokens.fill(token_ids), positions, rows, self._attention)

    def _prompt_logprobs(self, step: _Executed) -> tuple[Sequence[PromptLogprobs], Sequence[int]]:
        """What the step tells of prompts, and the rows that failed."""
        if not step.prompts:
            return (), ()
        states = step.states[np.count_nonzero(step.output.samples) :]
        return prompt_logprobs(step.prompts, states, self._model.logits, self._model.shape.vocab_size)

    def _sample(self, step: _Executed, failed: Sequence[int]) -> SampledRows | None:
        """Choose tokens for the rows that sample and have not failed; None when there are none."""
        output = step.output
        rows = np.flatnonzero(output.samples)
        if not len(rows):
            return None
        logits = self._model.logits(step.states[: len(rows)])
        if failed:
            is_good = ~np.isin(rows, list(failed))
            rows, logits = rows[is_good], logits[to_device(is_good, logits.device)]
        if not len(rows):
            return None
        slots, positions = output.slots[rows], _new_positions(output, rows)
        columns = self._columns_of(slots, logits.shape[-1])
        if columns.batch.edits.need_history:
            self._land(waits=True)
        chosen = self._sampler.choose(
            logits, columns.batch, positions, lambda row: self._batch.tokens(int(slots[row]), int(positions[row]))
        )
        return SampledRows(
            rows=rows,
            slots=slots,
            positions=positions,
            columns=columns.batch,
            chosen=chosen,
            download=self._stream.download(chosen.results),
            device_slots=columns.device_slots,
        )

    def _follow(self, step: _Executed) -> None:
        """Take the leader's tokens over as inputs of the next step."""
        token_ids = take_part(self._ranks, self._model, step.output, step.states, self._device)
        if token_ids is None:
            return
        rows = np.flatnonzero(step.output.samples)
        slots, positions = step.output.slots[rows], _new_positions(step.output, rows)
        if self._stream.is_async and self._last_tokens.has(slots):
            self._last_tokens.store(to_device(slots.astype(np.int64), self._device), token_ids)
            self._batch.append(slots, positions, LastTokens.stand_ins(slots))
        else:
            self._batch.append(slots, positions, token_ids.cpu().numpy())

    def _keep(self, result: SampledStep, sampled: SampledRows) -> None:
        """Make the tokens inputs of the next step: on the device where that can be, else as soon as they are here."""
        if sampled.device_slots is None or sampled.columns.logprobs is not None:
            self._batch.append(*result.tokens())
            return
        self._last_tokens.store(sampled.device_slots, sampled.chosen.token_ids)
        self._batch.append(sampled.slots, sampled.positions, LastTokens.stand_ins(sampled.slots))
        self._in_flight.append(result)

    def _land(self, *, waits: bool) -> None:
        """Tell the batch the tokens of steps that are done, or of all."""
        while self._in_flight and (waits or self._in_flight[0].is_done()):
            self._batch.append(*self._in_flight.popleft().tokens())

    def _columns_of(self, slots: LongArray, vocab_size: int) -> _Columns:
        columns = self._columns
        if columns is None or columns.version != self._batch.version or not np.array_equal(columns.slots, slots):
            batch = SamplingBatch.of(self._batch.requests(slots), vocab_size, self._device, self._seed)
            stays = self._stream.is_async and self._last_tokens.has(slots)
            device_slots = to_device(slots.astype(np.int64), self._device) if stays else None
            columns = self._columns = _Columns(self._batch.version, slots, batch, device_slots)
        return columns


def _new_positions(output: SchedulerOutput, rows: LongArray) -> IntArray:
    """Of the tokens that these rows of a step sample."""
    return (output.num_computed_tokens + output.num_scheduled_tokens)[rows]
