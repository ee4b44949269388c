"""Profiles as LLMServingSim measures them: kernels of one layer in microseconds, attention with mixed batches.

Its tables: `attention` by prefill_chunk, kv_prefill, n_decode, kv_decode; `dense` by layer and tokens; `per_sequence`
by layer and sequences.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tokenyard.errors import ConfigError

from tokenyard_plugins._latency.grid import Grid, Line, beyond, complete, spread
from tokenyard_plugins._latency.manifest import layers_of, refuse, table_paths
from tokenyard_plugins._latency.tables import read_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenyard.interfaces import StepLoad

    from tokenyard_plugins._latency.grid import Array
    from tokenyard_plugins._latency.manifest import Manifest

_A_LAYER = {
    "layernorm": 2,
    "qkv_proj": 1,
    "rotary_emb": 1,
    "o_proj": 1,
    "gate_up_proj": 1,
    "act_fn": 1,
    "down_proj": 1,
}  # how often a layer runs it
_A_STEP = ("embedding", "final_layernorm")
_PER_SEQUENCE = ("lm_head", "sampler")
_POINT = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
_MICROSECOND = 1e-6


class LLMServingSimProfile:
    """Satisfies `StepProfile`."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        refuse(manifest, folder, ["all_reduce"])
        attention, dense, per_sequence = table_paths(manifest, folder, ["attention", "dense", "per_sequence"])
        self._num_layers = layers_of(manifest, folder)
        self._tokens = _dense(dense, self._num_layers)
        self._sequences = _sum_of(_lines(per_sequence, "sequences", _PER_SEQUENCE), dict.fromkeys(_PER_SEQUENCE, 1))
        self._attention = _attention(attention)
        self._first_chunk = self._attention.at(self._attention.axes[0][1], 0, 0, 0)

    def seconds(self, load: StepLoad) -> float:
        num_sequences = load.num_decodes + load.num_prefills
        total = self._tokens.at(load.num_tokens) + self._sequences.at(num_sequences)
        return _MICROSECOND * (total + self._num_layers * self._layer_attention(load))

    def _layer_attention(self, load: StepLoad) -> float:
        """The table knows one prefill: of more, each further one adds its work, and all are as long as their mean."""
        grid, decodes, prefills = self._attention, load.num_decodes, load.num_prefills
        _, most_context, most_decodes, longest = grid.last
        context = load.num_decode_context_tokens / decodes if decodes else 0.0
        chunk, before = 0.0, 0.0
        if prefills:
            chunk, before = load.num_prefill_tokens / prefills, load.num_prefill_context_tokens / prefills
        time = grid.at(chunk, before, decodes, context)
        if decodes > most_decodes or context > longest:
            time += (beyond(decodes, most_decodes) * beyond(context, longest) - 1) * grid.at(0, 0, decodes, context)
        if prefills > 1 or before > most_context or chunk > grid.last[0]:
            alone = grid.at(chunk, before, 0, 0)
            time += (beyond(before, most_context) * beyond(chunk, grid.last[0]) - 1) * alone
            time += (prefills - 1) * max(0.0, alone - self._first_chunk)
        return time


def _dense(path: Path, num_layers: int) -> Line:
    times = {name: count * num_layers for name, count in _A_LAYER.items()} | dict.fromkeys(_A_STEP, 1)
    return _sum_of(_lines(path, "tokens", tuple(times)), times)


def _lines(path: Path, count: str, names: Sequence[str]) -> dict[str, dict[int, float]]:
    """Microseconds by count, of each kernel. Raises ConfigError for a kernel that nobody knows, or that is missing."""
    lines: dict[str, dict[int, float]] = {name: {} for name in names}
    for row in read_rows(path, ("layer", count, "time_us")):
        if row.text("layer") not in lines:
            raise row.error("layer", f"unknown kernel {row.text('layer')!r}; known are {', '.join(names)}")
        lines[row.text("layer")][row.count(count)] = row.number("time_us")
    missing = [name for name, points in lines.items() if not points]
    if missing:
        raise ConfigError(f"{path}: column 'layer' has no row of {', '.join(missing)}")
    return lines


def _sum_of(lines: dict[str, dict[int, float]], times: dict[str, int]) -> Line:
    """All kernels as one, each so many times, at every count that any of them was measured at."""
    counts = sorted(set().union(*lines.values()))
    total = np.zeros(len(counts))
    for name, points in lines.items():
        known = sorted(points)
        total += times[name] * np.interp(counts, known, [points[count] for count in known])
    return Line(dict(zip(counts, total.tolist(), strict=True)))


def _attention(path: Path) -> Grid:
    points: dict[tuple[float, ...], float] = {}
    for row in read_rows(path, (*_POINT, "time_us")):
        points[tuple(row.number(name) for name in _POINT)] = row.number("time_us")
    axes: list[list[float]] = [sorted({0.0} | {point[at] for point in points}) for at in range(len(_POINT))]
    if any(len(axis) < 2 for axis in axes):
        raise ConfigError(f"{path}: each of {', '.join(_POINT)} needs a value above 0 in some row")
    return Grid(axes, _whole(spread(points, axes, path), axes, path))


def _whole(values: Array, axes: Sequence[Sequence[float]], path: Path) -> Array:
    """With the planes that a table leaves out: of a step without prefill their context says nothing, and so on."""
    if np.isnan(values[0, 0, 1:, 1:]).all() or np.isnan(values[1:, :, 0, 0]).all():
        raise ConfigError(f"{path}: it needs decodes alone (prefill_chunk 0) and prefills alone (n_decode 0)")
    values[0, 0, 1:, :] = complete(values[0, 0, 1:, :], [axes[2][1:], axes[3]])
    values[1:, :, 0, 0] = complete(values[1:, :, 0, 0], [axes[0][1:], axes[1]])
    values[0, :, 0, :] = 0
    values[0, :, 1:, :] = values[0, 0, 1:, :]
    values[1:, :, 0, :] = values[1:, :, 0, :1]
    return np.maximum.accumulate(complete(values, axes), axis=0)
