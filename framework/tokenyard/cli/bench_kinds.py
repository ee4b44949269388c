"""The kinds of `tokenyard bench`: each reads its settings, measures, and prints a table or a line of JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias, cast

from tokenyard.bench.report import table
from tokenyard.bench.scheduler import default_overrides, run_scheduler_bench, warn_of_unused
from tokenyard.bench.settings import (
    AttentionBench,
    LatencyBench,
    OverheadBench,
    SchedulerBench,
    StartupBench,
    ThroughputBench,
    read_settings,
)
from tokenyard.bench.startup import run_startup_bench
from tokenyard.catalogue import BUILTIN_DISTRIBUTION
from tokenyard.cli.arguments import tell_progress
from tokenyard.cli.bench_serve import serve_kind
from tokenyard.cli.terminal import say
from tokenyard.errors import TokenyardError, UserError
from tokenyard.launch.config_file import read_config_file
from tokenyard.launch.flags import Flagged
from tokenyard.model.files import resolve_model

if TYPE_CHECKING:
    from tokenyard.cli.arguments import Given

Kind: TypeAlias = "Callable[[Given], None]"

_STEP_COLUMNS = ("schedule_us", "update_us", "sum_median_us", "sum_p99_us", "loop_us")
_SCHEDULER_COLUMNS = {
    "decode": ("num_requests", "num_running", *_STEP_COLUMNS),
    "churn": ("num_requests", "num_running", "num_waiting", "add_us", *_STEP_COLUMNS),
    "admit": ("num_requests", "make_ms", "add_ms", "schedule_ms", "update_ms", "total_ms", "scheduled_tokens"),
}
_ATTENTION_COLUMNS = ("shape", "backend", "mode", "median_us", "min_us", "plan_us", "floor_us")
_ATTENTION_SHARES = {"times_floor": "{:.2f}", "vs_torch_native": "{:.2f}", "gflop_per_s": "{:.0f}", "error": "{:.0e}"}
_THROUGHPUT_COLUMNS = ("shape", "output_tokens_per_s", "total_tokens_per_s", "requests_per_s", "seconds")


def _scheduler(given: Given) -> None:
    settings = read_settings(SchedulerBench, given.own_overrides)
    _refuse_model(given)
    keys = _keys(given)
    loaded = [(size, *_with(given, default_overrides(settings, size, keys)).load()) for size in settings.sizes]
    warn_of_unused(keys)  # after that, so that a mistake is told alone
    rows = [run_scheduler_bench(settings, *one, keys) for one in loaded]
    if given.flags.json:
        print(json.dumps(rows if isinstance(settings.num_requests, tuple) else rows[0]))
        return
    print(table(rows, _SCHEDULER_COLUMNS[settings.mode]))
    names = ("scheduler", "policy", "kv_cache", "block_size", "python", "load")
    say(f"[{', '.join(f'{name} {rows[0][name]}' for name in names)}]")


def _overhead(given: Given) -> None:
    settings = read_settings(OverheadBench, given.own_overrides)
    _tell_progress()
    from tokenyard.bench.overhead import default_overrides, run_overhead_bench  # imports what runs models

    report = run_overhead_bench(settings, *_with(given, default_overrides(settings, _keys(given))).load())
    if given.flags.json:
        print(json.dumps(report))
        return
    rows = cast("Sequence[Mapping[str, object]]", report["parts"])
    shown = [{**row, "part": _part_text(row), "share %": 100 * cast("float", row["share"])} for row in rows]
    print(table(shown, ("part", "self_us", "share %", "calls")))
    say(
        f"[{report['wall_us']} us a step, {report['overhead_us']} of it outside of the executor; "
        f"{report['num_requests']} requests, {report['model']}, {report['dtype']}, {report['device']}; the timers "
        f"cost {report['timers_us']} us of it, {report['timer_us']} a call; load {report['load']}]"
    )


def _part_text(row: Mapping[str, object]) -> str:
    """With the plugin's name, and the distribution of one that is not built in."""
    if row["plugin"] is None:
        return str(row["part"])
    distribution = row["distribution"]
    source = "" if distribution in (None, BUILTIN_DISTRIBUTION) else f" of {distribution}"
    return f"{row['part']} [{row['plugin']}{source}]"


def _throughput(given: Given) -> None:
    settings = read_settings(ThroughputBench, given.own_overrides)
    _tell_progress()
    from tokenyard.bench.generation import default_overrides, run_throughput_bench  # imports what runs models

    defaults = default_overrides(settings.parsed, _keys(given))
    rows = run_throughput_bench(settings, *_with(given, defaults).load())
    if given.flags.json:
        print(json.dumps(rows if isinstance(settings.shapes, tuple) else rows[0]))
        return
    print(table(rows, _THROUGHPUT_COLUMNS))
    say(
        f"[{_facts_of(rows[0])}; medians of {settings.num_rounds} rounds after {rows[0]['warm_up']} to warm up, each "
        "shape on an empty prefix cache]"
    )


def _latency(given: Given) -> None:
    settings = read_settings(LatencyBench, given.own_overrides)
    _tell_progress()
    from tokenyard.bench.generation import default_overrides, run_latency_bench  # imports what runs models

    row = run_latency_bench(settings, *_with(given, default_overrides([settings.shape], _keys(given))).load())
    if given.flags.json:
        print(json.dumps(row))
        return
    percentiles = cast("Mapping[str, float]", row["percentiles"])
    print(f"Avg latency: {row['avg_latency']} seconds")
    for share, seconds in percentiles.items():
        print(f"{share}% percentile latency: {seconds} seconds")
    for name, about in (("ttft", "first token"), ("itl", "between tokens")):
        figures = ", ".join(f"{figure} {row[f'{figure}_{name}_ms']}" for figure in ("mean", "median", "p99"))
        print(f"{about}, ms: {figures}")
    say(
        f"[{settings.shape}, {settings.num_iters} batches after {settings.num_iters_warmup} to warm up, each on an "
        f"empty prefix cache; {_facts_of(row)}]"
    )


