"""What streaming costs the API process: its share of a core at a given rate of tokens, one event a token.

    python benchmarks/serve_cpu.py [--streams 64] [--rate 1000] [--seconds 10] [--endpoint chat|completions]

Runs `tokenyard serve` with its engine in another process: a very small model with the default model's tokenizer, whose
steps are paced so that all streams together have `--rate` tokens a second. The clients are in a process of their own.
CPU time is user plus system time of the API process, all its threads, between two moments at which every stream runs.
Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, NamedTuple, cast

OBSERVER = """
import time
from dataclasses import dataclass
from tokenyard.descriptors import ObserverDescriptor
from tokenyard.interfaces import Observer
from tokenyard.hookspecs import hookimpl

@dataclass(frozen=True, kw_only=True)
class Options:
    interval: float = 0.0  # seconds from step to step

class Pace(Observer):
    def __init__(self, interval):
        self._interval, self._next = interval, 0.0

    def on_step(self, output, result, now):
        now = time.monotonic()
        self._next = max(self._next + self._interval, now)
        time.sleep(self._next - now)

@hookimpl
def tokenyard_observers():
    return [ObserverDescriptor(
        name="pace", api_version=(1, 4), options_type=Options, factory=lambda options, context: Pace(options.interval)
    )]
"""
ENTRY_POINTS = "[tokenyard]\npace = tokenyard_pace\n"
METADATA = "Metadata-Version: 2.1\nName: tokenyard-pace\nVersion: 1.0\n"
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 8192}
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")
TICKS = os.sysconf("SC_CLK_TCK")


def write_model(folder: Path, source: Path) -> None:
    """One as small as can be, with the vocabulary and the tokenizer of `source`."""
    import torch
    from safetensors.torch import save_file

    config = {**json.loads((source / "config.json").read_text()), **SMALL, **HEADS, "torch_dtype": "float32"}
    hidden, middle, vocab = 32, 64, config["vocab_size"]
    torch.manual_seed(0)
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    prefix = "model.layers.0."
    shapes |= {f"{prefix}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    shapes |= {f"{prefix}self_attn.{name}_proj.weight": (32, hidden) for name in "qo"}
    shapes |= {f"{prefix}self_attn.{name}_proj.weight": (16, hidden) for name in "kv"}
    shapes |= {f"{prefix}mlp.{name}_proj.weight": (middle, hidden) for name in ("gate", "up")}
    shapes |= {f"{prefix}mlp.down_proj.weight": (hidden, middle)}
    save_file({name: torch.randn(shape) * 0.3 for name, shape in shapes.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    for name in TOKENIZER:
        if (source / name).exists():
            shutil.copy(source / name, folder / name)


def write_plugin(folder: Path) -> None:
    info = folder / "tokenyard_pace-1.0.dist-info"
    info.mkdir()
    (folder / "tokenyard_pace.py").write_text(OBSERVER)
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (info / "METADATA").write_text(METADATA)


@contextlib.contextmanager
def serving(folder: Path, interval: float, overrides: list[str]) -> Iterator[tuple[str, int]]:
    """(URL, process id of the API server)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", "from tokenyard.cli import main; main()", "serve", str(folder), f"--port={port}"]
    settings = [
        "kv_cache.num_blocks=20000",
        "scheduler.max_num_seqs=512",
        "engine.process=own",
        "executor.num_threads=1",
    ]
    pace = f"observers=[{{name: pace, interval: {interval}}}]"
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen([*command, *settings, pace, *overrides], env={**os.environ, "PYTHONPATH": path})
    try:
        wait_ready(port, process)
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        process.wait(30)


