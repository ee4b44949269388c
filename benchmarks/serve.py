"""Serving beside vLLM's server, as the client of vLLM sees both: TTFT and throughput, medians of interleaved rounds.

    python benchmarks/serve.py --vllm FOLDER/bin/vllm --model FOLDER [--rounds 3] [--rates inf 2] [--num-prompts 32]
        [--input-len 128] [--output-len 64] [--only tokenyard] [--client tokenyard]

In every round each server is started, asked at every rate by `vllm bench serve` (with --client tokenyard by `tokenyard
bench serve`), and ended: ours on its defaults, vLLM eager on its own. `--model` is a folder that both can load, its
weights in bfloat16. What our server counts in /metrics must be what the client got, or this fails. Prints a table and
one JSON line last. Let nothing else run meanwhile: client and server share the machine as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tokenyard.bench.report import machine, table
from tokenyard.bench.server_facts import parse_counters

NAME = "bench-model"
FIGURES = ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "output_throughput")
READY_SECONDS = 300.0
Row = dict[str, float]


@contextmanager
def server(command: Sequence[str], url: str, log: Path) -> Iterator[float]:
    """A server until the end of the block; yields the seconds until it answered /v1/models."""
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1"}
    began = time.perf_counter()
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
    try:
        while get(f"{url}/v1/models") is None:
            if process.poll() is not None or time.perf_counter() - began > READY_SECONDS:
                raise SystemExit(f"{command[0]} did not start:\n{log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.1)
        yield time.perf_counter() - began
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def get(url: str) -> str | None:
    """The text of an answer with status 200."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 - a URL of this script
            return answer.read().decode() if answer.status == 200 else None
    except OSError:
        return None


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def servers(given: argparse.Namespace, port: int) -> dict[str, list[str]]:
    """What starts each, ours first."""
    common = ["--served-model-name", NAME, "--max-model-len", str(given.max_model_len), "--port", str(port)]
    ours = [sys.executable, "-c", "from tokenyard.cli import main; main()", "serve", given.model, *common]
    theirs = [str(given.vllm), "serve", given.model, *common, "--enforce-eager"]
    return {name: command for name, command in (("tokenyard", ours), ("vllm", theirs)) if name in given.only}


def client(given: argparse.Namespace, url: str, rate: str, result: Path) -> list[str]:
    """The benchmark's command, which writes `result`."""
    ours = [sys.executable, "-c", "from tokenyard.cli import main; main()"]
    command = ours if given.client == "tokenyard" else [str(given.vllm)]
    shape = ["--random-input-len", str(given.input_len), "--random-output-len", str(given.output_len)]
    return [
        *(*command, "bench", "serve", "--backend", "openai", "--base-url", url, "--model", NAME),
        *("--tokenizer", given.model, "--dataset-name", "random", *shape, "--num-prompts", str(given.num_prompts)),
        *("--request-rate", rate, "--ignore-eos", "--num-warmups", "0", "--percentile-metrics", "ttft,tpot,itl,e2el"),
        *("--seed", str(given.rates.index(rate))),  # prompts that no earlier run has left in the prefix cache
        *("--save-result", "--result-dir", str(result.parent), "--result-filename", result.name),
    ]


def measure(given: argparse.Namespace, name: str, url: str, rate: str, scratch: Path) -> Row:
    """One run of the client; for our server also compares what both sides have counted."""
    result = scratch / "result.json"
    before = get(f"{url}/metrics")
    done = subprocess.run(
        client(given, url, rate, result),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    if done.returncode or not result.exists():
        raise SystemExit(f"the client failed against {name}:\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}")
    found = json.loads(result.read_text())
    result.unlink()
    if found["completed"] != given.num_prompts or found.get("failed", 0):
        raise SystemExit(f"{name}: {found['completed']} of {given.num_prompts} requests were answered")
    if name == "tokenyard":
        check_counts(found, before, get(f"{url}/metrics"))
    return {figure: float(found[figure]) for figure in FIGURES}


def check_counts(found: Mapping[str, float], before: str | None, after: str | None) -> None:
    """The server has counted what the client got, and nothing else."""
    first, last = parse_counters(before or ""), parse_counters(after or "")
    if first is None or last is None:
        raise SystemExit("our server does not tell its counters in /metrics")
    counted = {name: last[name] - first[name] for name in last}
    got = {
        "prompt_tokens": found["total_input_tokens"],
        "generation_tokens": found["total_output_tokens"],
        "requests": found["completed"],
    }
    if counted != got:
        raise SystemExit(f"our server counted {counted}, the client {got}; does anybody else use the server?")


def interleaved(given: argparse.Namespace) -> tuple[dict[str, dict[str, list[Row]]], dict[str, list[float]]]:
    """Every round's figures by server and rate, and the seconds of each start."""
    port = free_port()
    url, commands = f"http://127.0.0.1:{port}", servers(given, port)
    rows: dict[str, dict[str, list[Row]]] = {name: {rate: [] for rate in given.rates} for name in commands}
    starts: dict[str, list[float]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        for number in range(given.rounds):
            for name, command in commands.items():
                with server(command, url, scratch / f"{name}.log") as seconds:
                    starts[name].append(round(seconds, 2))
                    for rate in given.rates:
                        say = (
                            f"round {number + 1} of {given.rounds}: {name}, rate {rate} (load {os.getloadavg()[0]:.2f})"
                        )
                        print(say, file=sys.stderr)
                        rows[name][rate].append(measure(given, name, url, rate, scratch))
    return rows, starts


def medians(rounds: Sequence[Row]) -> Row:
    return {figure: round(statistics.median(row[figure] for row in rounds), 2) for figure in FIGURES}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, metavar="PROGRAM", help="vLLM's command line")
    parser.add_argument("--model", required=True, metavar="FOLDER", help="a model for both, weights in bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rates", nargs="+", default=["inf", "2"], metavar="RATE", help="requests a second, or inf")
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--only", nargs="+", choices=("tokenyard", "vllm"), default=["tokenyard", "vllm"])
    parser.add_argument("--client", choices=("vllm", "tokenyard"), default="vllm", help="who measures")
    given = parser.parse_args()
    if given.vllm is None and ("vllm" in given.only or given.client == "vllm"):
        parser.error("--vllm is needed, or --only tokenyard --client tokenyard")
    given.rates = list(dict.fromkeys(given.rates))
    if min(given.rounds, given.num_prompts, given.input_len, given.output_len) < 1:
        parser.error("--rounds, --num-prompts, --input-len and --output-len take numbers above 0")
    return given


def main() -> None:
    given = arguments()
    around = machine()
    rows, starts = interleaved(given)
    found = {name: {rate: medians(rounds) for rate, rounds in by_rate.items()} for name, by_rate in rows.items()}
    shown = [
        {"server": name, "rate": rate, **row}
        for rate in given.rates
        for name, row in ((n, found[n][rate]) for n in found)
    ]
    print(table(shown, ("server", "rate", *FIGURES)))
    print(table([{"server": name, "seconds to ready": statistics.median(s)} for name, s in starts.items()],
                ("server", "seconds to ready")))  # fmt: skip
    shape = f"{given.num_prompts}x{given.input_len}+{given.output_len}"
    print(
        json.dumps(
            {"shape": shape, "client": given.client, "medians": found, "rounds": rows, "ready_s": starts, **around}
        )
    )


if __name__ == "__main__":
    main()
