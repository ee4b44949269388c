"""Offline throughput beside transformers and vLLM, or of one attention backend beside others: ratios of medians.

    python benchmarks/throughput.py [--rounds 3] [--shapes 8x128+64 ...]
        [--vllm PYTHON] [--vllm-model FOLDER] [--vllm-compiled]
    python benchmarks/throughput.py --attention cpu_native torch_native [--rounds 3] [--shapes 8x128+64 ...]

Every round starts each engine once, in a process of its own, on the same prompts: `tokenyard bench throughput` on its
defaults, transformers' generate() on the same weights, and, when its interpreter and a folder of the weights are given,
vLLM (eager, on its defaults; also compiled when asked). With --attention, ours runs once with each of these backends
instead, and the first is compared with the others. Each generates a few tokens untimed first. Prints tables of medians
and one JSON line last. Let nothing else run meanwhile: who waits for a core is told as slow.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenyard.bench.report import machine, table
from tokenyard.bench.workload import WARM_UP, parse_shape, prompts
from tokenyard.errors import ConfigError
from tokenyard.model.default_model import ensure_default_model

SHAPES = ("1x128+64", "8x128+64", "32x128+128", "64x256+64")
PEERS = Path(__file__).resolve().parent / "peers"
VOCAB_SIZE = 49152  # of the default model

Rates = dict[str, float]
"""Output tokens a second, by shape."""


def last_json(command: Sequence[str]) -> object:
    """The JSON in the last line that a process prints."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:3])} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def measure(command: Sequence[str]) -> Rates:
    """A round of one engine: a peer prints rates by shape, ours prints rows."""
    found = last_json(command)
    if isinstance(found, list):
        return {row["shape"]: row["output_tokens_per_s"] for row in found}
    if not isinstance(found, Mapping):
        raise TypeError(f"{command[1]} printed something else than a JSON object")
    return dict(found)


def write_prompts(path: Path, shapes: Sequence[str]) -> None:
    """For an environment without tokenyard: the untimed shape, then the others."""
    rows = []
    for shape in (WARM_UP, *map(parse_shape, shapes)):
        rows.append((str(shape), shape.output_len, prompts(shape, vocab_size=VOCAB_SIZE, seed=0)))
    path.write_text(json.dumps(rows))


def commands(given: argparse.Namespace, prompts_file: Path) -> dict[str, list[str]]:
    """The engines, the one that is compared with the others first, and what measures each of them."""
    folder = str(ensure_default_model(print))
    code = "from tokenyard.cli import main; main()"
    keys = [f"bench.shapes=[{','.join(given.shapes)}]", "model.max_model_len=2048"]
    ours = [sys.executable, "-c", code, "bench", "throughput", "--json", *keys]
    if given.attention:
        return {f"attention={name}": [*ours, f"attention={name}"] for name in given.attention}
    vllm = [str(given.vllm), str(PEERS / "vllm_generate.py"), given.vllm_model or folder, str(prompts_file)]
    return {
        "tokenyard": ours,
        "transformers": [sys.executable, str(PEERS / "transformers_generate.py"), folder, *given.shapes],
        **({"vllm eager": vllm} if given.vllm else {}),
        **({"vllm compiled": [*vllm, "--compiled"]} if given.vllm and given.vllm_compiled else {}),
    }


def interleaved(engines: Mapping[str, Sequence[str]], num_rounds: int) -> tuple[dict[str, list[Rates]], list[float]]:
    """Every round's rates of every engine, and the load before each run."""
    found: dict[str, list[Rates]] = {name: [] for name in engines}
    loads = []
    for number in range(num_rounds):
        for name, command in engines.items():
            loads.append(round(os.getloadavg()[0], 2))
            print(f"round {number + 1} of {num_rounds}: {name} (load {loads[-1]})", file=sys.stderr)
            found[name].append(measure(command))
    return found, loads


def medians(rounds: Sequence[Rates]) -> Rates:
    return {shape: statistics.median(rates[shape] for rates in rounds) for shape in rounds[0]}


def ratios(ours: Rates, theirs: Rates) -> Rates:
    """Above 1: ours is faster."""
    return {shape: round(ours[shape] / rate, 2) for shape, rate in theirs.items()}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), metavar="REQUESTSxINPUT+OUTPUT")
    parser.add_argument("--attention", nargs="+", metavar="NAME", help="attention backends, two or more, for no peers")
    parser.add_argument("--vllm", metavar="PYTHON", help="the interpreter of an environment with vLLM")
    parser.add_argument("--vllm-compiled", action="store_true", help="also compiled and on both cores")
    parser.add_argument("--vllm-model", metavar="FOLDER", help="the default model's weights in bfloat16")
    given = parser.parse_args()
    if given.rounds < 1:
        parser.error("--rounds takes a number above 0")
    if given.vllm is None and (given.vllm_compiled or given.vllm_model):
        parser.error("--vllm-compiled and --vllm-model need --vllm")
    if given.attention and (given.vllm or len(set(given.attention)) < 2):
        parser.error("--attention takes two backends or more, and no --vllm")
    try:
        given.shapes = [str(parse_shape(text)) for text in given.shapes]
    except ConfigError as error:
        parser.error(str(error))
    return given


def main() -> None:
    given = arguments()
    with tempfile.TemporaryDirectory() as scratch:
        prompts_file = Path(scratch) / "prompts.json"
        write_prompts(prompts_file, given.shapes)
        rounds, loads = interleaved(commands(given, prompts_file), given.rounds)
    found = {name: medians(of) for name, of in rounds.items()}
    first = next(iter(found))
    over = {name: ratios(found[first], of) for name, of in found.items() if name != first}
    print(table([{"output tokens/s": name, **of} for name, of in found.items()], ["output tokens/s", *given.shapes]))
    title = f"{first} / other"
    shown = [{title: name, **{shape: f"{rate:.2f}" for shape, rate in of.items()}} for name, of in over.items()]
    print(table(shown, [title, *given.shapes]))
    print(json.dumps({"medians": found, "ratios": over, "rounds": rounds, "loads": loads, **machine()}))


if __name__ == "__main__":
    main()
