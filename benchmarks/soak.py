"""A server under mixed load for a long time: what it answers, what it leaves behind, and whether it grows.

    python benchmarks/soak.py [--minutes 10] [--seed 0] [--model FOLDER] [--concurrency 24] [--idle-every 400]
        [flags and overrides of `tokenyard serve`]

`tokenyard serve`, its engine in a process of its own, and clients that ask for chats, completions, streams, several
choices, stop strings and logprobs, that leave, read slowly, have deadlines and ask for what cannot be; the K/V cache is
so small that requests are preempted. Every answer is checked, some against what `LLM` makes of the same prompt. After
every `--idle-every` requests all is let run empty: no request, block or file may be left, and at the end no process.
Prints tables and one JSON line last; the exit code is 1 when a bar is not met. On a machine that others use too, the
bar on latency says little. `--model` is a folder that float32 runs well; without it a tiny random one is made.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from server_process import ServerProcess, serving
from soak_model import MAX_LENGTH, write_model
from soak_traffic import Reference, Seen, Traffic
from soak_watch import IdlePoint, Watch
from tokenyard.bench.generation import percentile
from tokenyard.bench.report import machine, table
from tokenyard.client.connection import Connection
from tokenyard.client.endpoint import Endpoint
from tokenyard.model.default_model import ensure_default_model

MAX_GROWTH = 1.0  # MiB in 1000 requests, of each process
MAX_LATENCY_RATIO = 1.2  # p99 between tokens, the last quarter against the first
WARM_UP = 0.2  # of the time: neither growth nor latency counts yet
MAX_PROBLEMS = 20  # then it ends
NUM_REFERENCES, REFERENCE_TOKENS = 8, 24
CLEAR = 1e-3  # between the log probabilities of the two likeliest tokens: no order of additions turns them over
# oneDNN, and what torch has before it, keep something for each number of rows that a layer has seen, 1024 of them
# unless told otherwise: a third of a GiB for this model, which would look like growth for the first 10,000 requests.
CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32", "LRU_CACHE_CAPACITY": "32"}
ENVIRONMENT = {**CACHES, "HF_HUB_OFFLINE": "1"}
SETTINGS = (
    *("--max-model-len", str(MAX_LENGTH), "--shutdown-timeout", "5", "engine.process=own", "executor.num_threads=1"),
    *(
        "model.dtype=float32",
        "kv_cache.num_blocks=96",
        "scheduler.max_num_seqs=16",
        "scheduler.max_num_batched_tokens=256",
    ),
    *("server.max_num_queued_reqs=40", "server.slow_reader_timeout=5"),
)


class Bar(NamedTuple):
    """What was found, and the most that it may be."""

    found: float
    most: float

    @property
    def is_met(self) -> bool:
        return self.found <= self.most


def references(model: Path) -> tuple[list[Reference], int]:
    """Prompts whose greedy continuation is clear at every token, by an LLM in this process; the vocabulary's size."""
    from tokenyard import LLM, SamplingParams

    numbers = random.Random(1)  # noqa: S311 - no secret
    prompts = [[numbers.randrange(100, 5000) for _ in range(numbers.randint(2, 60))] for _ in range(64)]
    params = SamplingParams(temperature=0, max_tokens=REFERENCE_TOKENS, ignore_eos=True, logprobs=2)
    found = []
    keys = ["kv_cache.num_blocks=256", "executor.num_threads=1"]
    with LLM(str(model), dtype="float32", max_model_len=MAX_LENGTH, overrides=keys) as llm:
        for prompt in prompts:
            (output,) = llm.generate(prompt, params, use_tqdm=False)
            choice = output.outputs[0]
            rows = [sorted((one.logprob for one in row.values()), reverse=True) for row in choice.logprobs or ()]
            if min(row[0] - row[1] for row in rows) > CLEAR:
                found.append(Reference(prompt, choice.text, REFERENCE_TOKENS))
            if len(found) == NUM_REFERENCES:
                return found, llm.model_config.vocab_size
    raise SystemExit(f"{model}: its greedy continuations are too close to call; give another --model")


async def soak(
    server: ServerProcess, given: argparse.Namespace, known: Sequence[Reference], vocab_size: int
) -> tuple[Watch, Seen]:
    """Load and idle points in turn until the time is up."""
    endpoint, seen = Endpoint(server.url), Seen()
    async with Connection(endpoint) as connection:
        name = str(json.loads((await connection.request("GET", "/v1/models")).body)["data"][0]["id"])
        await every_token(connection, name, vocab_size)
    watch = Watch(server, name)
    await watch.look(0)
    numbers = random.Random(given.seed)  # noqa: S311 - no secret
    while watch.points[-1].seconds < 60 * given.minutes and len(seen.problems) <= MAX_PROBLEMS:
        async with Connection(endpoint) as connection:
            await load(Traffic(connection, name, known, numbers, seen), given)
        point = await watch.look(seen.num_ended)
        sizes = ", ".join(f"{process} {use.rss:.1f}" for process, use in point.use.items())
        wrong = len(seen.problems) + len(watch.leaks)
        print(f"{point.seconds:6.1f} s: {point.num_requests} requests, {wrong} wrong; MiB: {sizes}", file=sys.stderr)
    return watch, seen


