"""From the command to the first token: `tokenyard generate` against a transformers script, interleaved.

    python benchmarks/startup.py [--runs 5]

Both start an interpreter, load the default model (cached already) and answer one chat prompt greedily. Times are wall
clock, seen from outside the process; prints one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

PEER = """
import sys, time
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
inputs = tokenizer.apply_chat_template(
    [{"role": "user", "content": sys.argv[2]}], add_generation_prompt=True, return_tensors="pt", return_dict=True
)
output = model.generate(**inputs, do_sample=False, max_new_tokens=1)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1]:]))
"""


def timed(command: list[str]) -> float:
    """Wall-clock seconds of a whole process."""
    started = time.perf_counter()
    subprocess.run(command, capture_output=True, text=True, check=True)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs

    from tokenyard.bench.startup import PROMPT, timed_start
    from tokenyard.model.default_model import ensure_default_model

    folder = str(ensure_default_model(print))
    peer = [sys.executable, "-c", PEER, folder, PROMPT]
    seconds: dict[str, list[float]] = {"tokenyard": [], "transformers": []}
    phases: dict[str, list[float]] = {}
    for _ in range(runs):
        start = timed_start()
        seconds["tokenyard"].append(start.wall)
        for name, value in start.phases.items():
            phases.setdefault(name, []).append(value)
        seconds["transformers"].append(timed(peer))
    medians = {name: round(statistics.median(values), 2) for name, values in seconds.items()}
    print(
        json.dumps(
            {
                "wall_s": medians,
                "range_s": {name: [round(min(v), 2), round(max(v), 2)] for name, v in seconds.items()},
                "ratio": round(medians["tokenyard"] / medians["transformers"], 2),
                "phases_s": {name: round(statistics.median(values), 3) for name, values in phases.items()},
                "load": os.getloadavg()[0],
            }
        )
    )


if __name__ == "__main__":
    main()
