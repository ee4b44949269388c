"""SlotTable: per-request state that changes every step, in arrays indexed by slot.

A steady decode step is a handful of vector operations on these arrays; Python touches a request only when something
happens to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tokenyard.scheduler_output import Slot

if TYPE_CHECKING:
    from tokenyard.arrays import IntArray, LongArray
    from tokenyard.scheduler.request_state import Request

_NO_TOKEN = -1  # pads rows of stop ids; never equal to a token id
_FIRST_WIDTH = 1024  # positions


class SlotTable:
    """C = capacity. A slot is reused only after the last in-flight step that names it has been updated."""

    def __init__(self, capacity: int, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        # [C, positions], as many as the longest request so far may fill: rows that lie far apart share no page.
        self.token_ids = np.zeros((capacity, min(max_model_len + 1, _FIRST_WIDTH)), dtype=np.int32)
        self.num_tokens = np.zeros(capacity, dtype=np.int32)  # known: prompt and delivered output
        self.num_computed = np.zeros(capacity, dtype=np.int32)  # scheduled so far, steps in flight included
        self.tokens_in_flight = np.zeros(capacity, dtype=np.int32)  # computed by steps not updated yet; 0 = in none
        self.sampled_in_flight = np.zeros(capacity, dtype=np.int32)  # sampled by them
        self.max_total_tokens = np.zeros(capacity, dtype=np.int32)
        self.valid_until = np.zeros(capacity, dtype=np.int32)  # tokens that the block table can hold
        self.min_stop_tokens = np.zeros(capacity, dtype=np.int32)  # no stop token counts below this length
        self.commit_at = np.zeros(capacity, dtype=np.int32)  # computed tokens at which the next block is full
        self.service_before = np.zeros(capacity, dtype=np.int64)  # tokens computed in earlier stays, less those hit
        self.generation = np.zeros(capacity, dtype=np.int32)
        self.stop_ids = np.full((capacity, 1), _NO_TOKEN, dtype=np.int32)  # [C, most stop ids of one request]
        self.is_held = np.zeros(capacity, dtype=np.bool_)  # False: free, or waiting for its last step to land
        self.requests: list[Request | None] = [None] * capacity  # None where not held
        self.request_ids = np.empty(capacity, dtype=np.object_)  # [C] of those that are held, or were
        self.names: list[Slot] = [Slot(index, 0) for index in range(capacity)]  # index and generation of each
        self.num_with_stop_ids = 0  # held slots whose request has any
        self.num_with_prompt_logprobs = 0  # held slots whose request asks for them
        self._free = list(range(capacity - 1, -1, -1))

    @property
    def capacity(self) -> int:
        return len(self.requests)

    def known_tokens(self, slots: LongArray, *, has_steps_in_flight: bool) -> IntArray:
        """[len(slots)] tokens that are known once what is in flight has landed."""
        known = self.num_tokens[slots]
        return known + self.sampled_in_flight[slots] if has_steps_in_flight else known

    def acquire(self, request: Request) -> Slot:
        """Give `request` a slot and move its tokens there."""
        if not self._free:
            self._grow()
        index = self._free.pop()
        tokens = request.token_ids
        if request.max_total_tokens >= self.token_ids.shape[1]:
            self._widen(request.max_total_tokens + 1)
        self.token_ids[index, : len(tokens)] = tokens
        self.num_tokens[index] = len(tokens)
        self.num_computed[index] = self.valid_until[index] = self.commit_at[index] = 0
        self.max_total_tokens[index] = request.max_total_tokens
        self.min_stop_tokens[index] = request.min_stop_tokens
        self.service_before[index] = request.attained_service
        self.generation[index] += 1
        self._set_stop_ids(index, request.core.stop_token_ids)
        self.requests[index] = request
        self.request_ids[index] = request.request_id
        self.is_held[index] = True
        self.num_with_stop_ids += bool(request.core.stop_token_ids)
        self.num_with_prompt_logprobs += request.asks_prompt_logprobs
        request.enter(self, index)
        slot = self.names[index] = Slot(index, int(self.generation[index]))
        return slot

    def detach(self, index: int) -> None:
        """The slot's request is gone; steps in flight may still name the slot, so it is not free yet."""
        if self.stop_ids[index, 0] != _NO_TOKEN:
            self.stop_ids[index] = _NO_TOKEN
            self.num_with_stop_ids -= 1
        request = self.requests[index]
        self.num_with_prompt_logprobs -= request is not None and request.asks_prompt_logprobs
        self.requests[index] = None
        self.is_held[index] = False

    def release(self, index: int) -> None:
        """The slot may be given to another request."""
        self._free.append(index)

    def _set_stop_ids(self, index: int, stop_ids: tuple[int, ...]) -> None:
        if len(stop_ids) > self.stop_ids.shape[1]:
            extra = len(stop_ids) - self.stop_ids.shape[1]
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, extra)), constant_values=_NO_TOKEN)
        self.stop_ids[index, : len(stop_ids)] = stop_ids  # the rest of the row is clear: `detach` saw to it

    def _widen(self, width: int) -> None:
        """Room for `width` positions in a row, and for more before this is needed again."""
        wide = min(max(width, 2 * self.token_ids.shape[1]), self._max_model_len + 1)
        narrow, self.token_ids = self.token_ids, np.zeros((self.capacity, wide), dtype=np.int32)  # untouched: no memory
        self.token_ids[:, : narrow.shape[1]] = narrow

    def _grow(self) -> None:
        """Double the capacity: slots whose last step is in flight are not free, so more may be needed than may run."""
        old, new = self.capacity, max(1, 2 * self.capacity)
        for name in (
            "token_ids",
            "num_tokens",
            "num_computed",
            "tokens_in_flight",
            "sampled_in_flight",
            "max_total_tokens",
            "min_stop_tokens",
            "valid_until",
            "commit_at",
            "service_before",
            "generation",
            "stop_ids",
            "is_held",
            "request_ids",
        ):
            array = getattr(self, name)
            grown = np.zeros((new, *array.shape[1:]), dtype=array.dtype)
            grown[:old] = array
            setattr(self, name, grown)
        self.stop_ids[old:] = _NO_TOKEN
        self.requests.extend([None] * (new - old))
        self.names.extend(Slot(index, 0) for index in range(old, new))
        self._free.extend(range(new - 1, old - 1, -1))
