"""What serving costs in throughput: the server against `LLM` in one process, on the same prompts in the same rounds.

    python benchmarks/server_throughput.py [--rounds 3] [--threads 1 2] [--shapes 32x128+128 64x256+64]
        [--model MODEL] [overrides of both]

In every round each number of threads gets `LLM`, then `tokenyard serve` with its engine in a process of its own, each
on an empty prefix cache. The server's requests all come at once, from one client process, as streams of one event a
token. Figures are output tokens a second of wall time, medians, and CPU seconds of every process: on a machine that
others use too the latter say more. With one thread, which leaves a core to client and API, the server is to reach 0.85
of `LLM`. Prints a table and one JSON line last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from server_process import ServerProcess, serving
from tokenyard.bench.report import machine, table
from tokenyard.bench.workload import WARM_UP, Shape, parse_shape, prompts
from tokenyard.errors import ConfigError
from tokenyard.model.default_model import DEFAULT_MODEL, ensure_default_model

if TYPE_CHECKING:
    import aiohttp

BAR = 0.85  # of LLM's throughput, with one thread
SHAPES = ("32x128+128", "64x256+64")  # the peers' larger ones
PATH = "/v1/completions"
Row = dict[str, float]


class Case(NamedTuple):
    """What is compared with each other: one shape with one number of threads."""

    shape: str
    threads: int


def keys_of(given: argparse.Namespace, threads: int) -> list[str]:
    """The overrides that both sides get."""
    sizes = [
        f"executor.num_threads={threads}",
        "model.max_model_len=2048",
        f"scheduler.max_num_seqs={given.max_num_seqs}",
    ]
    return [*sizes, *given.overrides]


# ---- LLM, in a process of its own ------------------------------------------------------------------------------------


def run_offline(given: argparse.Namespace) -> None:
    """Prints a row for each shape."""
    from tokenyard import LLM, SamplingParams

    found: dict[str, Row] = {}
    with LLM(given.model, overrides=keys_of(given, given.threads[0])) as llm:
        vocab_size = llm.model_config.vocab_size
        for shape in (WARM_UP, *given.shapes):
            llm.reset_prefix_cache()
            params = SamplingParams(temperature=0, max_tokens=shape.output_len, ignore_eos=True)
            tokens = prompts(shape, vocab_size=vocab_size, seed=0)
            began, cpu = time.perf_counter(), time.process_time()
            llm.generate(tokens, params, use_tqdm=False)
            seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
            found[str(shape)] = {"tokens_per_s": shape.num_requests * shape.output_len / seconds, "llm_cpu_s": cpu}
    del found[str(WARM_UP)]
    print(json.dumps({"rows": found, "vocab_size": vocab_size}))


# ---- The clients, in a process of their own --------------------------------------------------------------------------


async def run_client(given: argparse.Namespace) -> None:
    """For every shape that comes on stdin prints what it took, having read and checked each event's length."""
    import aiohttp  # of an extra

    timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        for number, line in enumerate(sys.stdin):
            shape = parse_shape(line.strip())
            bodies = [
                _body(prompt, shape, salt=str(number)) for prompt in prompts(shape, vocab_size=given.vocab_size, seed=0)
            ]
            began, cpu = time.perf_counter(), time.process_time()
            counts = await asyncio.gather(*(_stream(session, given.client + PATH, body) for body in bodies))
            seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
            num_tokens = shape.num_requests * shape.output_len
            if sum(tokens for tokens, _ in counts) != num_tokens:
                raise SystemExit(f"{shape}: {counts} tokens and events came")
            row = {"tokens_per_s": num_tokens / seconds, "client_cpu_s": cpu, "events": sum(one for _, one in counts)}
            print(json.dumps(row), flush=True)


def _body(prompt: Sequence[int], shape: Shape, salt: str) -> dict[str, object]:
    """The salt keeps a prompt from finding what an earlier round has left in the prefix cache."""
    told = {"stream": True, "stream_options": {"include_usage": True}, "cache_salt": salt}
    return {"prompt": prompt, "max_tokens": shape.output_len, "temperature": 0, "ignore_eos": True, **told}


async def _stream(session: aiohttp.ClientSession, url: str, body: Mapping[str, object]) -> tuple[int, int]:
    """(output tokens by the server's count, events that brought some)."""
    events, last = 0, b""
    async with session.post(url, json=body) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if line.startswith(b'data: {"'):
                events, last = events + 1, line
    usage = json.loads(last[6:])["usage"]
    return usage["completion_tokens"], events - 1


# ---- The measurement -------------------------------------------------------------------------------------------------


