"""KVDriver: uses a K/V manager as a scheduler does, and keeps what each block would hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tokenyard.testing.contracts.base import seeded
from tokenyard.testing.errors import ContractViolation
from tokenyard.testing.invariants import check_blocks, inspection_of
from tokenyard.testing.memory import NULL_BLOCK, BlockMemory, TokenChain

if TYPE_CHECKING:
    from random import Random

    from tokenyard.arrays import IntArray
    from tokenyard.interfaces.kv_cache import Allocation, ExtraKey, Hit, KVCacheManager


@dataclass(eq=False, slots=True)
class DrivenRequest:
    """A request as a manager sees it."""

    request_id: str
    tokens: list[int]
    cache_salt: str | None = None
    lora_name: str | None = None
    skip_prefix_cache: bool = False
    extra_keys: Sequence[ExtraKey] = ()
    num_computed: int = 0
    chain: TokenChain = field(default_factory=TokenChain)

    def __post_init__(self) -> None:
        self.chain = TokenChain(repr((self.cache_salt, self.lora_name)), self.extra_keys)
        self.chain.extend(self.tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def token_ids(self) -> IntArray:
        return np.array(self.tokens, dtype=np.int32)

    def append(self, token_id: int) -> None:
        """One more token is known."""
        self.tokens.append(token_id)
        self.chain.extend([token_id])


class KVDriver:
    """Every call is checked: the manager's answer, its counts, and the content of what it hands out."""

    def __init__(
        self, manager: KVCacheManager, *, num_blocks: int, block_size: int, group_windows: Sequence[int | None]
    ) -> None:
        self.manager = manager
        self.live: dict[str, DrivenRequest] = {}
        self.handed_out: list[list[int]] = []  # block ids of each allocation, for comparing runs
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._windows = tuple(group_windows)
        self._memory = BlockMemory(num_blocks, block_size)

    def admit(self, request: DrivenRequest) -> Hit | None:
        """Look up, allocate for all known tokens; None when there was no room."""
        hit = self.lookup(request)
        if self.allocate(request, request.num_tokens, hit) is None:
            self.manager.free(request)  # drops what it may have remembered of the attempt
            self.check()
            return None
        self.live[request.request_id] = request
        request.num_computed = hit.tokens
        self.check_content(request)
        return hit

    def lookup(self, request: DrivenRequest) -> Hit:
        before = self.state()
        hit = self.manager.lookup(request)
        if self.manager.lookup(request) != hit or self.state() != before:
            raise ContractViolation("kv.lookup_pure", f"looking up '{request.request_id}' changed something")
        if hit.tokens and not 0 < hit.tokens < request.num_tokens:
            raise ContractViolation(
                "kv.hit_below_length", f"a hit of {hit.tokens} of {request.num_tokens} tokens leaves nothing to compute"
            )
        if hit.tokens % self._block_size:
            raise ContractViolation(
                "kv.hit_whole_blocks",
                f"a hit of {hit.tokens} tokens is not a whole number of blocks of {self._block_size}",
            )
        return hit

    def allocate(self, request: DrivenRequest, num_tokens: int, hit: Hit | None = None) -> Allocation | None:
        before = (self.state(), self._tables(request))
        num_free = self.manager.usage.num_free_blocks
        allocation = self.manager.allocate(request, num_tokens, hit)
        if allocation is None:
            self._check_refusal(request, num_tokens, num_free, before)
            return None
        self._check_allocation(request, num_tokens, allocation)
        return allocation

    def compute(self, request: DrivenRequest, count: int) -> bool:
        """Write the K/V of `count` more known tokens, and commit them; False when there was no room."""
        end = min(request.num_computed + count, request.num_tokens)
        if self.allocate(request, end) is None:
            return False
        for group, table in enumerate(self.manager.block_ids(request)):
            self._memory.write(group, table, request.num_computed, request.chain.digests[request.num_computed : end])
        request.num_computed = end
        self.check_content(request)
        self.manager.commit(request, end)
        self.check()
        return True

    def free(self, request: DrivenRequest) -> None:
        self.manager.free(request)
        self.live.pop(request.request_id, None)
        self.check()

    def reset(self) -> bool:
        is_free = self.manager.usage.num_free_blocks == self._num_blocks
        before = self.state()
        is_reset = self.manager.reset()
        if is_reset != is_free:
            raise ContractViolation("kv.reset", f"reset() returned {is_reset} with requests {list(self.live)} alive")
        if not is_reset and self.state() != before:
            raise ContractViolation("kv.reset", "reset() returned False and changed something")
        return is_reset

    def state(self) -> object:
        """What can be seen of a manager without a request."""
        inspection = inspection_of(self.manager)
        if inspection is None:
            return self.manager.usage
        return self.manager.usage, dict(inspection.ref_counts), inspection.cached_hashes

    def check(self) -> None:
        """Counts are right, and everybody still finds in its blocks what it wrote there."""
        check_blocks(self.manager, self.live.values(), self._num_blocks)
        for request in self.live.values():
            self.check_content(request)

    def check_content(self, request: DrivenRequest) -> None:
        done = request.num_computed
        for group, table in enumerate(self.manager.block_ids(request)):
            if len(table) * self._block_size < done:
                raise ContractViolation(
                    "table.covers_computed", f"{done} tokens are computed, the table of group {group} has {len(table)}"
                )
            window = self._windows[group]
            start = 0 if window is None else max(0, done - window + 1)
            if NULL_BLOCK in table[start // self._block_size : -(-done // self._block_size)]:
                raise ContractViolation("kv.null_block", f"position {start} to {done} are in use, the table is {table}")
            wrong = self._memory.first_wrong(group, table, start, request.chain.digests[:done])
            if wrong is not None:
                raise ContractViolation(
                    "kv.content",
                    f"'{request.request_id}' has other content at position {wrong} (group {group}) than it computed or "
                    f"hit: blocks {table.tolist()}",
                )

    # Inside

    def _tables(self, request: DrivenRequest) -> list[list[int]]:
        return [table.tolist() for table in self.manager.block_ids(request)]

    def _check_refusal(self, request: DrivenRequest, num_tokens: int, num_free: int, before: object) -> None:
        if (self.state(), self._tables(request)) != before:
            raise ContractViolation("kv.whole_or_nothing", "allocate() returned None and changed something")
        held = sum(len(table) for table in self._tables(request))
        most = len(self._windows) * -(-num_tokens // self._block_size) - held
        if most <= num_free:
            raise ContractViolation(
                "kv.refuses_only_when_short", f"allocate() refused {most} blocks at most, {num_free} are free"
            )

    def _check_allocation(self, request: DrivenRequest, num_tokens: int, allocation: Allocation) -> None:
        self.handed_out.append([int(one) for ids in allocation.new_block_ids for one in ids])
        tables = self._tables(request)
        if not all(len(table) * self._block_size >= num_tokens for table in tables):
            raise ContractViolation("table.covers_computed", f"tables {tables} do not hold {num_tokens} tokens")
        if allocation.valid_until_tokens < num_tokens or any(
            len(table) * self._block_size < allocation.valid_until_tokens for table in tables
        ):
            raise ContractViolation(
                "kv.valid_until",
                f"valid until {allocation.valid_until_tokens} tokens, tables {tables}, for {num_tokens}",
            )
        for table, new in zip(tables, allocation.new_block_ids, strict=True):
            if table[len(table) - len(new) :] != new.tolist():
                raise ContractViolation("kv.new_blocks", f"new blocks {new.tolist()} are not the end of {table}")


def random_calls(driver: KVDriver, seed: int, length: int, num_lookups: int = 0) -> None:
    """Requests with beginnings that many share come, grow and go; at the end all are gone."""
    draw = seeded(seed)
    for number in range(length):
        kind = draw.choices(["admit", "compute", "decode", "free", "reset"], [5, 6, 6, 3, 1])[0]
        if kind == "admit":
            driver.admit(_request(draw, number))
        elif kind == "reset":
            driver.reset()
        elif driver.live:
            _use(driver, driver.live[draw.choice(sorted(driver.live))], kind, draw)
        for _ in range(num_lookups):
            driver.manager.lookup(_request(seeded(number), 10_000 + number))
    for request in list(driver.live.values()):
        driver.free(request)


def _use(driver: KVDriver, request: DrivenRequest, kind: str, draw: Random) -> None:
    if kind == "free":
        driver.free(request)
    elif kind == "compute":
        driver.compute(request, draw.randint(1, 9))
    elif request.num_computed == request.num_tokens:
        request.append(draw.randint(0, 1))
        driver.compute(request, 1)


def _request(draw: Random, number: int) -> DrivenRequest:
    # Two tokens and two beginnings: equal prefixes are common, and so are equal blocks after unequal ones.
    tokens = [draw.randint(0, 1)] * draw.choice([0, 4, 8, 16]) + draw.choices([0, 1], k=draw.randint(1, 6))
    return DrivenRequest(f"k{number}", tokens, cache_salt=draw.choice([None, None, "tenant"]))
