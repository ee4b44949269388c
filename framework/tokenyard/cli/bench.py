"""`tokenyard bench KIND [MODEL] [bench.KEY=VALUE] [overrides]`: what parts of the engine cost."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from tokenyard.bench.report import table
from tokenyard.bench.scheduler import default_overrides, run_scheduler_bench, warn_of_unused
from tokenyard.bench.settings import (
    GROUP,
    LatencyBench,
    OverheadBench,
    SchedulerBench,
    StartupBench,
    ThroughputBench,
    read_settings,
)
from tokenyard.bench.startup import run_startup_bench
from tokenyard.cli.arguments import Given, Parser, make_parser, parse
from tokenyard.cli.terminal import say
from tokenyard.errors import UserError, did_you_mean
from tokenyard.launch.config_file import read_config_file
from tokenyard.launch.flags import Flagged

_PLANNED = ("attention", "serve")
_DECODE_COLUMNS = ("num_requests", "num_running", "schedule_us", "update_us", "sum_median_us", "sum_p99_us", "loop_us")
_ADMIT_COLUMNS = ("num_requests", "make_ms", "add_ms", "schedule_ms", "update_ms", "total_ms", "scheduled_tokens")


def command_parser() -> Parser:
    """The command's own flags."""
    description = (
        "Measure what the scheduler and the K/V manager cost without a model (`scheduler`: `bench.mode`, "
        "`bench.num_requests`, `bench.num_steps`, `bench.prompt_len`), or what each part of a real engine's step costs "
        "(`overhead`: `bench.num_requests`, `bench.num_steps`, `bench.prompt_len`); or a whole engine with its model: "
        "tokens a second (`throughput`: `bench.shapes`, `bench.num_rounds`, `bench.seed`), seconds for a batch "
        "(`latency`: `bench.batch_size`, `bench.input_len`, `bench.output_len`, `bench.num_iters`, "
        "`bench.num_iters_warmup`, `bench.seed`), seconds from the start of a process to the first token (`startup`: "
        "`bench.num_iters`)."
    )
    usage = f"{{{','.join(_KINDS)}}} [MODEL] [--json] [bench.KEY=VALUE] [overrides]"
    parser = make_parser("bench", usage, description, model_at=1)
    parser.own_group = GROUP
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Figures go to stdout, everything else to stderr."""
    given = parse(command_parser(), arguments)
    _KINDS[_kind(given)](given)
    return 0


def _kind(given: Given) -> str:
    there = f"there is: {', '.join(_KINDS)}"
    if not given.words:
        raise UserError(f"what to measure is missing: tokenyard bench KIND; {there}; planned: {', '.join(_PLANNED)}")
    kind = given.words[0]
    if kind in _PLANNED:
        raise UserError(f"`tokenyard bench {kind}` is not available in this version; {there}")
    if kind not in _KINDS:
        raise UserError(f"unknown benchmark '{kind}'{did_you_mean(kind, _KINDS)}; {there}")
    return kind


def _scheduler(given: Given) -> None:
    settings = read_settings(SchedulerBench, given.own_overrides)
    for override in given.overrides:
        if isinstance(override, Flagged) and override.flag == "MODEL":
            raise UserError("`tokenyard bench scheduler` runs no model; remove the second word")
    keys = _keys(given)
    warn_of_unused(keys)
    rows = []
    for size in settings.sizes:
        config, catalogue = _with(given, default_overrides(settings, size, keys)).load()
        rows.append(run_scheduler_bench(settings, size, config, catalogue, keys))
    if given.flags.json:
        print(json.dumps(rows if isinstance(settings.num_requests, tuple) else rows[0]))
        return
    print(table(rows, _DECODE_COLUMNS if settings.mode == "decode" else _ADMIT_COLUMNS))
    names = ("scheduler", "policy", "kv_cache", "block_size", "python", "load")
    say(f"[{', '.join(f'{name} {rows[0][name]}' for name in names)}]")


def _overhead(given: Given) -> None:
    settings = read_settings(OverheadBench, given.own_overrides)
    logging.getLogger("tokenyard.front_end").setLevel(logging.INFO)
    from tokenyard.bench.overhead import default_overrides, run_overhead_bench  # imports what runs models

    report = run_overhead_bench(settings, *_with(given, default_overrides(settings, _keys(given))).load())
    if given.flags.json:
        print(json.dumps(report))
        return
    rows = cast("Sequence[Mapping[str, object]]", report["parts"])
    shown = [{**row, "share %": 100 * cast("float", row["share"])} for row in rows]
    print(table(shown, ("part", "self_us", "share %", "calls")))
    say(
        f"[{report['wall_us']} us a step, {report['overhead_us']} of it outside of the executor; "
        f"{report['num_requests']} requests, {report['model']}, {report['dtype']}, {report['device']}; the timers "
        f"cost {report['timers_us']} us of it, {report['timer_us']} a call; load {report['load']}]"
    )


def _throughput(given: Given) -> None:
    settings = read_settings(ThroughputBench, given.own_overrides)
    logging.getLogger("tokenyard.front_end").setLevel(logging.INFO)
    from tokenyard.bench.generation import default_overrides, run_throughput_bench  # imports what runs models

    defaults = default_overrides(settings.parsed, _keys(given))
    rows = run_throughput_bench(settings, *_with(given, defaults).load())
    if given.flags.json:
        print(json.dumps(rows if len(rows) > 1 else rows[0]))
        return
    print(table(rows, ("shape", "output_tokens_per_s", "total_tokens_per_s", "requests_per_s", "seconds")))
    say(f"[{_facts_of(rows[0])}; {settings.num_rounds} rounds, each shape on an empty prefix cache]")


def _latency(given: Given) -> None:
    settings = read_settings(LatencyBench, given.own_overrides)
    logging.getLogger("tokenyard.front_end").setLevel(logging.INFO)
    from tokenyard.bench.generation import default_overrides, run_latency_bench  # imports what runs models

    row = run_latency_bench(settings, *_with(given, default_overrides([settings.shape], _keys(given))).load())
    if given.flags.json:
        print(json.dumps(row))
        return
    percentiles = cast("Mapping[str, float]", row["percentiles_s"])
    print(f"{settings.shape}: {row['avg_latency_s']} s on average over {settings.num_iters} batches")
    print(", ".join(f"p{share} {seconds} s" for share, seconds in percentiles.items()))
    print(f"first token {row['median_ttft_s']} s, each further one {1000 * cast('float', row['median_tpot_s']):.2f} ms")
    say(f"[{_facts_of(row)}]")


def _startup(given: Given) -> None:
    settings = read_settings(StartupBench, given.own_overrides)
    given.load()  # a mistake in what is given is told here, once
    row = run_startup_bench(settings.num_iters, _arguments(given))
    if given.flags.json:
        print(json.dumps(row))
        return
    phases = cast("Mapping[str, float]", row["phases_s"])
    print(f"first token {row['first_token_s']} s after the start ({row['first_start_s']} s the first time)")
    print(", ".join(f"{name} {seconds:.2f} s" for name, seconds in phases.items()))
    say(
        f"[{row['model']}, medians of {settings.num_iters} starts, {row['wall_s']} s with the process's end; "
        f"python {row['python']}, load {row['load']}]"
    )


def _facts_of(row: Mapping[str, object]) -> str:
    names = ("decoder", "dtype", "device", "attention", "engine", "threads", "torch", "python", "load")
    return f"{row['model']}, {', '.join(f'{name} {row[name]}' for name in names)}"


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


_KINDS: Mapping[str, Callable[[Given], None]] = {
    "scheduler": _scheduler,
    "overhead": _overhead,
    "throughput": _throughput,
    "latency": _latency,
    "startup": _startup,
}
