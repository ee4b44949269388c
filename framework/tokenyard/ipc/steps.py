"""Steps as messages: a SchedulerOutput to the workers, and the ModelRunnerOutput that comes back.

Columns travel as bytes, so that a step of many rows costs little more than one of few. What arrives is read-only, like
what was sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from tokenyard.ipc.codec import Array
from tokenyard.ipc.logprobs import (
    LogprobsMessage,
    PromptLogprobsMessage,
    logprobs_from_message,
    logprobs_to_message,
    prompt_logprobs_from_message,
    prompt_logprobs_to_message,
)
from tokenyard.ipc.params import SamplingMessage, params_from_message, params_to_message
from tokenyard.runner_output import ModelRunnerOutput
from tokenyard.sampling_params import SamplingParams
from tokenyard.scheduler_output import BlockCopy, BlockTableUpdate, HostTransfer, RequestStart, SchedulerOutput, Slot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tokenyard.arrays import IntArray

SlotMessage = tuple[int, int]  # index, generation
BlockTableMessage = tuple[int, int, int, int, Array]  # slot, group, start, block ids
TransferMessage = tuple[Array, Array, bool, int]  # a HostTransfer


class StartMessage(msgspec.Struct, frozen=True, array_like=True):
    """A RequestStart."""

    request_id: str
    slot: SlotMessage
    token_ids: Array
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: tuple[Array, ...]
    params: SamplingMessage
    lora_name: str | None
    stop_token_ids: tuple[int, ...]
    bad_words_token_ids: tuple[tuple[int, ...], ...]


class StepMessage(msgspec.Struct, frozen=True, omit_defaults=True, tag="step"):
    """A SchedulerOutput."""

    step: int
    scheduled_at: float
    slots: Array
    generations: Array
    num_computed_tokens: Array
    num_scheduled_tokens: Array
    samples: Array
    new: tuple[StartMessage, ...] = ()
    resumed: tuple[StartMessage, ...] = ()
    block_table_updates: tuple[BlockTableMessage, ...] = ()
    finished: tuple[SlotMessage, ...] = ()
    paused: tuple[SlotMessage, ...] = ()
    block_copies: tuple[tuple[int, int, int], ...] = ()
    host_transfers: tuple[TransferMessage, ...] = ()
    num_draft_tokens: Array | None = None
    draft_token_ids: Array | None = None
    lora_ids: Array | None = None
    wants_prompt_logprobs: Array | None = None


class StepResultMessage(msgspec.Struct, frozen=True, omit_defaults=True, tag="result"):
    """A ModelRunnerOutput."""

    step: int
    num_sampled: Array
    token_ids: Array
    logprobs: LogprobsMessage | None = None
    prompt_logprobs: tuple[PromptLogprobsMessage, ...] = ()
    errors: Mapping[str, str] = {}
    draft_token_ids: tuple[Array, ...] | None = None
    finished_kv_transfers: tuple[str, ...] = ()


def step_to_message(output: SchedulerOutput) -> StepMessage:
    """What crosses processes; raises TypeError for what cannot: requests that pool, and K/V transfers."""
    if output.kv_transfers:
        raise TypeError("K/V transfers do not travel between processes in this version")
    return StepMessage(
        step=output.step,
        scheduled_at=output.scheduled_at,
        slots=_array(output.slots, np.int64),
        generations=_array(output.generations, np.int32),
        num_computed_tokens=_array(output.num_computed_tokens, np.int32),
        num_scheduled_tokens=_array(output.num_scheduled_tokens, np.int32),
        samples=_array(output.samples, np.bool_),
        new=tuple(map(_start_to_message, output.new)),
        resumed=tuple(map(_start_to_message, output.resumed)),
        block_table_updates=tuple(map(_update_to_message, output.block_table_updates)),
        finished=_slots_to_message(output.finished),
        paused=_slots_to_message(output.paused),
        block_copies=tuple((copy.source, copy.target, copy.group) for copy in output.block_copies),
        host_transfers=tuple(map(_transfer_to_message, output.host_transfers)),
        num_draft_tokens=_optional_array(output.num_draft_tokens, np.int32),
        draft_token_ids=_optional_array(output.draft_token_ids, np.int32),
        lora_ids=_optional_array(output.lora_ids, np.int32),
        wants_prompt_logprobs=_optional_array(output.wants_prompt_logprobs, np.bool_),
    )


def step_from_message(message: StepMessage) -> SchedulerOutput:
    """Raises ValueError when its columns are no step's."""
    wants = message.wants_prompt_logprobs
    return SchedulerOutput(
        step=message.step,
        scheduled_at=message.scheduled_at,
        slots=message.slots.values(np.int64, 1),
        generations=message.generations.values(np.int32, 1),
        num_computed_tokens=message.num_computed_tokens.values(np.int32, 1),
        num_scheduled_tokens=message.num_scheduled_tokens.values(np.int32, 1),
        samples=message.samples.values(np.bool_, 1),
        new=tuple(map(_start_from_message, message.new)),
        resumed=tuple(map(_start_from_message, message.resumed)),
        block_table_updates=tuple(map(_update_from_message, message.block_table_updates)),
        finished=tuple(Slot(*slot) for slot in message.finished),
        paused=tuple(Slot(*slot) for slot in message.paused),
        block_copies=tuple(BlockCopy(*copy) for copy in message.block_copies),
        host_transfers=tuple(map(_transfer_from_message, message.host_transfers)),
        num_draft_tokens=_optional_ints(message.num_draft_tokens),
        draft_token_ids=_optional_ints(message.draft_token_ids),
        lora_ids=_optional_ints(message.lora_ids),
        wants_prompt_logprobs=None if wants is None else wants.values(np.bool_, 1),
    )


