"""The file of a fitted latency model: what it says, what it refuses, and when it warns."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenyard.errors import ConfigError, UserError
from tokenyard.interfaces.latency import StepLoad
from tokenyard.latency_fit import (
    Errors,
    Fit,
    FitFile,
    LatencyFit,
    differences,
    pairs_of,
    read_fit,
    settings_of,
    write_fit,
)
from tokenyard.launch.compose import load_engine_config

FIT = Fit(
    per_step=0.5,
    token_knots=(0, 4, 10),
    per_token=(0.0, 0.01, 0.1),
    per_decode=0.001,
    per_prefill=0.002,
    per_decode_context_token=1e-5,
    per_prefill_pair=1e-6,
)
ERRORS = Errors(num_steps=10, mean=0.02, median=0.01, total=-0.005)
FILE = FitFile(
    format="tokenyard.latency_fit",
    version=1,
    created="2026-01-02T03:04:05+00:00",
    machine={"cpu": "a cpu", "cores": 2, "device": "cpu", "dtype": "float32"},
    settings=settings_of(load_engine_config([])[0]),
    most_tokens=1 << 20,
    fit=FIT,
    in_sample=ERRORS,
    held_out=ERRORS,
)

Change = Callable[[dict[str, object]], object]


def written(folder: Path, change: Change = lambda values: None) -> Path:
    path = folder / "latency.json"
    write_fit(path, FILE)
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    return path


def test_a_step_is_the_sum_of_what_it_costs() -> None:
    load = StepLoad(3, 1000, 2, 12, 100)  # 15 tokens: 4 for nothing, 6 at 0.01, 5 at 0.1
    pairs = 12 * (100 + 14 / 2) / 2
    expected = 0.5 + 6 * 0.01 + 5 * 0.1 + 3 * 0.001 + 2 * 0.002 + 1000 * 1e-5 + pairs * 1e-6
    assert LatencyFit(FIT).seconds(load) == pytest.approx(expected)


def test_one_chunk_attends_to_what_is_before_each_of_its_tokens() -> None:
    assert pairs_of(StepLoad(num_prefills=1, num_prefill_tokens=3, num_prefill_context_tokens=10)) == 11 + 12 + 13
    assert pairs_of(StepLoad(num_decodes=4, num_decode_context_tokens=9)) == 0


@given(tokens=st.integers(1, 5000), more=st.integers(1, 100), decodes=st.integers(0, 50), prefills=st.integers(1, 9))
def test_more_prefill_tokens_never_take_less(tokens: int, more: int, decodes: int, prefills: int) -> None:
    def seconds(count: int) -> float:
        return LatencyFit(FIT).seconds(StepLoad(decodes, 7 * decodes, prefills, count + prefills, 50))

    assert seconds(tokens) <= seconds(tokens + more)


def test_what_is_written_is_read_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    write_fit(tmp_path / "a.json", FILE)
    write_fit(tmp_path / "a.json", FILE)
    assert read_fit(str(tmp_path / "a.json")) == FILE
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    with pytest.raises(UserError, match=r"cannot be written: .*; name another file with --to"):
        write_fit(tmp_path / "nowhere" / "a.json", FILE)


def put(*names: str, value: object) -> Change:
    def change(values: dict[str, object]) -> None:
        node = values
        for name in names[:-1]:
            found = node[name]
            assert isinstance(found, dict)
            node = found
        node[names[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (put("format", value="other"), "its format is 'other'"),
        (put("version", value=2), "it has version 2, and this version of Tokenyard reads 1"),
        (put("fit", "per_step", value=0), "per_step=0.0 must be above 0"),
        (put("fit", "per_decode", value=-1), "below 0 or not finite"),
        (put("fit", "per_token", value=[1, 2]), "token_knots must ascend from 0"),
        (put("fit", "token_knots", value=[0, 4, 4]), "token_knots must ascend from 0"),
        (put("fit", "token_knots", value=[1, 4, 5]), "token_knots must ascend from 0"),
        (put("fit", "per_step", value="x"), r"Expected `float`, got `str`.*fit\.per_step"),
        (put("fit", "other", value=1), "unknown field `other`"),
        (lambda values: values.pop("fit"), "missing required field `fit`"),
    ],
)
def test_a_file_that_does_not_hold_is_one_error_that_says_where(tmp_path: Path, change: Change, told: str) -> None:
    path = written(tmp_path, change)
    with pytest.raises(ConfigError, match=f"(?s)latency.path=.*not a file of `tokenyard calibrate` .*{told}") as caught:
        read_fit(str(path))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_none_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    (tmp_path / "large").write_bytes(b" " * (2**20 + 1))
    (tmp_path / "deep").write_text("[" * 100_000)
    for name, told in (("text", "not a file of"), ("large", "more than 1048576 bytes"), ("deep", "not a file of")):
        with pytest.raises(ConfigError, match=told):
            read_fit(str(tmp_path / name))
    for name in ("missing", ".", "a\0b"):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_fit(f"{tmp_path}/{name}")


def test_a_config_differs_by_what_changes_the_time_of_a_step() -> None:
    same, _ = load_engine_config(["executor=simulated", "seed=5"])
    assert differences(FILE, same) == []
    other, _ = load_engine_config(["model.name=another", "engine=overlap", "executor.num_threads=3"])
    found = "; ".join(differences(FILE, other))
    assert "model.name=another (it was smollm2-135m)" in found
    assert "engine=overlap (it was sync)" in found
    assert "executor.num_threads=3 (it was null)" in found


def test_a_budget_beyond_what_was_measured_is_told() -> None:
    config, _ = load_engine_config(["scheduler.max_num_batched_tokens=512"])
    file = FitFile(**{**{name: getattr(FILE, name) for name in FILE.__struct_fields__}, "most_tokens": 100})
    assert differences(file, config) == ["scheduler.max_num_batched_tokens=512 (steps of at most 100 were measured)"]
    smaller = replace(config, scheduler=replace(config.scheduler, max_num_batched_tokens=100))
    assert differences(file, smaller) == []