def _startup(given: Given) -> None:
    settings = read_settings(StartupBench, given.own_overrides)
    _tell_progress()
    config, _ = given.load()  # a mistake in what is given is told here, once
    files = resolve_model(config.model.name, say, revision=config.model.revision)  # fetched here, if at all
    row = run_startup_bench(settings.num_iters, files.path, _arguments(given))
    if given.flags.json:
        print(json.dumps(row))
        return
    for name in ("cold", "warm"):
        if row[name] is not None:
            print(_start_text(name, cast("Mapping[str, object]", row[name])))
    say(
        f"[medians of {settings.num_iters} starts of each kind; wall: until the process has ended; {row['model']}, "
        f"python {row['python']}, load {row['load']}]"
    )


def _attention(given: Given) -> None:
    settings = read_settings(AttentionBench, given.own_overrides)
    _refuse_model(given)
    _tell_progress()
    from tokenyard.bench.attention import busy_text, run_attention_bench, warn_of_unused  # imports torch

    loaded = given.load()
    warn_of_unused(_keys(given))
    rows, skipped, failures, facts = run_attention_bench(settings, *loaded)
    if given.flags.json:
        told = [{"backend": one.name, "reasons": list(one.reasons)} for one in skipped]
        print(json.dumps({**facts, "rows": rows, "skipped": told, "failures": failures}))
    elif rows:
        print(table([_attention_cells(row) for row in rows], (*_ATTENTION_COLUMNS, *_ATTENTION_SHARES)))
        say(_attention_facts(rows, facts))
    for one in skipped if not given.flags.json else ():
        say(f"not {one.name}: {'; '.join(one.reasons)}")
    if busy := busy_text(rows):
        say(f"WARNING: {busy}")
    if failures:
        raise TokenyardError("; ".join(failures))


def _attention_cells(row: Mapping[str, object]) -> Mapping[str, object]:
    cells = {name: "-" if row[name] is None else text.format(row[name]) for name, text in _ATTENTION_SHARES.items()}
    return {**row, **cells}


def _attention_facts(rows: Sequence[Mapping[str, object]], facts: Mapping[str, object]) -> str:
    names = ("dtype", "block_size", "device", "threads", "tokenyard", "torch", "python", "load")
    described = {f"{row['backend']}: {row['description']}": None for row in rows if row["description"]}
    speeds = sorted({cast("float", row["read_gb_per_s"]) for row in rows})
    read = f"{speeds[0]} to {speeds[-1]}" if len(speeds) > 1 else str(speeds[0])
    heads = f"{facts['num_heads']}/{facts['num_kv_heads']} heads of {facts['head_dim']}"
    about = ", ".join((heads, *(f"{name} {facts[name]}" for name in names), *described))
    return f"[a layer each, medians of calls in turn; floor: K and V at {read} GB/s, read in the same sitting; {about}]"


def _start_text(name: str, figures: Mapping[str, object]) -> str:
    phases = cast("Mapping[str, float]", figures["phases_s"])
    parts = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in phases.items() if phase != "rest")
    return f"{name} start: first token after {figures['first_token_s']:.2f} s ({parts}), wall {figures['wall_s']:.2f} s"


def _refuse_model(given: Given) -> None:
    for override in given.overrides:
        if isinstance(override, Flagged) and override.flag == "MODEL":
            raise UserError(f"`tokenyard bench {given.words[0]}` runs no model; remove the second word")


def _tell_progress() -> None:
    """A model that is fetched, and a round that begins, are told on stderr."""
    tell_progress("tokenyard.front_end", "tokenyard.bench")


def _facts_of(row: Mapping[str, object]) -> str:
    names = ("decoder", "dtype", "device", "attention", "engine", "threads", "tokenyard", "torch", "python", "load")
    facts = {**row, "attention": _named(row["attention"], row["attention_description"])}
    return f"{row['model']}, {', '.join(f'{name} {facts[name]}' for name in names)}"


def _named(name: object, description: object) -> str:
    return f"{name} ({description})" if description else str(name)


def _arguments(given: Given) -> list[str]:
    """What was given, for another command line."""
    texts = [override.override if isinstance(override, Flagged) else override for override in given.overrides]
    return [*([] if given.config_file is None else ["--config", str(given.config_file)]), *texts]


def _with(given: Given, defaults: Sequence[str]) -> Given:
    """The command line with the benchmark's own defaults before what the user says."""
    return dataclasses.replace(given, overrides=[*defaults, *given.overrides])


def _keys(given: Given) -> frozenset[str]:
    """The keys that the user sets, in whatever way."""
    texts = [override.override if isinstance(override, Flagged) else override for override in given.overrides]
    if given.config_file is not None:
        texts += [override.text for override in read_config_file(given.config_file)]
    return frozenset(text.partition("=")[0].lstrip("+") for text in texts)


KINDS: Mapping[str, Kind] = {
    "scheduler": _scheduler,
    "overhead": _overhead,
    "attention": _attention,
    "throughput": _throughput,
    "latency": _latency,
    "startup": _startup,
    "serve": serve_kind,
}
