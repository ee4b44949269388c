"""Profiles with something wrong in them: one clear line, with file, row and column."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tokenyard.errors import ConfigError
from tokenyard.interfaces import LatencyModelContext
from tokenyard.launch.compose import load_engine_config
from tokenyard.launch.steering import make_latency_model
from tokenyard_plugins import latency_profiled
from tokenyard_plugins._latency import grid, tables

STEPS = "prompt_size,batch_size,token_size,prompt_time,token_time\n100,1,20,10,40\n300,2,20,30,44\n"
NAMES = ("layernorm", "qkv_proj", "rotary_emb", "o_proj", "gate_up_proj", "act_fn", "down_proj", "embedding")
NAMES += ("final_layernorm",)
DENSE = "layer,tokens,time_us\n" + "".join(f"{name},{tokens},{tokens}\n" for name in NAMES for tokens in (1, 9))
PER_SEQUENCE = "layer,sequences,time_us\nlm_head,1,5\nsampler,1,5\n"
ATTENTION = "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n0,0,1,16,9\n16,0,0,0,20\n16,8,0,0,21\n16,0,1,16,25\n"
MANIFEST = {"model": "a", "device": "b", "measured": "c", "source": "d", "licence": "MIT"}
SPLITWISE = {**MANIFEST, "format": "splitwise", "files": {"steps": "steps.csv"}}
KERNELS = {
    **MANIFEST,
    "format": "llmservingsim",
    "num_layers": 2,
    "files": {name: f"{name}.csv" for name in ("attention", "dense", "per_sequence")},
}


def load(profile: object, **options: float) -> None:
    (part,) = latency_profiled.tokenyard_components()
    chosen = latency_profiled.ProfiledOptions(profile=str(profile), **options)
    part.factory(chosen, LatencyModelContext(max_num_batched_tokens=2048))


def refusal(profile: object, **options: float) -> str:
    with pytest.raises(ConfigError) as caught:
        load(profile, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def splitwise(tmp_path: Path) -> Path:
    (tmp_path / "profile.json").write_text(json.dumps(SPLITWISE))
    (tmp_path / "steps.csv").write_text(STEPS)
    return tmp_path


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    (tmp_path / "profile.json").write_text(json.dumps(KERNELS))
    for name, text in (("attention", ATTENTION), ("dense", DENSE), ("per_sequence", PER_SEQUENCE)):
        (tmp_path / f"{name}.csv").write_text(text)
    return tmp_path


def test_the_profiles_that_these_tests_break_are_whole(splitwise: Path) -> None:
    load(splitwise)


def test_the_kernels_that_these_tests_break_are_whole(kernels: Path) -> None:
    load(kernels)


def test_a_latency_model_without_its_profile_names_those_that_ship() -> None:
    with pytest.raises(ConfigError, match=r"latency\.profile=''.*, or one of .*rtx4090-llama-3\.1-8b"):
        make_latency_model(*load_engine_config(["latency=profiled"]))


def test_an_unknown_profile_is_told_what_there_is(tmp_path: Path) -> None:
    for profile in ("b300-llama-9", tmp_path, tmp_path / "profile.json", ""):
        told = refusal(profile)
        assert "rtx4090-llama-3.1-8b" in told
        assert "profile.json" in told


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (STEPS.replace("token_time", "time"), ("row 1 has no column 'token_time'", "'prompt_size'")),
        (STEPS.replace("10,40", "ten,40"), ("row 2, column 'prompt_time': 'ten'",)),
        (STEPS.replace("30,44", "30,-44"), ("row 3, column 'token_time': '-44'", "from 0 to 1e+15")),
        (STEPS.replace("30,44", "30,nan"), ("row 3, column 'token_time': 'nan'",)),
        (STEPS.replace("30,44", "30,"), ("row 3, column 'token_time': ''",)),
        (STEPS.replace("300,2", "300.5,2"), ("row 3, column 'prompt_size': '300.5'", "whole number")),
        (STEPS.replace("300,2", "1e300,2"), ("row 3, column 'prompt_size': '1e300'", "not a number")),
        (STEPS.replace("300,2,20,30,44", "300,2"), ("row 3 has 2 columns, the header 5",)),
        (STEPS.partition("\n")[0] + "\n", ("it has no rows",)),
        ("", ("row 1 has no column", "it has none")),
        (STEPS.replace("100,1,", "100,4,"), ("column 'batch_size' has no row of 1",)),
        (STEPS.replace(",40", ",0").replace(",44", ",0"), ("column 'token_time': a decode alone takes no time",)),
    ],
)
def test_a_table_that_says_nothing_sensible_is_refused_by_row_and_column(
    splitwise: Path, text: str, words: tuple[str, ...]
) -> None:
    (splitwise / "steps.csv").write_text(text)
    told = refusal(splitwise)
    assert all(word in told for word in words), told


@pytest.mark.parametrize(
    ("part", "text", "words"),
    [
        ("dense", DENSE + "mystery,1,1\n", ("row 20, column 'layer': unknown kernel 'mystery'", "qkv_proj")),
        ("dense", DENSE.replace("o_proj", "qkv_proj"), ("column 'layer' has no row of o_proj",)),
        ("per_sequence", PER_SEQUENCE.replace("sampler,1,5\n", ""), ("has no row of sampler",)),
        ("attention", ATTENTION.replace("16,0,0,0,20\n16,8,0,0,21\n", "16,8,1,16,26\n"), ("prefills alone",)),
        ("attention", ATTENTION.replace("16,8,0,0,21\n", ""), ("kv_prefill", "a value above 0")),
        ("attention", ATTENTION.replace("0,0,1,16,9\n", "0,0,0,0,0\n", 1), ("decodes alone",)),
    ],
)
def test_kernels_that_are_missing_or_unknown_are_refused(
    kernels: Path, part: str, text: str, words: tuple[str, ...]
) -> None:
    (kernels / f"{part}.csv").write_text(text)
    told = refusal(kernels)
    assert f"{part}.csv" in told
    assert all(word in told for word in words), told


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "nsight"}, ("format",)),
        ({"device": 5}, ("device",)),
        ({"num_layers": 0}, ("num_layers",)),
        ({"num_layers": 2}, ("splitwise has no use for num_layers",)),
        ({"layers": 2}, ("layers",)),
        ({"files": {"table": "steps.csv"}}, ("files names table", "splitwise has steps")),
        ({"files": {"steps": "../steps.csv"}}, ("'../steps.csv'", "same folder")),
        ({"files": {"steps": "other.csv"}}, ("other.csv", "No such file")),
    ],
)
def test_a_manifest_that_is_not_one_is_refused(
    splitwise: Path, change: dict[str, object], words: tuple[str, ...]
) -> None:
    (splitwise / "profile.json").write_text(json.dumps(SPLITWISE | change))
    told = refusal(splitwise)
    assert str(splitwise) in told
    assert all(word in told for word in words), told


def test_tables_of_one_layer_need_their_number(kernels: Path) -> None:
    (kernels / "profile.json").write_text(json.dumps({**KERNELS, "num_layers": None}))
    assert "num_layers is missing" in refusal(kernels)


@pytest.mark.parametrize("change", [{"tensor_parallel": 2}, {"all_reduce": {"seconds": 0, "bytes_per_second": 1}}])
def test_ranks_and_the_cost_of_their_sums_come_together(kernels: Path, change: dict[str, object]) -> None:
    files = {"linear": "dense.csv", "attention": "attention.csv"}
    (kernels / "profile.json").write_text(json.dumps({**KERNELS, "format": "vidur", "files": files, **change}))
    assert re.search(r"tensor_parallel is \d, all_reduce is (given|missing)", refusal(kernels))


def test_a_broken_archive_and_a_broken_text_are_refused_by_file(splitwise: Path) -> None:
    (splitwise / "profile.json").write_text(json.dumps(SPLITWISE | {"files": {"steps": "steps.csv.gz"}}))
    (splitwise / "steps.csv.gz").write_bytes(b"not gzip")
    assert "steps.csv.gz" in refusal(splitwise)
    (splitwise / "profile.json").write_text("{")
    assert "profile.json" in refusal(splitwise)
    (splitwise / "profile.json").write_text(json.dumps(SPLITWISE))
    (splitwise / "steps.csv").write_bytes(b"\xff\xfe\x00")
    assert "steps.csv" in refusal(splitwise)


def test_what_comes_from_outside_is_bounded(
    splitwise: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "MOST_BYTES", 64)
    assert "larger than" in refusal(splitwise)


def test_a_grid_of_too_many_points_is_refused(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "MOST_POINTS", 8)
    assert "over 8 points" in refusal(kernels)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("overhead", -0.1, ("latency.overhead=-0.1", "0 to 1000 seconds")),
        ("overhead", float("nan"), ("latency.overhead=nan",)),
        ("overhead", 1e308, ("latency.overhead=1e+308",)),
        ("scale", 0, ("latency.scale=0", "above 0 and at most 1000")),
        ("scale", float("inf"), ("latency.scale=inf",)),
        ("scale", float("nan"), ("latency.scale=nan",)),
    ],
)
def test_a_bad_option_is_one_clear_line(splitwise: Path, option: str, value: float, words: tuple[str, ...]) -> None:
    told = refusal(splitwise, **{option: value})
    assert all(word in told for word in words), told


def test_an_unknown_option_is_told_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'latency\.factor'.*scale"):
        load_engine_config(["latency=profiled", "latency.profile=x", "latency.factor=1"])
