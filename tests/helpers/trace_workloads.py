"""Trace files for tests, and the workloads that are made of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import yaml
from tokenyard.catalogue import Catalogue
from tokenyard.config import EngineConfig, WorkloadConfig
from tokenyard.experiments.workloads import make_workload
from tokenyard.interfaces.workload import Workload, WorkloadRequest
from tokenyard.launch.compose import load_engine_config
from tokenyard.launch.convert import to_dataclass
from tokenyard_plugins.workload_trace import TraceOptions

SERVEGEN_RATES = "600,{rate},1.5,{pattern},{shape},0.1\n1200,0,0,,0,0\n1800,{rate},1.5,{pattern},{shape},0.1\n"
SERVEGEN_LENGTHS = {"600": {"input_tokens": "{10: 0.25, 20: 0.75}", "output_tokens": "{0: 0.5, 7: 0.5}"}}


def write_servegen(folder: Path, name: str, *, rate: float = 2.0, pattern: str = "Gamma", shape: float = 0.5) -> Path:
    """A client of two 600-second windows with a silent one between them."""
    trace = folder / f"{name}-trace.csv"
    trace.write_text(SERVEGEN_RATES.format(rate=rate, pattern=pattern, shape=shape))
    (folder / f"{name}-dataset.json").write_text(json.dumps(SERVEGEN_LENGTHS))
    return trace


def trace_workload(path: Path | str, *overrides: str) -> Workload:
    """`workload=trace` of a file; the overrides are composed without Hydra, which takes a third of a second."""
    config, catalogue = _loaded()
    values: dict[str, object] = {"path": str(path)}
    for override in overrides:
        key, _, text = override.partition("=")
        values[key.removeprefix("workload.")] = yaml.safe_load(text.replace("nan", ".nan"))
    seed = values.pop("seed", 0)
    core = {name: values.pop(name) for name in ("limit", "clients") if name in values}
    options = to_dataclass(TraceOptions, values, "workload")
    workload = replace(to_dataclass(WorkloadConfig, core, "workload"), name="trace", options=options)
    assert isinstance(seed, int)
    return make_workload(replace(config, workload=workload, seed=seed), catalogue)


@cache
def _loaded() -> tuple[EngineConfig, Catalogue]:
    return load_engine_config([])


def trace_requests(path: Path | str, *overrides: str) -> list[WorkloadRequest]:
    return list(trace_workload(path, *overrides).requests())


def preset(name: str, *overrides: str) -> Workload:
    """`workload=NAME`, a public trace."""
    return make_workload(*load_engine_config([f"workload={name}", *overrides]))


def write_jsonl(path: Path, rows: Sequence[dict[str, object]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def write_steady(path: Path, num_rows: int) -> Path:
    """A row each second, of a prompt length that no other has."""
    return write_jsonl(path, [{"arrival": n + 5.0, "prompt": n + 1, "output": 3} for n in range(num_rows)])
