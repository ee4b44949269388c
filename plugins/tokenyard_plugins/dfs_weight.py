"""`scheduler=dfs-weight`: the line as a tree of prefixes, walked depth first, the heaviest branch first."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenyard import PolicyDescriptor, hookimpl
from tokenyard.interfaces import SchedulingPolicy

if TYPE_CHECKING:
    from tokenyard.interfaces import PolicyContext, RequestView, SchedulerView

    _Leaf = tuple[Sequence[bytes], int, RequestView]  # the names of its blocks, and how many are cached


@dataclass(frozen=True, slots=True, kw_only=True)
class DFSWeightOptions:
    """Options of the policy, under `scheduler.policy`."""

    patience: float | None = 128.0  # computed tokens, of all requests, that waiting for one request more is worth
    duplicate_tokens: int = 32  # who shares so many that another is about to compute waits for them

    def __post_init__(self) -> None:
        if self.patience is not None and not 0 <= self.patience < float("inf"):
            raise ValueError(f"patience={self.patience} is not valid: it must be a number, 0 or more, or null")
        if self.duplicate_tokens < 1:
            raise ValueError(f"duplicate_tokens={self.duplicate_tokens} is not valid: it must be 1 or more")


class DFSWeightPolicy(SchedulingPolicy):
    """Depth-first order by weight (Zheng et al., SGLang, NeurIPS 2024) of the first `waiting_window` requests in line.

    Requests that begin alike come one after the other, so that a prefix is computed once and used while it is cached.
    At a node the branches whose beginning is cached come first, then those with more requests: the oldest of another
    may have come up to `patience` computed tokens before theirs for each request that they have more, and for as many
    as are in the window if they are cached. So waiting is bounded; with `patience=null` nothing bounds it. A request
    waits on while another, in prefill or before it in the order, is about to compute the next `duplicate_tokens` that
    it would compute itself.
    """

    def __init__(self, options: DFSWeightOptions, context: PolicyContext) -> None:
        self._patience, self._duplicate_tokens = options.patience, options.duplicate_tokens
        self.may_starve = options.patience is None

    def waiting_order(self, window: Sequence[RequestView], view: SchedulerView) -> Sequence[RequestView]:
        size, ahead = view.block_size, (self._duplicate_tokens - 1) // view.block_size
        computing = {_at(view.prefix_hashes(one), one.num_computed_tokens // size + ahead) for one in view.prefills}
        chosen: list[RequestView] = []
        leaves = [(view.prefix_hashes(one), view.hit_tokens(one) // size, one) for one in window]
        for blocks, num_cached, one in self._walk(leaves, 0, len(window)):
            if (part := _at(blocks, num_cached + ahead)) is None or part not in computing:
                chosen.append(one)
                computing.add(part)
        return chosen

    def _walk(self, leaves: Sequence[_Leaf], depth: int, bonus: int) -> Iterator[_Leaf]:
        """What is below a node: `leaves`, in the order of the line, which have their first `depth` blocks in common."""
        branches: dict[bytes | str, list[_Leaf]] = {}
        for leaf in leaves:
            branches.setdefault(_at(leaf[0], depth) or leaf[2].request_id, []).append(leaf)
        for branch in sorted(branches.values(), key=lambda branch: self._rank(branch, depth, bonus)):
            if len(branch) == 1:
                yield branch[0]
            else:
                yield from self._walk(branch, _num_common([blocks for blocks, _, _ in branch], depth), bonus)

    def _rank(self, branch: Sequence[_Leaf], depth: int, bonus: int) -> float:
        weight = len(branch) + bonus * (branch[0][1] > depth)
        return -weight if self._patience is None else branch[0][2].arrival_tokens - self._patience * weight


def _at(blocks: Sequence[bytes], index: int) -> bytes | None:
    return blocks[index] if index < len(blocks) else None


def _num_common(prefixes: Sequence[Sequence[bytes]], depth: int) -> int:
    """How many blocks they all begin with, `depth` at least: equal names at one place are equal names before it."""
    most = range(depth, min(map(len, prefixes)))
    return depth + bisect_left(most, True, key=lambda block: any(one[block] != prefixes[0][block] for one in prefixes))


@hookimpl
def tokenyard_policies() -> Iterator[PolicyDescriptor[DFSWeightOptions]]:
    yield PolicyDescriptor(
        name="dfs-weight",
        api_version=(1, 7),
        summary="requests that begin alike one after the other, the most common beginnings first",
        options_type=DFSWeightOptions,
        factory=DFSWeightPolicy,
    )
