"""KVDriver: uses a K/V manager as a scheduler does, and keeps what each block would hold, on the device and off it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tokenyard.interfaces.kv_cache import KVCacheManager
from tokenyard.testing.errors import ContractViolation
from tokenyard.testing.invariants import check_blocks, inspection_of
from tokenyard.testing.memory import NULL_BLOCK, BlockMemory, TokenChain
from tokenyard.testing.trace import Trace, short

if TYPE_CHECKING:
    from tokenyard.arrays import IntArray
    from tokenyard.interfaces.kv_cache import Allocation, ExtraKey, Hit
    from tokenyard.request import Retention


_NUM_ASKED = 3  # look-ups that are asked again after each call


@dataclass(eq=False, slots=True)
class DrivenRequest:
    """A request as a manager sees it."""

    request_id: str
    tokens: list[int]
    cache_salt: str | None = None
    lora_name: str | None = None
    skip_prefix_cache: bool = False
    extra_keys: Sequence[ExtraKey] = ()
    retention: Retention = "normal"
    num_computed: int = 0
    num_swapped: int = 0  # tokens at its start that host memory holds
    chain: TokenChain = field(default_factory=TokenChain)

    def __post_init__(self) -> None:
        self.chain = TokenChain(repr((self.cache_salt, self.lora_name)), self.extra_keys)
        self.chain.extend(self.tokens)

    def __str__(self) -> str:
        return f"'{self.request_id}' {short(self.tokens)}"

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
    """Every call is checked: the manager's answer, its counts, and the content of what it hands out.

    Copies to and from host memory are made as late as a step allows: when somebody computes, or is freed.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        *,
        num_blocks: int,
        block_size: int,
        group_windows: Sequence[int | None],
        num_host_blocks: int = 0,
        swaps: bool = False,
    ) -> None:
        self.manager = manager
        self.live: dict[str, DrivenRequest] = {}
        self.swapped: dict[str, DrivenRequest] = {}
        self.handed_out: list[object] = []  # block ids of each allocation and copy, for comparing runs
        self._num_blocks = num_blocks
        self._num_host_blocks = num_host_blocks
        # Of a window group what later queries read may be gone already, so it may refuse.
        self._must_swap = swaps and not any(group_windows)
        self._block_size = block_size
        self._windows = tuple(group_windows)
        self._memory = BlockMemory(num_blocks, block_size, num_host_blocks)
        self._is_settled = True  # no copies are due
        self._asked: dict[str, tuple[DrivenRequest, int, int | None, Hit]] = {}  # the last look-ups, by id
        self._trace = Trace()

    def admit(self, request: DrivenRequest) -> Hit | None:
        """Look up, allocate for all known tokens; None when there was no room."""
        with self._trace.call(f"admit({request})"):
            hit = self._enter(request)
            if hit is not None and self._is_settled:
                self.check_content(request)
        return hit

    def swap_out(self, request: DrivenRequest) -> bool:
        """A live request gives its blocks back, and host memory keeps what it computed; False = it does not."""
        with self._trace.call(f"swap_out({request}, {request.num_computed})"):
            before, num_free = (self.state(), self._tables(request)), self._num_free_host
            is_done = self.manager.swap_out(request, request.num_computed)
            after = (self.state(), self._tables(request))
            num_needed = request.num_computed // self._block_size * len(self._windows)
            if not is_done and (after, self._num_free_host) != (before, num_free):
                raise ContractViolation("kv.swap_whole_or_nothing", "swap_out() returned False and changed something")
            if not is_done and self._must_swap and 0 < num_needed <= num_free:
                raise ContractViolation(
                    "kv.swap_refuses_only_when_short",
                    f"swap_out() refused {num_needed} blocks, {num_free} of host memory are free",
                )
            if not is_done:
                return False
            if after != before:
                raise ContractViolation("kv.swap_copies", "swap_out() changed the device before free() was called")
            self._leave(request)
        return True

    def take_back(self, request: DrivenRequest) -> bool:
        """A request that was swapped out goes on; False when there was no room, and it still waits."""
        with self._trace.call(f"take_back({request})"):
            hit = self._enter(request)
            if hit is None:
                return False
            del self.swapped[request.request_id]
            most = (request.num_tokens - 1) // self._block_size * self._block_size
            if not any(self._windows) and hit.tokens < min(request.num_swapped, most):
                raise ContractViolation(
                    "kv.swapped_is_found", f"{request.num_swapped} tokens were swapped out, {hit.tokens} are found"
                )
            request.num_swapped = 0
            self._is_settled = False
        return True

    def forget_swapped(self, request: DrivenRequest) -> None:
        """A request that was swapped out has ended."""
        with self._trace.call(f"forget_swapped({request})"):
            num_free = self._num_free_host
            self.manager.forget_swapped(request)
            is_there = self.manager.lookup(request).swapped or self._num_free_host == num_free
            if self.swapped.pop(request.request_id, None) is request and is_there:
                raise ContractViolation("kv.forget_swapped", f"what host memory had of {request} is still there")
            request.num_swapped = 0
            self._check_host()

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
        if not 0 <= hit.swapped <= (hit.tokens if request.num_swapped else 0):
            raise ContractViolation("kv.hit_swapped", f"{request} was never swapped out, or less of it than {hit}")
        self._asked.pop(request.request_id, None)
        self._asked[request.request_id] = (request, request.num_tokens, self.manager.prefix_version, hit)
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
        with self._trace.call(f"compute({request}, {count})"):
            end = min(request.num_computed + count, request.num_tokens)
            if self.allocate(request, end) is None:
                return False
            self._settle()
            for group, table in enumerate(self.manager.block_ids(request)):
                digests = request.chain.digests[request.num_computed : end]
                self._memory.write(group, table, request.num_computed, digests)
            request.num_computed = end
            self.check_content(request)
            self.manager.commit(request, end)
            self.check()
        return True

    def free(self, request: DrivenRequest) -> None:
        """A request ends; one that holds nothing is no error."""
        with self._trace.call(f"free({request})"):
            self._settle()
            self._give_back(request)
            self.live.pop(request.request_id, None)
            self.check()

    def reset(self) -> bool:
        """Forget the prefix cache, if nothing holds blocks."""
        with self._trace.call("reset()"):
            is_reset = self._reset()
            if is_reset:
                self.swapped.clear()
                self._check_host()
        return is_reset

    def check(self) -> None:
        """Counts are right, everybody still finds in its blocks what it wrote there, and look-ups answer as before."""
        check_blocks(self.manager, self.live.values(), self._num_blocks)
        for request in self.live.values():
            self.check_content(request)
        self._check_host()
        self._check_version()

    # Inside

    def _reset(self) -> bool:
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

    def _enter(self, request: DrivenRequest) -> Hit | None:
        hit = self.lookup(request)
        saved, num_free = self.manager.num_saved_blocks(request, hit), self.manager.usage.num_free_blocks
        is_in = self.allocate(request, request.num_tokens, hit) is not None
        self._check_saved(request, saved, num_free, is_in=is_in)
        if not is_in:
            if not request.num_swapped:
                self.manager.free(request)  # drops what it may have remembered of the attempt
            check_blocks(self.manager, self.live.values(), self._num_blocks)
            return None
        self.live[request.request_id] = request
        request.num_computed = hit.tokens
        return hit

    def _check_saved(self, request: DrivenRequest, saved: int, num_free: int, *, is_in: bool) -> None:
        needed = len(self._windows) * -(-request.num_tokens // self._block_size) - saved
        taken = num_free - self.manager.usage.num_free_blocks
        # One that was written for an older API says that nothing is saved.
        is_own = type(self.manager).num_saved_blocks is not KVCacheManager.num_saved_blocks
        if is_own and (taken != needed if is_in else needed <= num_free):
            did = f"took {taken}" if is_in else "refused"
            raise ContractViolation(
                "kv.saved_blocks", f"{request} needs {needed} of {num_free} free blocks by its hit, allocate() {did}"
            )

    def _leave(self, request: DrivenRequest) -> None:
        """It is swapped out."""
        self._is_settled = False
        request.num_swapped = request.num_computed // self._block_size * self._block_size
        self._give_back(request)
        del self.live[request.request_id]
        self.swapped[request.request_id] = request
        check_blocks(self.manager, self.live.values(), self._num_blocks)
        self._check_host()

    def _give_back(self, request: DrivenRequest) -> None:
        exclusive, num_free = self.manager.num_exclusive_blocks(request), self.manager.usage.num_free_blocks
        self.manager.free(request)
        given = self.manager.usage.num_free_blocks - num_free
        # One that was written for an older API counts all that are in its tables.
        is_own = type(self.manager).num_exclusive_blocks is not KVCacheManager.num_exclusive_blocks
        if is_own and given != exclusive:
            raise ContractViolation(
                "kv.exclusive_blocks", f"{request} had {exclusive} blocks of its own, free() gave {given} back"
            )

    def _settle(self) -> None:
        """The copies that are due are made."""
        for transfer in self.manager.take_transfers():
            device, host = transfer.block_ids.tolist(), transfer.host_block_ids.tolist()
            self.handed_out.append((device, host, transfer.to_host, transfer.group))
            is_known = all(0 < one <= self._num_blocks for one in device)
            if not is_known or not all(0 <= one < self._num_host_blocks for one in host) or len(device) != len(host):
                raise ContractViolation("kv.transfer_blocks", f"a copy between blocks {device} and host blocks {host}")
            self._memory.transfer(transfer)
        self._is_settled = True

    @property
    def _num_free_host(self) -> int:
        inspection = inspection_of(self.manager)
        return 0 if inspection is None else inspection.host.num_free_blocks

    def _check_host(self) -> None:
        """Host blocks are those that the manager was given, and all are free when nobody is swapped out."""
        inspection = inspection_of(self.manager)
        if inspection is None or not inspection.host.num_total_blocks:
            return
        free, total = inspection.host
        is_empty = not self.swapped
        if total != self._num_host_blocks or not 0 <= free <= total or (is_empty and free != total):
            raise ContractViolation(
                "kv.host_conservation",
                f"{free} of {total} host blocks are free, there are {self._num_host_blocks}, and "
                f"{list(self.swapped)} are swapped out",
            )

    def _check_version(self) -> None:
        """While the version stands still, look-ups of those that wait answer as before."""
        for name, (request, num_tokens, version, hit) in list(self._asked.items())[-_NUM_ASKED:]:
            if name in self.live or version is None or num_tokens != request.num_tokens:
                continue
            if version == self.manager.prefix_version and (now := self.manager.lookup(request)) != hit:
                raise ContractViolation(
                    "kv.prefix_version", f"at version {version} a look-up of {request} gave {hit} and gives {now}"
                )

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
