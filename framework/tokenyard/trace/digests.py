"""Hashes of a step and of what came of it: equal ones mean equal bits. Times and request ids are left out."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from tokenyard.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tokenyard.engine_outputs import EngineCoreOutputs
    from tokenyard.interfaces.kv_cache import KVCacheManager
    from tokenyard.scheduler_output import RequestStart, SchedulerOutput, Slot

_SIZE = 8  # bytes
MOST_WHILE_IDLE = 1 << 10  # blocks of a pool that is hashed between two requests: 2 microseconds each
MOST_AT_THE_END = 1 << 22


def step_digest(output: SchedulerOutput) -> str:
    """Of all columns and sections of a step, but for block tables."""
    digest = blake2b(digest_size=_SIZE)
    _columns(
        digest,
        (output.slots, np.int64),
        (output.generations, np.int32),
        (output.num_computed_tokens, np.int32),
        (output.num_scheduled_tokens, np.int32),
        (output.samples, np.bool_),
        (output.num_draft_tokens, np.int32),
        (output.draft_token_ids, np.int32),
        (output.lora_ids, np.int32),
        (output.wants_prompt_logprobs, np.bool_),
    )
    for starts in (output.new, output.resumed):
        _text(digest, len(starts))
        for start in starts:
            _start(digest, start)
    _slots(digest, output.finished)
    _slots(digest, output.paused)
    return digest.hexdigest()


def tables_digest(before: str, output: SchedulerOutput | None, num_free: int) -> str:
    """Of what K/V blocks were handed out, copied and moved so far, and of how many are free."""
    digest = blake2b(before.encode(), digest_size=_SIZE)
    _text(digest, num_free)
    if output is not None:
        for start in (*output.new, *output.resumed):
            _columns(digest, *((table, np.int32) for table in start.block_ids))
        for update in output.block_table_updates:
            _text(digest, (update.slot.index, update.group, update.start))
            _columns(digest, (update.block_ids, np.int32))
        for copy in output.block_copies:
            _text(digest, tuple(copy))
        for transfer in output.host_transfers:
            _text(digest, (transfer.to_host, transfer.group))
            _columns(digest, (transfer.block_ids, np.int32), (transfer.host_block_ids, np.int32))
    return digest.hexdigest()


def outputs_digest(outputs: EngineCoreOutputs) -> str:
    """Of what the front end is told of a step, without statistics and log probabilities."""
    digest = blake2b(digest_size=_SIZE)
    _columns(digest, (outputs.num_tokens, np.int32), (outputs.token_ids, np.int32))
    _text(digest, [(end.reason.value, end.stop_reason, end.error) for end in outputs.finished])
    _text(digest, [row.num_cached_tokens for row in outputs.admitted])
    _text(digest, outputs.num_scheduled_tokens)
    return digest.hexdigest()


def cache_digest(manager: KVCacheManager, most: int) -> str | None:
    """Of what the prefix cache holds; None where the manager cannot be inspected, or has more than `most` blocks."""
    if manager.usage.num_total_blocks > most:
        return None
    try:
        inspection = manager.inspect()
    except UnsupportedError:
        return None
    digest = blake2b(digest_size=_SIZE)
    for key in sorted(inspection.cached_hashes):
        digest.update(key)
    held = sorted((block, count) for block, count in inspection.ref_counts.items() if count)
    _text(digest, held)
    return digest.hexdigest()


def _start(digest: blake2b, start: RequestStart) -> None:
    counts = (start.slot.index, start.slot.generation, start.num_prompt_tokens, start.num_computed_tokens)
    _text(digest, (*counts, start.lora_name, start.stop_token_ids, start.bad_words_token_ids))
    _columns(digest, (start.token_ids, np.int32))


def _slots(digest: blake2b, slots: Sequence[Slot]) -> None:
    _text(digest, [(slot.index, slot.generation) for slot in slots])


def _columns(digest: blake2b, *columns: tuple[NDArray[np.generic] | None, type[np.generic]]) -> None:
    """Each with its length, so that no two lists of columns spell the same bytes."""
    for values, dtype in columns:
        if values is None:
            digest.update(b"-")
            continue
        digest.update(len(values).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(values, dtype=dtype).tobytes())


def _text(digest: blake2b, value: object) -> None:
    digest.update(repr(value).encode())
    digest.update(b"\0")
