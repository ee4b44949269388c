"""Profiles as Vidur and Frontier measure them: kernels of one layer in milliseconds, prefills and decodes apart.

Their tables: `linear` by num_tokens; `attention` by batch_size, prefill_chunk_size, kv_cache_size, is_prefill. Of the
repetitions of a kernel the median counts. A step pays for the attention of each of its prefills, and once for that of
its decodes. The tables have no output layer (lm_head): it is taken to be as fast as the MLP's first matrix
multiplication, by their sizes. Frontier's batches of both are left out: their rows name them apart from the others.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tokenyard.errors import ConfigError
from tokenyard.experiments.profiles import MANIFEST

from tokenyard_plugins._latency.grid import Grid, Line, beyond, complete, spread
from tokenyard_plugins._latency.manifest import layers_of, table_paths
from tokenyard_plugins._latency.tables import read_rows

if TYPE_CHECKING:
    from tokenyard.interfaces import StepLoad

    from tokenyard_plugins._latency.grid import Array
    from tokenyard_plugins._latency.manifest import AllReduce, Manifest
    from tokenyard_plugins._latency.tables import Row

_A_LAYER = {
    "input_layernorm": 1,
    "attn_pre_proj": 1,
    "attn_rope": 1,
    "attn_post_proj": 1,
    "post_attention_layernorm": 1,
    "mlp_up_proj": 1,
    "mlp_act": 1,
    "mlp_down_proj": 1,
    "add": 2,
}  # how often a layer runs it
_AROUND = ("attn_input_reshape", "attn_kv_cache_save", "attn_output_reshape")  # of attention, where a table has them
_SHAPE = ("n_embd", "n_expanded_embd", "vocab_size")
_ATTENTION = ("batch_size", "prefill_chunk_size", "kv_cache_size", "is_prefill", "num_tensor_parallel_workers")
_BYTES_PER_VALUE = 2  # of the activations that ranks sum
_MILLISECOND = 1e-3
_LEAST = 1e-6  # milliseconds, so that nothing is divided by 0

Points = dict[tuple[float, ...], list[float]]


class VidurProfile:
    """Satisfies `StepProfile`."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        if (manifest.tensor_parallel > 1) != (manifest.all_reduce is not None):
            raise ConfigError(
                f"{folder / MANIFEST}: tensor_parallel is {manifest.tensor_parallel}, all_reduce is "
                f"{'given' if manifest.all_reduce else 'missing'}; several ranks need one, and one rank has none"
            )
        linear, attention = table_paths(manifest, folder, ["linear", "attention"])
        num_layers = layers_of(manifest, folder)
        self._linear, self._output = _linear(linear, manifest, num_layers)
        self._num_layers = num_layers
        self._prefill, self._decode = _attention(attention, manifest.tensor_parallel)

    def seconds(self, load: StepLoad) -> float:
        total = self._linear.at(load.num_tokens) + self._output.at(load.num_decodes + load.num_prefills)
        attention = 0.0
        if load.num_decodes:
            attention += _at(self._decode, load.num_decodes, load.num_decode_context_tokens / load.num_decodes)
        if load.num_prefills:
            count = load.num_prefills
            chunk, before = load.num_prefill_tokens / count, load.num_prefill_context_tokens / count
            attention += count * _at(self._prefill, chunk, before)
        return _MILLISECOND * (total + self._num_layers * attention)


def _at(grid: Grid, first: float, second: float) -> float:
    return grid.at(first, second) * beyond(first, grid.last[0]) * beyond(second, grid.last[1])