def wait_ready(port: int, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        with contextlib.suppress(OSError), contextlib.closing(connection):
            connection.request("GET", "/readyz")
            if connection.getresponse().status == 200:
                return
        time.sleep(0.1)
    raise SystemExit(f"the server ended with code {process.returncode}")


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def by_thread(pid: int) -> dict[str, float]:
    """CPU seconds of each thread, by its number and name."""
    seconds: dict[str, float] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
        fields = rest.split()
        seconds[f"{task.name} {name}"] = (int(fields[11]) + int(fields[12])) / TICKS
    return seconds


# ---- The clients, in a process of their own --------------------------------------------------------------------------


class Counts:
    """What all streams have had so far."""

    def __init__(self, streams: int) -> None:
        self.events = [0] * streams


async def stream(url: str, body: Mapping[str, object], counts: Counts, index: int) -> None:
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout) as session, session.post(url, json=body) as answer:
        if answer.status != 200:
            raise SystemExit(await answer.text())
        async for chunk in answer.content.iter_any():
            counts.events[index] += chunk.count(b"data: ")


def body_of(endpoint: str, index: int, max_tokens: int) -> tuple[str, dict[str, object]]:
    common = {"max_tokens": max_tokens, "ignore_eos": True, "stream": True, "seed": index, "temperature": 1.0}
    if endpoint == "chat":
        return "/v1/chat/completions", {**common, "messages": [{"role": "user", "content": f"Number {index}"}]}
    return "/v1/completions", {**common, "prompt": f"Number {index} is"}


async def run_clients(url: str, endpoint: str, streams: int, max_tokens: int, seconds: float) -> None:
    """Prints how many events there were, at the beginning and at the end of the time that counts."""
    counts = Counts(streams)
    tasks = []
    for index in range(streams):
        path, body = body_of(endpoint, index, max_tokens)
        tasks.append(asyncio.create_task(stream(url + path, body, counts, index)))
    while min(counts.events) < 5:
        await asyncio.sleep(0.1)
        for task in tasks:
            if task.done():
                task.result()
    print(sum(counts.events), flush=True)
    await asyncio.sleep(seconds)
    print(sum(counts.events), flush=True)
    for task in tasks:
        task.cancel()


# ---- The measurement -------------------------------------------------------------------------------------------------


class Cost(NamedTuple):
    events_per_s: float
    core_share: float
    us_per_event: float
    threads: dict[str, float]  # CPU seconds


def measure(url: str, pid: int, arguments: argparse.Namespace) -> Cost:
    """CPU time and events while all streams run."""
    max_tokens = int(arguments.rate / arguments.streams * (arguments.seconds + 20)) + 50
    own = ["--client", url, "--max-tokens", str(max_tokens), "--streams", str(arguments.streams)]
    own += ["--seconds", str(arguments.seconds), "--endpoint", arguments.endpoint]
    with subprocess.Popen([sys.executable, __file__, *own], stdout=subprocess.PIPE, text=True) as clients:
        counts = cast("IO[str]", clients.stdout)  # a pipe was asked for
        before = int(counts.readline())
        cpu, began, threads = cpu_seconds(pid), time.monotonic(), by_thread(pid)
        after = int(counts.readline())
        cpu, seconds = cpu_seconds(pid) - cpu, time.monotonic() - began
        ended = by_thread(pid)
        spent = {name: round(value - threads.get(name, 0.0), 2) for name, value in ended.items()}
        clients.wait()
    events = after - before
    return Cost(
        events_per_s=round(events / seconds, 1),
        core_share=round(cpu / seconds, 4),
        us_per_event=round(cpu / events * 1e6, 1),
        threads={name: value for name, value in spent.items() if value},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rate", type=float, default=1000.0, help="tokens a second of all streams together")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--endpoint", choices=("completions", "chat"), default="completions")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    parser.add_argument("--max-tokens", type=int, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    if arguments.client:
        asyncio.run(
            run_clients(
                arguments.client, arguments.endpoint, arguments.streams, arguments.max_tokens, arguments.seconds
            )
        )
        return

    from tokenyard.model.default_model import ensure_default_model

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, ensure_default_model(print))
        write_plugin(folder)
        with serving(folder, arguments.streams / arguments.rate, arguments.overrides) as (url, pid):
            rows = [measure(url, pid, arguments) for _ in range(arguments.runs)]
    for row in rows:
        print(json.dumps(row._asdict()))
    costs = [row.us_per_event for row in rows]
    print(json.dumps({"streams": arguments.streams, "rate": arguments.rate, "us_per_event": statistics.median(costs)}))


if __name__ == "__main__":
    main()
