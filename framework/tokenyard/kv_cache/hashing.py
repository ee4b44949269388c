"""Block hashes: a chain of sha256 digests, so that one digest stands for a block and everything before it."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenyard.arrays import IntArray
    from tokenyard.interfaces.kv_cache import ExtraKey, KVRequest

_TOKEN_BYTES = 4  # token ids are int32, in the machine's byte order
_NO_EXTRAS: Mapping[int, bytes] = {}


def root_hash(cache_salt: str | None, lora_name: str | None) -> bytes:
    """The parent of a request's first block; requests with different roots never share a block.

    It depends on nothing else, so hashes are the same in every process and run. Tenants that must not learn from the
    time of a hit what others asked have salts of their own.
    """
    digest = hashlib.sha256(b"tokenyard.block.v1")
    for part in (cache_salt, lora_name):
        text = b"" if part is None else part.encode()
        # None and "" differ, and no two pairs of parts spell the same bytes
        digest.update(b"\0" if part is None else b"\1" + len(text).to_bytes(8, "little"))
        digest.update(text)
    return digest.digest()


def extras_by_block(extra_keys: Iterable[ExtraKey], block_size: int) -> Mapping[int, bytes]:
    """What blocks mix into their hashes for each extra key that overlaps them: the key, its length, its place."""
    extras: dict[int, bytes] = {}
    for key, start, end in extra_keys:
        if end <= start:
            continue
        text = key.encode()
        head = len(text).to_bytes(8, "little") + text + (end - start).to_bytes(8, "little")
        for block in range(start // block_size, -(-end // block_size)):
            offset = (start - block * block_size).to_bytes(8, "little", signed=True)
            extras[block] = extras.get(block, b"") + head + offset
    return extras


def hash_blocks(
    parent: bytes,
    token_ids: IntArray,
    block_size: int,
    *,
    first_block: int = 0,
    extras: Mapping[int, bytes] = _NO_EXTRAS,
) -> list[bytes]:
    """Digests of the full blocks that `token_ids` consists of; block `first_block` comes after `parent`.

    A digest is sha256(parent's digest, the tokens, what `extras` has for the block). Within one block size the parts
    have fixed lengths, so that no two blocks spell the same bytes.
    """
    data, size = token_ids.tobytes(), block_size * _TOKEN_BYTES
    contents = [data[start : start + size] for start in range(0, len(data), size)]
    if extras:
        contents = [content + extras.get(first_block + i, b"") for i, content in enumerate(contents)]
    sha256, digests = hashlib.sha256, []
    for content in contents:
        parent = sha256(parent + content).digest()
        digests.append(parent)
    return digests


class SharedBeginnings:
    """Digests of the last chain with each first block: of prompts that begin alike, only what differs is hashed.

    System prompts are long and common to many requests, and comparing two arrays costs a fiftieth of hashing one.
    """

    def __init__(self, limit: int = 64, longest: int = 32768) -> None:
        self._limit = limit  # chains
        self._longest = longest  # tokens of one that are kept
        self._last: OrderedDict[bytes, tuple[IntArray, list[bytes]]] = OrderedDict()

    def extend(self, digests: list[bytes], parent: bytes, token_ids: IntArray, block_size: int) -> None:
        """Append the digests of the full blocks that `token_ids` consists of, the first ones after `parent`."""
        (first,) = hash_blocks(parent, token_ids[:block_size], block_size)
        known_ids, known = self._last.get(first) or (token_ids[:block_size], [first])
        num_shared = min(len(known_ids), len(token_ids))
        differs = known_ids[:num_shared] != token_ids[:num_shared]
        num_equal = int(differs.argmax()) if differs.any() else num_shared
        digests += known[: num_equal // block_size]
        rest = token_ids[len(digests) * block_size :]
        digests += hash_blocks(digests[-1], rest, block_size)
        num_kept = max(1, self._longest // block_size)
        self._last[first] = (token_ids[: num_kept * block_size].copy(), digests[:num_kept])
        self._last.move_to_end(first)
        if len(self._last) > self._limit:
            self._last.popitem(last=False)


class HashChain:
    """The digests of one request's full blocks, as far as they were needed. Its known tokens never change."""

    __slots__ = ("_beginnings", "_block_size", "_extras", "_root", "digests", "found")

    def __init__(self, block_size: int, beginnings: SharedBeginnings | None = None) -> None:
        self.digests: list[bytes] = []  # of blocks 0, 1, ...
        # Of a single group without a window: the pool's version at the last look-up, and the blocks that it found.
        self.found: tuple[int, list[int]] | None = None
        self._block_size = block_size
        self._beginnings = beginnings
        self._root: bytes | None = None
        self._extras: Mapping[int, bytes] = _NO_EXTRAS

    def extend(self, request: KVRequest, num_blocks: int) -> list[bytes]:
        """`digests`, which has at least those of the first `num_blocks` blocks of `request` now."""
        first = len(self.digests)
        if num_blocks <= first:
            return self.digests
        if self._root is None:
            self._start(request)
        size = self._block_size
        token_ids = request.token_ids[first * size : num_blocks * size]
        if token_ids.nbytes != (num_blocks - first) * size * _TOKEN_BYTES:
            raise RuntimeError(
                f"request {request.request_id}: its tokens {first * size} to {num_blocks * size} are to be hashed as "
                f"int32, and token_ids has {len(token_ids)} of them as {token_ids.dtype}"
            )
        parent = self.parent(first)
        if first == 0 and self._beginnings is not None and not self._extras:
            self._beginnings.extend(self.digests, parent, token_ids, size)
            return self.digests
        self.digests += hash_blocks(parent, token_ids, size, first_block=first, extras=self._extras)
        return self.digests

    def parent(self, block: int) -> bytes:
        """The digest that comes before a block's; there is one once something was hashed."""
        if block:
            return self.digests[block - 1]
        if self._root is None:
            raise RuntimeError("nothing was hashed yet")
        return self._root

    def _start(self, request: KVRequest) -> None:
        self._root = root_hash(request.cache_salt, request.lora_name)
        # A scheduler written for plugin API 1.1 has requests without extra keys.
        extra_keys: Iterable[ExtraKey] = getattr(request, "extra_keys", ())
        self._extras = extras_by_block(extra_keys, self._block_size)


class RememberedChains:
    """Chains of requests that hold no blocks, from one attempt to admit them to the next.

    A chain belongs to a request object: when an id is used again, it starts anew. Requests that were looked up after
    they were freed are dropped by nobody, hence the limit: the oldest chain makes room.
    """

    def __init__(self, block_size: int, limit: int = 8192) -> None:
        self._block_size = block_size
        self._limit = limit
        self._beginnings = SharedBeginnings()
        self._chains: OrderedDict[str, tuple[KVRequest, HashChain]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._chains)

    def get(self, request: KVRequest) -> HashChain:
        """The chain of this request, remembered from now on."""
        owner, chain = self._chains.get(request.request_id) or (None, None)
        if chain is None or owner is not request:
            chain = HashChain(self._block_size, self._beginnings)
            self._chains[request.request_id] = (request, chain)
            if len(self._chains) > self._limit:
                self._chains.popitem(last=False)
        return chain

    def take(self, request: KVRequest) -> HashChain:
        """The chain of this request, no longer remembered."""
        owner, chain = self._chains.pop(request.request_id, None) or (None, None)
        return HashChain(self._block_size) if chain is None or owner is not request else chain

    def drop(self, request_id: str) -> None:
        self._chains.pop(request_id, None)
