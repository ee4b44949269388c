"""transformers' generate() on one padded batch a shape; prints one JSON line: output tokens a second by shape.

python benchmarks/peers/transformers_generate.py FOLDER SHAPE [SHAPE ...]     (in an environment with tokenyard)
"""

from __future__ import annotations

import json
import sys
import time

import torch
from tokenyard.bench.workload import parse_shape, prompts
from transformers import AutoModelForCausalLM


def main(folder: str, shapes: list[str]) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    rates = {}
    for shape in map(parse_shape, shapes):
        ids = torch.tensor(prompts(shape, vocab_size=model.config.vocab_size, seed=0))
        lengths = {"min_new_tokens": shape.output_len, "max_new_tokens": shape.output_len}
        began = time.perf_counter()
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, **lengths)
        rates[str(shape)] = round(shape.num_requests * shape.output_len / (time.perf_counter() - began), 1)
    print(json.dumps(rates))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