def result_to_message(result: ModelRunnerOutput) -> StepResultMessage:
    """What crosses processes; raises TypeError for what cannot: pooled states."""
    if result.pooled:
        raise TypeError("pooled states do not travel between processes in this version")
    drafts = result.draft_token_ids
    return StepResultMessage(
        step=result.step,
        num_sampled=_array(result.num_sampled, np.int32),
        token_ids=_array(result.token_ids, np.int32),
        logprobs=None if result.logprobs is None else logprobs_to_message(result.logprobs),
        prompt_logprobs=tuple(map(prompt_logprobs_to_message, result.prompt_logprobs)),
        errors=dict(result.errors),
        draft_token_ids=None if drafts is None else tuple(_array(draft, np.int32) for draft in drafts),
        finished_kv_transfers=tuple(result.finished_kv_transfers),
    )


def result_from_message(message: StepResultMessage) -> ModelRunnerOutput:
    """Raises ValueError when its columns are no result's."""
    drafts = message.draft_token_ids
    return ModelRunnerOutput(
        step=message.step,
        num_sampled=message.num_sampled.values(np.int32, 1),
        token_ids=message.token_ids.values(np.int32, 1),
        logprobs=None if message.logprobs is None else logprobs_from_message(message.logprobs),
        prompt_logprobs=tuple(map(prompt_logprobs_from_message, message.prompt_logprobs)),
        errors=dict(message.errors),
        draft_token_ids=None if drafts is None else tuple(draft.values(np.int32, 1) for draft in drafts),
        finished_kv_transfers=message.finished_kv_transfers,
    )


def _start_to_message(start: RequestStart) -> StartMessage:
    if not isinstance(start.params, SamplingParams):
        raise TypeError(f"request {start.request_id} pools; workers sample")
    return StartMessage(
        request_id=start.request_id,
        slot=(start.slot.index, start.slot.generation),
        token_ids=_array(start.token_ids, np.int32),
        num_prompt_tokens=start.num_prompt_tokens,
        num_computed_tokens=start.num_computed_tokens,
        block_ids=tuple(_array(table, np.int32) for table in start.block_ids),
        params=params_to_message(start.params),
        lora_name=start.lora_name,
        stop_token_ids=start.stop_token_ids,
        bad_words_token_ids=start.bad_words_token_ids,
    )


def _start_from_message(message: StartMessage) -> RequestStart:
    return RequestStart(
        request_id=message.request_id,
        slot=Slot(*message.slot),
        token_ids=message.token_ids.values(np.int32, 1),
        num_prompt_tokens=message.num_prompt_tokens,
        num_computed_tokens=message.num_computed_tokens,
        block_ids=tuple(table.values(np.int32, 1) for table in message.block_ids),
        params=params_from_message(message.params),
        lora_name=message.lora_name,
        stop_token_ids=message.stop_token_ids,
        bad_words_token_ids=message.bad_words_token_ids,
    )


def _update_to_message(update: BlockTableUpdate) -> BlockTableMessage:
    slot = update.slot
    return slot.index, slot.generation, update.group, update.start, _array(update.block_ids, np.int32)


def _update_from_message(message: BlockTableMessage) -> BlockTableUpdate:
    index, generation, group, start, block_ids = message
    return BlockTableUpdate(Slot(index, generation), group, start, block_ids.values(np.int32, 1))


def _transfer_to_message(transfer: HostTransfer) -> TransferMessage:
    device, host = _array(transfer.block_ids, np.int32), _array(transfer.host_block_ids, np.int32)
    return device, host, transfer.to_host, transfer.group


def _transfer_from_message(message: TransferMessage) -> HostTransfer:
    device, host, to_host, group = message
    block_ids, host_block_ids = device.values(np.int32, 1), host.values(np.int32, 1)
    if len(block_ids) != len(host_block_ids):
        raise ValueError(f"{len(block_ids)} blocks are to be copied to or from {len(host_block_ids)} host blocks")
    return HostTransfer(block_ids, host_block_ids, to_host, group)


def _slots_to_message(slots: Sequence[Slot]) -> tuple[SlotMessage, ...]:
    return tuple((slot.index, slot.generation) for slot in slots)


def _array(values: NDArray[np.generic], dtype: type[np.generic]) -> Array:
    return Array.of(np.asarray(values, dtype=dtype))


def _optional_array(values: NDArray[np.generic] | None, dtype: type[np.generic]) -> Array | None:
    return None if values is None else _array(values, dtype)


def _optional_ints(message: Array | None) -> IntArray | None:
    return None if message is None else message.values(np.int32, 1)
