"""Which layers share a block table: KV groups, one or more for each sliding window of a model.

Layers with one window need the K/V of the same positions, so one table serves them; layers with another window need
other positions, so they have a table of their own and give blocks back at another time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenyard.interfaces.attention import AttentionLayer

_LAYERS_PER_PADDING = 8


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers with one block table; layer `layers[i]` keeps its K/V in the i-th tensor that all groups share."""

    window: int | None  # tokens; None = full attention
    layers: tuple[int, ...]  # indices, rising


@dataclass(frozen=True, slots=True)
class KVGroups:
    """The groups of one model, full attention first, then the windows from the smallest to the largest."""

    groups: tuple[KVGroup, ...]

    @property
    def num_tensors(self) -> int:
        """K/V tensors to allocate: as many as the largest group has layers."""
        return max(len(group.layers) for group in self.groups)

    def assign(self, layers: Sequence[AttentionLayer]) -> list[AttentionLayer]:
        """The layers, each with the index of its group."""
        group_of = {layer: index for index, group in enumerate(self.groups) for layer in group.layers}
        return [replace(layer, group=group_of[index]) for index, layer in enumerate(layers)]

    def tensor_of(self) -> list[int]:
        """For each layer, which of the shared tensors holds its K/V."""
        places = sorted((layer, place) for group in self.groups for place, layer in enumerate(group.layers))
        return [place for _, place in places]


def group_layers(layers: Sequence[AttentionLayer], max_model_len: int) -> KVGroups:
    """Groups of at most G layers each, G as `group_size` says. A window that no request outgrows is none."""
    by_window: dict[int | None, list[int]] = {}
    for index, layer in enumerate(layers):
        window = layer.sliding_window
        by_window.setdefault(None if window is None or window >= max_model_len else window, []).append(index)
    size = group_size({window: len(indices) for window, indices in by_window.items()})
    groups = []
    for window in sorted(by_window, key=lambda window: window or 0):
        indices = by_window[window]
        groups += [KVGroup(window, tuple(indices[at : at + size])) for at in range(0, len(indices), size)]
    return KVGroups(tuple(groups))


def group_size(num_layers: Mapping[int | None, int]) -> int:
    """Layers of a group, from the number of layers of each window.

    A block has room for `size` layers, since any group may get any block: what a group has fewer is padding. A small
    size pads little and makes many groups, each of which costs time in every step. So: the fewest groups among the
    sizes that pad the layers of each window by at most an eighth, and of those the one that pads least. Each window
    counts for itself because layers with full attention keep every token: among many others, padding them is what
    costs memory. With one window the answer is all layers; with 22 layers of one and 4 of another it is 4 (7 groups, 2
    layers of padding), where their greatest common divisor would make 13 groups.
    """
    counts = num_layers.values()

    def groups_and_padding(size: int) -> tuple[int, int]:
        return sum(-(-count // size) for count in counts), sum(-count % size for count in counts)

    allowed = [
        size
        for size in range(1, max(counts) + 1)
        if all(-count % size * _LAYERS_PER_PADDING <= count for count in counts)
    ]
    return min(allowed, key=groups_and_padding)
