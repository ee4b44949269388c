"""Facts of a run: the same for the same config, another hash for another one, and nothing that changes by itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tokenyard.config import NO_OPTIONS, EngineConfig, PolicyConfig, SLOConfig
from tokenyard.errors import UserError
from tokenyard.experiments import facts
from tokenyard.experiments.config_file import read_config, read_overrides, write_config
from tokenyard.experiments.facts import UNHASHED, config_hash, config_values, run_facts
from tokenyard.launch.compose import load_engine_config
from tokenyard.launch.overrides import quote_override

BASE = (
    "executor=simulated",
    "latency=linear",
    "latency.per_step=0.005",
    "latency.per_token=1e-5",
    "workload=synthetic",
)


def config_of(*overrides: str) -> EngineConfig:
    return load_engine_config([*BASE, *overrides])[0]


@pytest.fixture(scope="module")
def base() -> EngineConfig:
    return config_of()


def in_group(config: EngineConfig, group: str, **values: object) -> EngineConfig:
    return replace(config, **{group: replace(getattr(config, group), **values)})


@pytest.mark.parametrize(
    ("group", "values"),
    [
        ("trace", {"path": "a.jsonl", "chrome": "b.json"}),
        ("experiment", {"dir": "/somewhere", "jobs": 7, "sinks": ("wandb",)}),
        ("server", {"port": 1234}),
    ],
)
def test_what_no_result_depends_on_does_not_change_the_hash(
    base: EngineConfig, group: str, values: dict[str, object]
) -> None:
    assert config_hash(in_group(base, group, **values)) == config_hash(base)


def test_a_default_that_is_said_does_not_change_the_hash(base: EngineConfig) -> None:
    assert config_hash(config_of("scheduler=fcfs", "seed=0", "kv_cache.block_size=16")) == config_hash(base)


@pytest.mark.parametrize(
    ("group", "values"),
    [
        ("scheduler", {"policy": PolicyConfig(name="sjf")}),
        ("scheduler", {"predictor": "noisy"}),
        ("engine", {"name": "overlap"}),
        ("workload", {"limit": 10}),
        ("workload", {"time_scale": 0.5}),
        ("workload", {"clients": 3}),
        ("kv_cache", {"block_size": 32}),
        ("experiment", {"slo": SLOConfig(ttft="1s")}),
        ("experiment", {"target": "http://127.0.0.1:1"}),
        ("latency", {"options": NO_OPTIONS}),
    ],
)
def test_what_a_result_depends_on_changes_the_hash(base: EngineConfig, group: str, values: dict[str, object]) -> None:
    assert config_hash(in_group(base, group, **values)) != config_hash(base)
    assert config_hash(replace(base, seed=1)) != config_hash(base)


def test_the_keys_that_are_left_out_of_the_hash_exist(base: EngineConfig) -> None:
    values = config_values(base)
    for key in UNHASHED:
        group, _, name = key.partition(".")
        node = values[group]
        assert isinstance(node, dict)
        assert not name or name in node, key


def test_facts_are_ready_for_json_and_the_same_twice() -> None:
    given = load_engine_config([*BASE, "seed=5"])
    first = json.dumps(run_facts(*given))
    assert json.dumps(run_facts(*load_engine_config([*BASE, "seed=5"]))) == first
    found = json.loads(first)
    assert (found["engine"], found["executor"], found["seed"], found["target"]) == ("sync", "simulated", 5, None)
    assert found["config_hash"] == config_hash(given[0])


def test_facts_name_who_provides_each_chosen_part() -> None:
    found = run_facts(*load_engine_config([*BASE, "scheduler=vtc", "observers=[step_logger]"]))
    listed = found["components"]
    assert isinstance(listed, list)
    named = {(one["kind"], one["name"]) for one in listed}
    assert named >= {
        ("engine", "sync"),
        ("policy", "vtc"),
        ("executor", "simulated"),
        ("workload", "synthetic"),
        ("latency", "linear"),
        ("observer", "step_logger"),
    }
    assert all(one["distribution"] and one["version"] for one in listed)


def test_the_commit_is_of_this_checkout_or_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = facts.commit()
    assert found is None or len(found.removesuffix("-dirty")) == 40
    monkeypatch.setattr(facts, "_PACKAGE", tmp_path / "site-packages" / "tokenyard")
    assert facts.commit.__wrapped__() is None
    monkeypatch.undo()
    monkeypatch.setenv("PATH", "")
    assert facts.commit.__wrapped__() is None


@pytest.mark.parametrize(
    "overrides",
    [
        ["scheduler=mlfq", "engine=overlap", "kv_cache=radix", "workload=shared_prefix", "latency.per_step=1e-7"],
        ["observers=[step_logger]", "logits_processors=[{name: no_repeat_ngram, size: 3}]"],
        ["workload.clients={number: 10, zipf: 1.5}", "experiment.slo.ttft=500ms", "workload.time_scale=1e+20"],
        [quote_override("trace.path", 'a "b"\t${c}: #d é.jsonl')],
    ],
)
def test_a_config_is_read_back_from_its_folder_exactly(tmp_path: Path, overrides: list[str]) -> None:
    config = config_of(*overrides)
    write_config(tmp_path, config, [*BASE, *overrides])
    found, _ = read_config(tmp_path)
    assert found == config
    assert read_overrides(tmp_path) == [*BASE, *overrides]


def test_a_config_that_is_none_is_refused(tmp_path: Path, base: EngineConfig) -> None:
    with pytest.raises(UserError, match=r"config\.yaml: cannot be read"):
        read_config(tmp_path)
    write_config(tmp_path, base, [])
    assert read_overrides(tmp_path) == []
    (tmp_path / ".hydra" / "config.yaml").write_text("- 1\n")
    with pytest.raises(UserError, match="is no config"):
        read_config(tmp_path)
    (tmp_path / ".hydra" / "overrides.yaml").write_text("a: 1\n")
    with pytest.raises(UserError, match="no list of overrides"):
        read_overrides(tmp_path)