def _linear(path: Path, manifest: Manifest, num_layers: int) -> tuple[Line, Line]:
    """Milliseconds of a step without attention by tokens, and of the output layer by sequences."""
    whole: dict[int, list[float]] = {}
    first: dict[int, list[float]] = {}
    share = 0.0
    names = [f"time_stats.{name}.median" for name in ("emb", *_A_LAYER)]
    for row in read_rows(path, (*names, *_SHAPE, "use_gated_mlp", "num_tokens", "num_tensor_parallel_workers")):
        if row.count("num_tensor_parallel_workers") != manifest.tensor_parallel:
            continue
        tokens = row.count("num_tokens")
        layer = sum(count * row.number(f"time_stats.{name}.median") for name, count in _A_LAYER.items())
        layer += _all_reduces(manifest.all_reduce, tokens * row.count("n_embd"))
        whole.setdefault(tokens, []).append(num_layers * layer + row.number("time_stats.emb.median"))
        first.setdefault(tokens, []).append(row.number("time_stats.mlp_up_proj.median"))
        share = _output_share(row)
    if not whole:
        raise _no_rows(path, manifest.tensor_parallel)
    return (
        Line({tokens: _mean(times) for tokens, times in whole.items()}),
        Line({tokens: share * _mean(times) for tokens, times in first.items()}),
    )


def _output_share(row: Row) -> float:
    """The output layer's size as a share of the MLP's first matrix."""
    matrices = 2 if row.text("use_gated_mlp") == "True" else 1
    width = row.count("n_expanded_embd")
    if not width:
        raise row.error("n_expanded_embd", "0 is no width of an MLP")
    return row.count("vocab_size") / (matrices * width)


def _all_reduces(cost: AllReduce | None, values: int) -> float:
    if cost is None:
        return 0.0
    return 2 * (cost.seconds + _BYTES_PER_VALUE * values / cost.bytes_per_second) / _MILLISECOND


def _attention(path: Path, tensor_parallel: int) -> tuple[Grid, Grid]:
    """Milliseconds of one prefill by chunk and context before it, and of all decodes by their number and context."""
    prefills: Points = {}
    decodes: Points = {}
    times = ("time_stats.attn_prefill.median", "time_stats.attn_decode.median")
    for row in read_rows(path, (*_ATTENTION, *times)):
        if row.count("num_tensor_parallel_workers") != tensor_parallel or row.optional("is_true_mixed_batch") == "True":
            continue
        is_prefill = row.text("is_prefill") == "True"
        time = row.number(times[0] if is_prefill else times[1])
        time += sum(row.optional_number(f"time_stats.{name}.median") for name in _AROUND)
        context = row.number("kv_cache_size")
        if not is_prefill:
            decodes.setdefault((row.number("batch_size"), context), []).append(time)
        elif row.count("batch_size") == 1:
            prefills.setdefault((row.number("prefill_chunk_size"), context), []).append(time)
    if not prefills or not decodes:
        raise _no_rows(path, tensor_parallel)
    prefill = _grid(prefills, path, lambda chunk, before: chunk * (before + chunk / 2))
    return prefill, _grid(decodes, path, lambda count, context: count * context)


def _grid(points: Points, path: Path, work: Callable[[Array, Array], Array]) -> Grid:
    """Where the table has no point, what neighbours take for the same work; on the first axis more never takes less.

    `work` is in pairs of a query and a key.
    """
    means = {point: _mean(times) for point, times in points.items()}
    axes = [sorted({point[at] for point in means}) for at in range(2)]
    model = _of_work(means, work)(*np.meshgrid(*axes, indexing="ij"))
    values = complete(spread(means, axes, path) / model, axes) * model
    return Grid(axes, np.maximum.accumulate(values, axis=0))


def _of_work(
    points: dict[tuple[float, ...], float], work: Callable[[Array, Array], Array]
) -> Callable[[Array, Array], Array]:
    """Milliseconds by work: a constant and a factor, fitted to the points by their relative errors."""
    first, second = np.array(list(points)).T
    times = np.maximum(np.array(list(points.values())), _LEAST)
    amounts = work(first, second)
    terms = np.stack([1 / times, amounts / times], axis=1)
    constant, factor = np.maximum(np.linalg.lstsq(terms, np.ones(len(times)), rcond=None)[0], 0)
    return lambda one, other: np.maximum(constant + factor * work(one, other), _LEAST)


def _no_rows(path: Path, tensor_parallel: int) -> ConfigError:
    return ConfigError(
        f"{path}: column 'num_tensor_parallel_workers' has no rows of prefills and decodes with {tensor_parallel}"
    )


def _mean(times: list[float]) -> float:
    return sum(times) / len(times)
