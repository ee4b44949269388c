"""RadixBlocks: reference counts, and which blocks hold what in a radix tree."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from tokenyard.kv_cache.block_pool import NULL_BLOCK
from tokenyard.kv_cache.radix_leaves import LeafQueue
from tokenyard.kv_cache.radix_tree import Node, RadixTree
from tokenyard.kv_cache.retention import HIGH

if TYPE_CHECKING:
    from tokenyard.kv_cache.radix_tree import BlockLabels, Tenant


class RadixBlocks:
    """`num_blocks` usable blocks with ids 1 .. num_blocks, and the tree of what they hold.

    Each place in the tree has one block. Others that hold the same are its *twins*: two requests may compute one prefix
    at the same time, and neither's block table can change. When a block of the tree loses its last reference, a twin
    takes its place. So what must hold: a block of the tree that nobody references has none below it that somebody does,
    and all content without a reference can be evicted from the leaves.

    `on_removed` is called with the name of what is evicted, where names were given.
    """

    def __init__(self, num_blocks: int, *, retention_share: float, on_removed: Callable[[bytes], None] | None) -> None:
        self.num_blocks = num_blocks
        self.tree = RadixTree()
        self.version = 0  # while it stands still, the tree answers as before
        self._on_removed = on_removed
        self._leaves = LeafQueue(self._is_evictable, int(retention_share * num_blocks))
        self._counts = [0] * (num_blocks + 1)
        self._in_tree = bytearray(num_blocks + 1)
        self._empty: deque[int] = deque(range(1, num_blocks + 1))  # without a reference, and not in the tree
        self._num_idle = 0  # in the tree, and without a reference
        self._twins: dict[int, list[int]] = {}  # by the block of the tree
        self._twin_of: dict[int, int] = {}
        self._now = 0  # grows with every release

    @property
    def num_free(self) -> int:
        return len(self._empty) + self._num_idle

    def ref_count(self, block_id: int) -> int:
        return self._counts[block_id]

    def num_idle(self, block_ids: Iterable[int]) -> int:
        """How many of these nobody references."""
        return list(map(self._counts.__getitem__, block_ids)).count(0)

    def num_exclusive(self, block_ids: Iterable[int]) -> int:
        """How many of these have one reference."""
        return list(map(self._counts.__getitem__, block_ids)).count(1)

    # Handing out and taking back

    def take(self, block_ids: Iterable[int]) -> None:
        """Add a reference to blocks of the tree."""
        for block_id in block_ids:
            self._num_idle -= self._counts[block_id] == 0
            self._counts[block_id] += 1

    def pop(self, count: int) -> list[int]:
        """Hand out blocks, each with one reference and no content; the caller has checked `num_free`."""
        if count > self.num_free:
            raise RuntimeError(f"no free blocks: {count} asked for, {self.num_free} free")
        pop_empty = self._empty.popleft
        block_ids = [pop_empty() for _ in range(min(count, len(self._empty)))]
        while len(block_ids) < count:
            block_ids += self._evict(count - len(block_ids))
        for block_id in block_ids:
            self._counts[block_id] = 1
        return block_ids

    def release(self, table: Sequence[int], end: Node | None, num_published: int, level: int) -> None:
        """Drop a reference to each block of a request of this retention level.

        The first `num_published` are in the tree, or twins of those that are; `end` is the node where they end.
        """
        counts = self._counts
        end = None if end is None else node_at(end, num_published - 1)
        node = end
        for depth in range(len(table) - 1, -1, -1):
            block_id = table[depth]
            counts[block_id] -= 1
            if counts[block_id]:
                continue
            if not self._in_tree[block_id]:
                self._drop_twin(block_id)
                self._empty.append(block_id)
            elif block_id in self._twins:
                node = node_at(node, depth)
                self._replace(node, depth, self._twins[block_id][0])
            else:
                self._num_idle += 1
        if end is not None:
            self._touch_path(end, level)

    # Content

    def publish(
        self,
        tenant: Tenant,
        labels: BlockLabels,
        table: Sequence[int],
        end: Node | None,
        first: int,
        names: Sequence[bytes] = (),
    ) -> tuple[Node, int]:
        """Say what blocks `first` .. `labels.last` - 1 of a request hold.

        `end` is the node where its content ended before, None for a request without any. `names` are those of all its
        blocks, or none. Returns the node where it ends now, and the first block that was not in the tree before.
        """
        node, depth = self.tree.root(tenant) if end is None else node_at(end, first - 1), first
        while depth < labels.last:
            if depth == node.end:
                child = node.children.get(labels.label(depth))
                if child is None:
                    return self._grow(node, labels, table, names), depth
                node = child
            num_equal = node.num_equal(labels, depth)
            if num_equal == 0:
                node = self.tree.split(node, depth - node.start)
            for _ in range(num_equal):
                self._add_twin(node, depth, table[depth])
                depth += 1
        return node, depth

    def clear(self) -> bool:
        """Forget the content of every block, none of which is referenced; returns whether there was any."""
        had_content = self._num_idle > 0
        self.tree.clear()
        self._leaves.clear()
        self._in_tree = bytearray(self.num_blocks + 1)
        self._empty = deque(range(1, self.num_blocks + 1))
        self._num_idle = 0
        self.version += 1
        return had_content

    def _grow(self, node: Node, labels: BlockLabels, table: Sequence[int], names: Sequence[bytes]) -> Node:
        """Put the rest of a request's blocks after the last one of a node."""
        self.version += 1
        while (depth := node.end) < labels.last:
            end = max(labels.plain_end(depth), depth + 1)  # one block, where that has extra keys
            added = table[depth:end]
            for block_id in added:
                self._in_tree[block_id] = True
            if not labels.extra_of(depth) and self._is_only_its(node, table):
                self.tree.extend(node, labels, added, names[depth:end])
                self._leaves.count_blocks(node, len(added))
            else:
                node = self.tree.add_child(node, labels, added, names[depth:end])
        return node

    def _is_only_its(self, node: Node, table: Sequence[int]) -> bool:
        """Whether a node can grow: nobody but the request with this table uses its end."""
        if not node.blocks or node.extra or node.children:
            return False
        last = node.blocks[-1]
        return table[node.end - 1] == last and self._counts[last] == 1

    def _add_twin(self, node: Node, depth: int, block_id: int) -> None:
        """A block that some request computed holds what is in the tree already."""
        known = node.blocks[depth - node.start]
        if self._counts[known] == 0:
            self._num_idle -= 1
            self._replace(node, depth, block_id)
        else:
            self._twins.setdefault(known, []).append(block_id)
            self._twin_of[block_id] = known

    def _replace(self, node: Node, depth: int, block_id: int) -> None:
        """Another block takes the place of one that nobody references."""
        before = node.blocks[depth - node.start]
        node.blocks[depth - node.start] = block_id
        self._in_tree[before], self._in_tree[block_id] = False, True
        self._empty.append(before)
        twins = [one for one in self._twins.pop(before, ()) if one != block_id]
        self._twin_of.pop(block_id, None)
        if twins:
            self._twins[block_id] = twins
            self._twin_of.update(dict.fromkeys(twins, block_id))

    def _drop_twin(self, block_id: int) -> None:
        known = self._twin_of.pop(block_id, None)
        if known is not None:
            self._twins[known].remove(block_id)
            if not self._twins[known]:
                del self._twins[known]

    def _touch_path(self, end: Node, level: int) -> None:
        self._now += 1
        node: Node | None = end
        while node is not None:
            self._leaves.touch(node, self._now, level)
            node = node.parent
        self._leaves.offer(end)

    # Evicting

    def _is_evictable(self, node: Node) -> bool:
        return bool(node.blocks) and not node.children and self._counts[node.blocks[-1]] == 0

    def _evict(self, count: int) -> list[int]:
        """Take up to `count` blocks from the end of the leaf that goes first."""
        leaf = self._leaves.pop()
        num_idle = next((i for i, block in enumerate(reversed(leaf.blocks)) if self._counts[block]), len(leaf.blocks))
        count = min(count, num_idle)
        if self._on_removed is not None:
            for name in reversed(leaf.names[-count:]):
                self._on_removed(name)
        self._leaves.count_blocks(leaf, -count)
        evicted = self.tree.trim(leaf, count)
        for block_id in evicted:
            self._in_tree[block_id] = False
        self._num_idle -= count
        self.version += 1
        following = leaf if leaf.blocks else leaf.parent
        if following is not None:
            self._leaves.offer(following)
        return evicted

    # For tests

    def check(self, held: Mapping[int, int]) -> None:
        """Raise RuntimeError unless counts, tree and free blocks agree; `held`: table entries per block."""
        in_tree: Counter[int] = Counter()
        for node in self.tree.nodes():
            in_tree.update(node.blocks)
            self._check_node(node)
        empty = Counter(self._empty)
        for block_id in range(1, self.num_blocks + 1):
            count = self._counts[block_id]
            is_empty = not count and not in_tree[block_id]
            if (count, in_tree[block_id], empty[block_id]) != (
                held.get(block_id, 0),
                self._in_tree[block_id],
                is_empty,
            ):
                raise RuntimeError(
                    f"block {block_id}: reference count {count}, in {held.get(block_id, 0)} table entries, "
                    f"{in_tree[block_id]} times in the tree, {empty[block_id]} times among the empty ones"
                )
        if self._num_idle != sum(not self._counts[block_id] for block_id in in_tree) or self._counts[NULL_BLOCK]:
            raise RuntimeError(f"{self._num_idle} blocks of the tree are said to have no reference")
        self._check_twins()
        self._check_levels()

    def _check_node(self, node: Node) -> None:
        references = [self._counts[block_id] > 0 for block_id in node.blocks]
        if not node.blocks or references != sorted(references, reverse=True):
            raise RuntimeError(f"blocks {node.blocks} of a node: one without references is before one with some")
        if node.parent is None or node.start != node.parent.end:
            raise RuntimeError(f"blocks {node.blocks} do not follow what is above them")
        above = node.parent.blocks[-1:]
        if references[0] and any(self._counts[block_id] == 0 for block_id in above):
            raise RuntimeError(f"block {node.blocks[0]} has references, and the one before it has none")
        if self._is_evictable(node) and not node.is_queued:
            raise RuntimeError(f"blocks {node.blocks} of a leaf would never be evicted")

    def _check_twins(self) -> None:
        for known, twins in self._twins.items():
            if not self._in_tree[known] or any(self._twin_of[one] != known or self._in_tree[one] for one in twins):
                raise RuntimeError(f"block {known} is said to have the twins {twins}")
            if not all(self._counts[one] for one in (known, *twins)):
                raise RuntimeError(f"block {known} or one of its twins {twins} has no reference")
        if sum(map(len, self._twins.values())) != len(self._twin_of):
            raise RuntimeError("twins and their counterparts differ")

    def _check_levels(self) -> None:
        num_high = sum(len(node.blocks) for node in self.tree.nodes() if node.level == HIGH)
        if self._leaves.num_high != num_high:
            raise RuntimeError(f"{num_high} blocks are of level high, and the queue counts {self._leaves.num_high}")


def node_at(node: Node | None, depth: int) -> Node:
    """The node on the way from `node` to the root that has block `depth`: nodes may have been split since."""
    while node is not None and node.start > depth:
        node = node.parent
    if node is None or depth >= node.end:
        raise RuntimeError(f"block {depth} of a request is not in the tree")
    return node