async def every_token(connection: Connection, model: str, vocab_size: int) -> None:
    """Ask for each token's text once: the server keeps those that it has told, which would look like growth."""
    size = MAX_LENGTH // 2
    for first in range(0, vocab_size, size):
        prompt = list(range(first, min(first + size, vocab_size)))
        body = {"model": model, "prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 0}
        await connection.json("POST", "/v1/completions", body)


async def load(traffic: Traffic, given: argparse.Namespace) -> None:
    """`--idle-every` requests, `--concurrency` of them at once."""
    left = iter(range(given.idle_every))

    async def client() -> None:
        for _ in left:
            await traffic.one()

    async with asyncio.TaskGroup() as clients:
        for _ in range(given.concurrency):
            clients.create_task(client())


def growth(points: Sequence[IdlePoint]) -> dict[str, float]:
    """MiB in 1000 requests of each process: the slope of a line through the points after the warm-up."""
    warm = [point for point in points if point.seconds >= WARM_UP * points[-1].seconds]
    warm = warm if len(warm) > 1 else list(points[-2:])
    at = [point.num_requests / 1000 for point in warm]
    names = set.intersection(*(set(point.use) for point in warm))
    return {
        name: round(statistics.linear_regression(at, [point.use[name].rss for point in warm]).slope, 3)
        for name in sorted(names)
    }


def latencies(gaps: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """p99 of the seconds between tokens, in the first and the last quarter of the time after the warm-up."""
    if not gaps:
        return 0.0, 0.0
    first, last = min(at for at, _ in gaps), max(at for at, _ in gaps)
    begin = first + WARM_UP * (last - first)
    quarter = (last - begin) / 4
    early = [gap for at, gap in gaps if begin <= at <= begin + quarter]
    late = [gap for at, gap in gaps if at >= last - quarter]
    return (percentile(early, 99), percentile(late, 99)) if early and late else (0.0, 0.0)


def bars(watch: Watch, seen: Seen, num_preemptions: float, left: Sequence[str], code: int) -> dict[str, Bar]:
    """Everything that is asked of a server."""
    early, late = latencies(seen.gaps)
    found = {f"growth of {name}, MiB/1000": Bar(slope, MAX_GROWTH) for name, slope in growth(watch.points).items()}
    return found | {
        "p99 between tokens, last/first quarter": Bar(round(late / early, 3) if early else 0.0, MAX_LATENCY_RATIO),
        "answers that are wrong": Bar(len(seen.problems), 0),
        "left behind at idle points": Bar(len(watch.leaks), 0),
        "left behind at the end": Bar(len(left), 0),
        "exit code": Bar(abs(code), 0),
        "kinds of load that did not happen": Bar(sum(not one for one in (num_preemptions, seen.num_checked)), 0),
    }


def report(watch: Watch, seen: Seen, found: Mapping[str, Bar]) -> None:
    """Tables for people."""
    first, last = watch.points[1], watch.points[-1]
    rows = [
        {
            "process": name,
            "MiB after one load": first.use[name].rss if name in first.use else 0.0,
            "at the end": use.rss,
        }
        | {"files": use.num_files, "threads": use.num_threads, "CPU s": use.cpu}
        for name, use in last.use.items()
    ]
    print(table(rows, list(rows[0])))
    print(
        table([{"outcome": name, "requests": n} for name, n in sorted(seen.outcomes.items())], ("outcome", "requests"))
    )
    shown = [{"bar": name, **bar._asdict(), "": "met" if bar.is_met else "MISSED"} for name, bar in found.items()]
    print(table([{**row, "found": str(row["found"])} for row in shown], ("bar", "found", "most", "")))
    for problem in (*seen.problems[:MAX_PROBLEMS], *watch.leaks[:MAX_PROBLEMS]):
        print(problem)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, metavar="FOLDER")
    parser.add_argument("--concurrency", type=int, default=24, help="requests at once")
    parser.add_argument("--idle-every", type=int, default=400, help="requests from idle point to idle point")
    given, more = parser.parse_known_args(words)
    if min(given.minutes, given.concurrency, given.idle_every) <= 0:
        parser.error("--minutes, --concurrency and --idle-every take numbers above 0")
    given.more = more
    return given


def main() -> int:
    given, around = parse(), machine()
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        model, scratch = given.model or Path(name) / "model", Path(name) / "tmp"
        scratch.mkdir()
        if given.model is None:
            write_model(model, ensure_default_model(print))
        known, vocab_size = references(model)
        environment = {**ENVIRONMENT, "TMPDIR": str(scratch)}
        with serving([str(model), *SETTINGS, *given.more], environment=environment) as server:
            watch, seen = asyncio.run(soak(server, given, known, vocab_size))
            metrics = watch.metrics()
            code, seconds, left = server.stop()
        left += os.listdir(scratch)
    num_preemptions = metrics["tokenyard:num_preemptions_total"]
    found = bars(watch, seen, num_preemptions, left, code)
    report(watch, seen, found)
    early, late = latencies(seen.gaps)
    facts = {
        "seconds": round(watch.points[-1].seconds, 1),
        "requests": seen.num_ended,
        "checked_against_reference": seen.num_checked,
        "preemptions": num_preemptions,
        "generated_tokens": metrics["tokenyard:generation_tokens_total"],
        "p99_itl_ms": [round(1000 * early, 2), round(1000 * late, 2)],
        "end_s": round(seconds, 2),
        "seed": given.seed,
    }
    print(json.dumps({"bars": {name: bar._asdict() for name, bar in found.items()}, **facts, **around}))
    return 0 if all(bar.is_met for bar in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
