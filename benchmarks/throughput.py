"""Offline throughput beside transformers and vLLM, interleaved: ratios of medians.

    python benchmarks/throughput.py [--rounds 3] [--shapes 8x128+64 ...]
        [--vllm PYTHON] [--vllm-model FOLDER] [--vllm-compiled]

Every round starts each engine once, in a process of its own, on the same prompts: `tokenyard bench throughput` on its
defaults, transformers' generate() on the same weights, and, when its interpreter and a folder of the weights are given,
vLLM (eager, on its defaults; also compiled when asked). Prints a table and one JSON line last. Let nothing else run
meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tokenyard.bench.report import table
from tokenyard.bench.workload import parse_shape, prompts
from tokenyard.model.default_model import ensure_default_model

SHAPES = ["1x128+64", "8x128+64", "32x128+128", "64x256+64"]
PEERS = Path(__file__).resolve().parent / "peers"
VOCAB_SIZE = 49152  # of the default model


def last_json(command: list[str]) -> object:
    """What a process prints on its last line."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:3])} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def tokenyard(shapes: list[str]) -> dict[str, float]:
    code = "from tokenyard.cli import main; main()"
    keys = [f"bench.shapes=[{','.join(shapes)}]", "model.max_model_len=2048"]
    rows = last_json([sys.executable, "-c", code, "bench", "throughput", "--json", *keys])
    return {row["shape"]: row["output_tokens_per_s"] for row in (rows if isinstance(rows, list) else [rows])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--vllm", metavar="PYTHON")
    parser.add_argument("--vllm-compiled", action="store_true", help="also compiled and on both cores")
    parser.add_argument("--vllm-model", metavar="FOLDER", help="the default model's weights in bfloat16")
    given = parser.parse_args()
    folder = str(ensure_default_model(print))
    work = [
        (text, shape.output_len, prompts(shape, vocab_size=VOCAB_SIZE, seed=0))
        for text, shape in ((text, parse_shape(text)) for text in given.shapes)
    ]
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "prompts.json"
        path.write_text(json.dumps(work))
        transformers = [sys.executable, str(PEERS / "transformers_generate.py"), folder, *given.shapes]
        vllm = [str(given.vllm), str(PEERS / "vllm_generate.py"), given.vllm_model or folder, str(path)]
        engines = {"tokenyard": lambda: tokenyard(given.shapes), "transformers": lambda: last_json(transformers)}
        if given.vllm:
            engines["vllm eager"] = lambda: last_json(vllm)
        if given.vllm and given.vllm_compiled:
            engines["vllm compiled"] = lambda: last_json([*vllm, "--compiled"])
        found = {name: {text: [] for text in given.shapes} for name in engines}
        loads = []
        for _ in range(given.rounds):
            for name, run in engines.items():
                loads.append(round(os.getloadavg()[0], 2))
                for text, rate in run().items():
                    found[name][text].append(rate)
    medians = {name: {text: statistics.median(rates) for text, rates in of.items()} for name, of in found.items()}
    ratios = {
        name: {text: round(medians["tokenyard"][text] / rate, 2) for text, rate in of.items()}
        for name, of in medians.items()
        if name != "tokenyard"
    }
    print(table([{"output tokens/s": name, **of} for name, of in medians.items()], ["output tokens/s", *given.shapes]))
    print(table([{"ours over theirs": name, **of} for name, of in ratios.items()], ["ours over theirs", *given.shapes]))
    print(json.dumps({"medians": medians, "ratios": ratios, "rounds": found, "loads": loads}))


if __name__ == "__main__":
    main()
