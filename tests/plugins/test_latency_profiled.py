"""latency=profiled: what it makes of tables, by hand, and the profiles that ship."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest
from tokenyard.experiments.profiles import find_profile, profile_names
from tokenyard.interfaces import LatencyModel, LatencyModelContext, StepLoad
from tokenyard.testing import LatencyModelContract
from tokenyard_plugins import latency_profiled
from tokenyard_plugins._latency.grid import Grid, complete

GIVEN = {"model": "a model", "device": "a GPU", "measured": "by hand", "source": "here", "licence": "MIT"}
DENSE = ("layernorm", "qkv_proj", "rotary_emb", "o_proj", "gate_up_proj", "act_fn", "down_proj")


@pytest.mark.slow
class TestKernels(LatencyModelContract):
    overrides = ("latency=profiled", "latency.profile=rtx4090-llama-3.1-8b")


@pytest.mark.slow
class TestVidur(LatencyModelContract):
    overrides = ("latency=profiled", "latency.profile=a100-llama-2-70b-tp2")


@pytest.mark.slow
class TestFrontier(LatencyModelContract):
    overrides = ("latency=profiled", "latency.profile=a800-llama-2-7b")


@pytest.mark.slow
class TestSplitwise(LatencyModelContract):
    overrides = ("latency=profiled", "latency.profile=splitwise-h100-llama-2-70b-tp8")


def model(profile: str | Path, *, overhead: float = 0.0, scale: float = 1.0) -> LatencyModel:
    (part,) = latency_profiled.tokenyard_components()
    options = latency_profiled.ProfiledOptions(profile=str(profile), overhead=overhead, scale=scale)
    return part.factory(options, LatencyModelContext(max_num_batched_tokens=2048))


def write_profile(
    folder: Path, tables: dict[str, tuple[Sequence[str], Iterable[Sequence[object]]]], **facts: object
) -> None:
    for part, (header, rows) in tables.items():
        lines = [",".join(header), *(",".join(map(str, row)) for row in rows)]
        (folder / f"{part}.csv").write_text("\n".join(lines) + "\n")
    files = {part: f"{part}.csv" for part in tables}
    (folder / "profile.json").write_text(json.dumps({**GIVEN, "files": files, **facts}))


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    """A model of 2 layers, microseconds that are easy to add."""
    dense = [(name, tokens, tokens) for name in DENSE for tokens in (1, 11)]
    dense += [(name, tokens, 100) for name in ("embedding", "final_layernorm") for tokens in (1, 11)]
    sequences = [(name, count, 10 * count) for name in ("lm_head", "sampler") for count in (1, 3)]
    attention = [
        *((0, 0, decodes, context, decodes * context / 10) for decodes in (1, 2, 4) for context in (10, 20)),
        *((chunk, before, 0, 0, chunk + before / 10) for chunk in (10, 20) for before in (0, 10)),
        *(
            (chunk, before, decodes, context, chunk + before / 10 + decodes * context / 10 + 5)
            for chunk in (10, 20)
            for before in (0, 10)
            for decodes in (1, 2, 4)
            for context in (10, 20)
        ),
    ]
    tables: dict[str, tuple[Sequence[str], Iterable[Sequence[object]]]] = {
        "dense": (("layer", "tokens", "time_us"), dense),
        "per_sequence": (("layer", "sequences", "time_us"), sequences),
        "attention": (("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us"), attention),
    }
    write_profile(tmp_path, tables, format="llmservingsim", num_layers=2)
    return tmp_path


def dense_of(tokens: float) -> float:
    """Two layers of eight kernels, one of them twice, each as many microseconds as tokens; and 200 once."""
    return 2 * 8 * tokens + 200


@pytest.mark.parametrize(
    ("load", "microseconds"),
    [
        # At measured points: dense, lm_head and sampler of each sequence, attention in both layers.
        (StepLoad(num_decodes=1, num_decode_context_tokens=10), dense_of(1) + 20 + 2 * 1),
        (StepLoad(num_decodes=4, num_decode_context_tokens=80), dense_of(4) + 2 * 30 * 4 / 3 + 2 * 8),
        # Between them, on each axis by itself.
        (StepLoad(num_decodes=3, num_decode_context_tokens=45), dense_of(3) + 60 + 2 * 4.5),
        (StepLoad(0, 0, 1, 11, 5), dense_of(11) + 20 + 2 * (11 + 0.5)),
        # Of both kinds: the table's own points, 5 us above the sum of the parts.
        (StepLoad(1, 10, 1, 10, 0), dense_of(11) + 40 + 2 * (10 + 1 + 5)),
        # A second prefill adds what it takes beyond the shortest one.
        (StepLoad(0, 0, 2, 22, 0), 2 * 8 * 22 + 400 + 40 + 2 * (11 + 11 - 10)),
        # Below the first point of an axis it is as there, and above the last in proportion.
        (StepLoad(num_decodes=1, num_decode_context_tokens=1), dense_of(1) + 20 + 2 * 1),
        (StepLoad(num_decodes=1, num_decode_context_tokens=40), dense_of(1) + 20 + 2 * 4),
        (StepLoad(num_decodes=8, num_decode_context_tokens=160), dense_of(8) + 60 * 8 / 3 + 2 * 16),
    ],
)
def test_a_step_is_the_sum_of_its_kernels(kernels: Path, load: StepLoad, microseconds: float) -> None:
    expected = microseconds
    if load.num_tokens == 22:
        expected = dense_of(11) * 2 + 40 + 2 * (11 + 1)  # twice the last point of the table
    assert model(kernels).step_seconds(load) == pytest.approx(1e-6 * expected, rel=1e-9)


def test_overhead_is_added_and_scale_multiplies_the_kernels(kernels: Path) -> None:
    load = StepLoad(num_decodes=1, num_decode_context_tokens=10)
    plain = model(kernels).step_seconds(load)
    changed = model(kernels, overhead=0.001, scale=2)
    assert changed.step_seconds(load) == pytest.approx(2 * plain + 0.001)
    assert "latency.overhead=0.001, latency.scale=2" in changed.calibration


def test_gzipped_tables_and_the_path_of_the_manifest_are_the_same_profile(kernels: Path) -> None:
    load = StepLoad(num_decodes=3, num_decode_context_tokens=45)
    expected = model(kernels).step_seconds(load)
    manifest = json.loads((kernels / "profile.json").read_text())
    for part, name in manifest["files"].items():
        (kernels / f"{name}.gz").write_bytes(gzip.compress((kernels / name).read_bytes()))
        (kernels / name).unlink()
        manifest["files"][part] = f"{name}.gz"
    (kernels / "profile.json").write_text(json.dumps(manifest))
    assert model(kernels / "profile.json").step_seconds(load) == expected


LINEAR = ("emb", "input_layernorm", "attn_pre_proj", "attn_rope", "attn_post_proj", "post_attention_layernorm")
LINEAR += ("mlp_up_proj", "mlp_act", "mlp_down_proj", "add")


def vidur_tables(
    ranks: int, attention_columns: Sequence[str] = (), mixed: Sequence[Sequence[object]] = ()
) -> dict[str, tuple[Sequence[str], Iterable[Sequence[object]]]]:
    """Every kernel of a layer takes 1 ms, the embedding 5, at 1 token; twice as much at 11. Of other ranks 99 ms."""
    shape = ("n_embd", "n_expanded_embd", "vocab_size", "use_gated_mlp", "num_tokens", "num_tensor_parallel_workers")
    header = (*(f"time_stats.{name}.median" for name in LINEAR), *shape)
    rows = [
        [time * (5 if name == "emb" else 1) for name in LINEAR] + [8, 10, 40, "True", tokens, count]
        for tokens, time, count in ((1, 1, ranks), (11, 2, ranks), (1, 99, ranks + 1))
    ]
    columns = ("time_stats.attn_prefill.median", "time_stats.attn_decode.median", "batch_size", "prefill_chunk_size")
    columns += ("kv_cache_size", "is_prefill", "num_tensor_parallel_workers", *attention_columns)
    rest = [""] * len(attention_columns)
    attention: list[Sequence[object]] = [
        *(
            [chunk + before / 10, 77, 1, chunk, before, "True", ranks, *rest]
            for chunk in (10, 20)
            for before in (0, 10)
        ),
        *([77, count * context, count, 0, context, "False", ranks, *rest] for count in (1, 3) for context in (10, 20)),
        *mixed,
    ]
    return {"linear": (header, rows), "attention": (columns, attention)}


@pytest.mark.parametrize("name", ["vidur", "frontier"])
def test_vidur_tables_pay_for_each_prefill_and_once_for_all_decodes(tmp_path: Path, name: str) -> None:
    write_profile(tmp_path, vidur_tables(1), format=name, num_layers=2)
    profiled = model(tmp_path)
    # 8 kernels once and an addition twice a layer; the output layer is 40 / (2 x 10) of the MLP's first.
    decodes = 5 * 1.2 + 2 * 10 * 1.2 + 2 * 1.2 + 2 * (3 * 15)
    assert profiled.step_seconds(StepLoad(3, 45)) == pytest.approx(1e-3 * decodes)
    prefills = 5 * 2 * 30 / 11 + 2 * 10 * 2 * 30 / 11 + 2 * 1.1 + 2 * 2 * (15 + 0.5)
    assert profiled.step_seconds(StepLoad(0, 0, 2, 30, 10)) == pytest.approx(1e-3 * prefills)


def test_rows_of_mixed_batches_are_left_out_of_frontier_tables(tmp_path: Path) -> None:
    mixed = [[500, 500, 1, 10, 0, "True", 1, "True"]]
    write_profile(tmp_path, vidur_tables(1, ["is_true_mixed_batch"], mixed), format="frontier", num_layers=1)
    assert model(tmp_path).step_seconds(StepLoad(0, 0, 1, 10, 0)) < 0.1


def test_ranks_sum_their_activations_twice_a_layer(tmp_path: Path) -> None:
    load = StepLoad(num_decodes=1, num_decode_context_tokens=10)
    alone, together = tmp_path / "1", tmp_path / "2"
    for folder in (alone, together):
        folder.mkdir()
    write_profile(alone, vidur_tables(1), format="vidur", num_layers=3)
    cost = {"seconds": 0.5, "bytes_per_second": 16.0}  # of 1 token with 8 values of 2 bytes: 1 s
    write_profile(together, vidur_tables(2), format="vidur", num_layers=3, tensor_parallel=2, all_reduce=cost)
    added = model(together).step_seconds(load) - model(alone).step_seconds(load)
    assert added == pytest.approx(3 * 2 * 1.5)


def test_splitwise_steps_are_prompts_by_tokens_and_decodes_by_number_and_context(tmp_path: Path) -> None:
    header = ("prompt_size", "batch_size", "token_size", "prompt_time", "token_time")
    rows = [(100, 1, 20, 10, 40), (300, 1, 20, 30, 44), (100, 3, 20, 30, 60), (100, 1, 400, 10, 99)]
    write_profile(tmp_path, {"steps": (header, rows)}, format="splitwise")
    profiled = model(tmp_path)
    seconds = profiled.step_seconds
    assert seconds(StepLoad(0, 0, 2, 200, 0)) == pytest.approx(0.020)
    assert seconds(StepLoad(0, 0, 1, 600, 0)) == pytest.approx(0.060)
    single = 42  # the median of the two requests alone
    assert seconds(StepLoad(1, 110)) == pytest.approx(0.040)
    assert seconds(StepLoad(3, 3 * 210)) == pytest.approx(1e-3 * 60 * 42 / single)
    both = seconds(StepLoad(1, 110, 1, 200, 0))
    assert both == pytest.approx(0.040 + 0.020 - 0.010)


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_that_ships_says_where_it_comes_from_and_grows_with_its_load(name: str) -> None:
    profiled = model(name)
    manifest = json.loads((find_profile("latency.profile", name) / "profile.json").read_text())
    for fact in ("model", "device", "source", "licence"):
        assert manifest[fact] in profiled.calibration
    assert "error" in profiled.calibration
    decodes = [profiled.step_seconds(StepLoad(count, 500 * count)) for count in (1, 64, 256)]
    prefills = [profiled.step_seconds(StepLoad(0, 0, 1, count, 0)) for count in (64, 512, 2048)]
    assert decodes == sorted(decodes)
    assert prefills == sorted(prefills)
    assert decodes[0] > 0.001
    assert prefills[-1] < 2


def test_the_tables_that_ship_are_met_at_their_points() -> None:
    """A prefill alone, at a point of the grid: the sum of the table's own rows."""
    folder = find_profile("latency.profile", "rtx4090-llama-3.1-8b")

    def rows(part: str) -> list[list[str]]:
        return [line.split(",") for line in gzip.decompress((folder / f"{part}.csv.gz").read_bytes()).decode().split()]

    dense = {name: float(time) for name, tokens, time in rows("dense")[1:] if tokens == "512"}
    sequence = sum(float(time) for _, count, time in rows("per_sequence")[1:] if count == "1")
    (attention,) = [float(row[4]) for row in rows("attention")[1:] if row[:4] == ["512", "1024", "0", "0"]]
    layer = sum(time * (2 if name == "layernorm" else 1) for name, time in dense.items() if name in DENSE)
    expected = dense["embedding"] + dense["final_layernorm"] + sequence + 32 * (layer + attention)
    load = StepLoad(num_prefills=1, num_prefill_tokens=512, num_prefill_context_tokens=1024)
    assert model("rtx4090-llama-3.1-8b").step_seconds(load) == pytest.approx(1e-6 * expected, rel=1e-3)


def test_a_grid_is_linear_on_each_axis() -> None:
    axes = [[0.0, 2.0, 10.0], [1.0, 3.0], [5.0]]
    values = np.array([[[x * y + x + 3 * y for _ in axes[2]] for y in axes[1]] for x in axes[0]])
    grid = Grid(axes, values)
    for x, y in ((0, 1), (1, 2), (7.5, 1.25), (10, 3)):
        assert grid.at(x, y, 99) == pytest.approx(x * y + x + 3 * y)
    assert grid.at(-5, 0, 0) == grid.at(0, 1, 5)
    assert grid.at(11, 4, 0) == grid.at(10, 3, 5)


def test_missing_points_are_filled_between_known_ones_first() -> None:
    nan = float("nan")
    values = complete(np.array([[1.0, nan, 5.0], [nan, nan, nan], [3.0, 5.0, nan]]), [[0, 1, 2], [0, 1, 4]])
    assert values.tolist() == [[1, 2, 5], [2, 3.5, 3.5], [3, 5, 5]]