def offline(given: argparse.Namespace, threads: int) -> tuple[dict[str, Row], int]:
    """Rows by shape, and the size of the vocabulary."""
    own = ["--offline", "--threads", str(threads), "--model", given.model, "--shapes", *map(str, given.shapes)]
    done = subprocess.run(
        [sys.executable, __file__, *own, "--", *given.overrides], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"LLM failed:\n{done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return found["rows"], found["vocab_size"]


def online(given: argparse.Namespace, threads: int, vocab_size: int) -> dict[str, Row]:
    """Rows by shape."""
    own = ["--vocab-size", str(vocab_size)]
    with serving([given.model, "engine.process=own", *keys_of(given, threads)]) as server:
        command = [sys.executable, __file__, "--client", server.url, *own]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
            try:
                _ask(client, WARM_UP)
                return {str(shape): _measured(server, client, shape) for shape in given.shapes}
            finally:
                client.kill()


def _ask(client: subprocess.Popen[str], shape: Shape) -> Row:
    if client.stdin is None or client.stdout is None:
        raise RuntimeError("the client has no pipes")
    client.stdin.write(f"{shape}\n")
    client.stdin.flush()
    line = client.stdout.readline()
    if not line:
        raise SystemExit(f"{shape}: the client failed")
    return dict(json.loads(line))


def _measured(server: ServerProcess, client: subprocess.Popen[str], shape: Shape) -> Row:
    before = server.use()
    row, after = _ask(client, shape), server.use()
    return row | {f"{name}_cpu_s": after[name].cpu - before[name].cpu for name in ("api", "engine")}


def interleaved(given: argparse.Namespace) -> dict[Case, dict[str, list[Row]]]:
    """Every round's rows."""
    found: dict[Case, dict[str, list[Row]]] = {
        Case(str(shape), threads): {"llm": [], "server": []} for threads in given.threads for shape in given.shapes
    }
    for number in range(given.rounds):
        for threads in given.threads:
            print(f"round {number + 1} of {given.rounds}, {threads} threads", file=sys.stderr)
            rows, vocab_size = offline(given, threads)
            for side, one in (("llm", rows), ("server", online(given, threads, vocab_size))):
                for shape, row in one.items():
                    found[Case(shape, threads)][side].append(row)
    return found


def compared(case: Case, sides: Mapping[str, Sequence[Row]]) -> dict[str, object]:
    """Medians of one case, and the ratio of each round's pair.

    `engine_cpu_ratio` is what `ratio` would be, were the engine all that matters and nobody else on the machine.
    """
    llm, server = sides["llm"], sides["server"]
    pairs = [theirs["tokens_per_s"] / ours["tokens_per_s"] for ours, theirs in zip(llm, server, strict=True)]
    ratio = statistics.median(pairs)
    return {
        **case._asdict(),
        "llm_tokens_per_s": _median(row["tokens_per_s"] for row in llm),
        "server_tokens_per_s": _median(row["tokens_per_s"] for row in server),
        "ratio": round(ratio, 3),
        "meets_bar": ratio >= BAR if case.threads == 1 else None,
        "ratios": [round(pair, 3) for pair in pairs],
        "engine_cpu_ratio": round(
            statistics.median(row["llm_cpu_s"] for row in llm)
            / max(1e-9, statistics.median(row["engine_cpu_s"] for row in server)),
            3,
        ),
        "llm_cpu_s": _median(row["llm_cpu_s"] for row in llm),
        **{
            name: _median(row[name] for row in server)
            for name in ("engine_cpu_s", "api_cpu_s", "client_cpu_s", "events")
        },
    }


def _median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 2)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="executor.num_threads")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), metavar="REQUESTSxINPUT+OUTPUT")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--offline", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--client", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("--vocab-size", type=int, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args(words)
    if min(given.rounds, *given.threads) < 1:
        parser.error("--rounds and --threads take numbers above 0")
    try:
        given.shapes = [parse_shape(text) for text in given.shapes]
    except ConfigError as error:
        parser.error(str(error))
    given.max_num_seqs = max(64, *(shape.num_requests for shape in given.shapes))
    return given


def main() -> None:
    given = parse()
    if given.client:
        asyncio.run(run_client(given))
        return
    if given.offline:
        run_offline(given)
        return
    if given.model == DEFAULT_MODEL:
        ensure_default_model(print)
    around = machine()
    rows = [compared(case, sides) for case, sides in interleaved(given).items()]
    print(table(rows, [name for name in rows[0] if name not in ("ratios", "meets_bar")]))
    print(json.dumps({"rows": rows, "bar": BAR, **around}))


if __name__ == "__main__":
    main()
