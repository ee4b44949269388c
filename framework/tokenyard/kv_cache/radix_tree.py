"""RadixTree: the beginnings of requests as a tree, whose nodes are runs of blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from tokenyard.kv_cache.hashing import extras_by_block, hash_blocks, root_hash

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tokenyard.interfaces.kv_cache import ExtraKey, KVRequest

Tenant: TypeAlias = tuple[str | None, str | None]
"""Salt and adapter: requests of different tenants share nothing, so each has a tree of its own."""

TOKEN_BYTES = 4  # token ids are int32, in the machine's byte order


class BlockLabels:
    """What blocks `first` .. `last` - 1 of a request hold: the bytes of their tokens, and of extra keys over them."""

    __slots__ = ("_data", "_extras", "_first", "_size", "last")

    def __init__(self, request: KVRequest, block_size: int, first: int, last: int) -> None:
        token_ids = request.token_ids[first * block_size : last * block_size]
        self._first, self.last = first, last
        self._size = block_size * TOKEN_BYTES
        self._data = token_ids.tobytes()
        if len(self._data) != (last - first) * self._size:
            raise RuntimeError(
                f"request {request.request_id}: its tokens {first * block_size} to {last * block_size} are to be "
                f"compared as int32, and token_ids has {len(token_ids)} of them as {token_ids.dtype}"
            )
        # A scheduler written for plugin API 1.1 has requests without extra keys.
        extra_keys: Iterable[ExtraKey] = getattr(request, "extra_keys", ())
        self._extras = extras_by_block(extra_keys, block_size) if extra_keys else {}

    def label(self, block: int) -> bytes:
        """One that has no extra keys is as long as a block's tokens, all others are longer."""
        start = (block - self._first) * self._size
        return self._data[start : start + self._size] + self._extras.get(block, b"")

    def extra_of(self, block: int) -> bytes:
        return self._extras.get(block, b"")

    def tokens(self, first: int, last: int) -> bytes:
        return self._data[(first - self._first) * self._size : (last - self._first) * self._size]

    def plain_end(self, block: int) -> int:
        """The first block from `block` on that has extra keys, or `last`."""
        if self._extras:
            return next((one for one in range(block, self.last) if one in self._extras), self.last)
        return self.last

    def num_equal(self, block: int, tokens: bytes) -> int:
        """How many blocks from `block` on have just these tokens, one after the other, and no extra keys."""
        start, size = (block - self._first) * self._size, self._size
        most = min(len(tokens) // size, self.plain_end(block) - block)
        if self._data[start : start + most * size] == tokens[: most * size]:
            return most
        equal = 0
        while equal < most - 1:  # `equal` blocks are the same, and `most` are not
            middle = (equal + most) // 2
            if self._data[start : start + middle * size] == tokens[: middle * size]:
                equal = middle
            else:
                most = middle
        return equal


class Node:
    """Blocks `start` .. `end` - 1 of everything below it; a block with extra keys has a node of its own."""

    __slots__ = (
        "blocks",
        "children",
        "extra",
        "is_queued",
        "last_used",
        "level",
        "names",
        "parent",
        "start",
        "tenant",
        "tokens",
    )

    def __init__(self, parent: Node | None, start: int, tenant: Tenant) -> None:
        self.parent = parent  # None for a root, which has no blocks
        self.start = start
        self.tenant = tenant
        self.tokens = b""
        self.extra = b""
        self.blocks: list[int] = []
        self.names: list[bytes] = []  # digests of the blocks, where somebody wants to hear of them
        self.children: dict[bytes, Node] = {}  # by the label of their first block
        self.last_used = 0
        self.level = 0  # of retention; 0 = nobody has used it and gone
        self.is_queued = False  # in the queue of leaves

    @property
    def end(self) -> int:
        return self.start + len(self.blocks)

    def num_equal(self, labels: BlockLabels, block: int) -> int:
        """How many blocks of a request, from its block number `block` on, are the same here."""
        if self.extra:
            return 1  # it was found by its label
        offset = len(self.tokens) // len(self.blocks) * (block - self.start)
        return labels.num_equal(block, self.tokens[offset:] if offset else self.tokens)

    def first_label(self) -> bytes:
        return self.tokens[: len(self.tokens) // len(self.blocks)] + self.extra


class RadixTree:
    """What must hold: no two children of a node begin with the same block, and no node but a root is without blocks.

    Siblings differ in their first block already: nodes are split at the edges of blocks.
    """

    def __init__(self) -> None:
        self._roots: dict[Tenant, Node] = {}

    def root(self, tenant: Tenant) -> Node:
        """The root for a tenant, made when there is none."""
        return self._roots.setdefault(tenant, Node(None, 0, tenant))

    def match(self, tenant: Tenant, labels: BlockLabels) -> tuple[int, list[Node]]:
        """How many blocks from block 0 on are there, and the nodes that have them, the last one perhaps in part."""
        depth = 0
        nodes: list[Node] = []
        node = self._roots.get(tenant)
        while node is not None and depth < labels.last:
            node = node.children.get(labels.label(depth))
            if node is not None:
                nodes.append(node)
                depth += node.num_equal(labels, depth)
                if depth < node.end:
                    break
        return depth, nodes

    def add_child(self, parent: Node, labels: BlockLabels, blocks: Sequence[int], names: Sequence[bytes]) -> Node:
        """Blocks after the last one of `parent`: either one with extra keys, or some without."""
        node = Node(parent, parent.end, parent.tenant)
        node.extra = labels.extra_of(node.start)
        parent.children[labels.label(node.start)] = node
        self.extend(node, labels, blocks, names)
        return node

    def extend(self, node: Node, labels: BlockLabels, blocks: Sequence[int], names: Sequence[bytes]) -> None:
        """More blocks, without extra keys, at the end of a node without children."""
        node.tokens += labels.tokens(node.end, node.end + len(blocks))
        node.blocks += blocks
        node.names += names

    def split(self, node: Node, count: int) -> Node:
        """Give the first `count` blocks to a new node above; returns that. `node` keeps what is below it."""
        size = len(node.tokens) // len(node.blocks) * count
        upper = Node(node.parent, node.start, node.tenant)
        upper.last_used, upper.level = node.last_used, node.level
        if node.parent is not None:
            node.parent.children[node.first_label()] = upper
        upper.tokens, node.tokens = node.tokens[:size], node.tokens[size:]
        upper.blocks, node.blocks = node.blocks[:count], node.blocks[count:]
        upper.names, node.names = node.names[:count], node.names[count:]
        node.parent, node.start = upper, upper.end
        upper.children[node.first_label()] = node
        return upper

    def trim(self, leaf: Node, count: int) -> list[int]:
        """Take the last `count` blocks from a leaf, the end first, and the leaf out when it has no more."""
        removed = leaf.blocks[: -count - 1 : -1]
        if count == len(leaf.blocks):
            self._unlink(leaf)
        size = len(leaf.tokens) // len(leaf.blocks)
        leaf.tokens = leaf.tokens[: len(leaf.tokens) - count * size]
        del leaf.blocks[-count:], leaf.names[-count:]
        return removed

    def clear(self) -> None:
        self._roots.clear()

    def nodes(self) -> Iterator[Node]:
        """All but the roots, parents before their children."""
        todo = list(self._roots.values())
        while todo:
            node = todo.pop()
            todo += node.children.values()
            if node.parent is not None:
                yield node

    def digests(self, block_size: int) -> frozenset[bytes]:
        """Names of all blocks, as other managers would call them."""
        parents = {id(root): root_hash(*tenant) for tenant, root in self._roots.items()}
        names: list[bytes] = []
        for node in self.nodes():
            own = _digests_of(node, parents[id(node.parent)], block_size)
            parents[id(node)] = own[-1]
            names += own
        return frozenset(names)

    def _unlink(self, leaf: Node) -> None:
        parent = leaf.parent
        if parent is None:
            return
        del parent.children[leaf.first_label()]
        if parent.parent is None and not parent.children:
            del self._roots[parent.tenant]  # there may be any number of tenants


def _digests_of(node: Node, parent: bytes, block_size: int) -> list[bytes]:
    extras: Mapping[int, bytes] = {node.start: node.extra} if node.extra else {}
    token_ids = np.frombuffer(node.tokens, dtype=np.int32)
    return hash_blocks(parent, token_ids, block_size, first_block=node.start, extras=extras)
