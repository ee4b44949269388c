"""transformers' generate() on one padded batch a shape; prints one JSON line: output tokens a second by shape.

    python benchmarks/peers/transformers_generate.py FOLDER SHAPE [SHAPE ...]     (in an environment with tokenyard)

The prompts of a shape are equally long, so that nothing is padded. A few tokens are generated untimed first.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from tokenyard.bench.workload import WARM_UP, parse_shape, prompts
from transformers import AutoModelForCausalLM


def main(folder: str, shapes: list[str]) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    rates = {}
    for shape in (WARM_UP, *map(parse_shape, shapes)):
        ids = torch.tensor(prompts(shape, vocab_size=model.config.vocab_size, seed=0))
        lengths = {"min_new_tokens": shape.output_len, "max_new_tokens": shape.output_len}
        began = time.perf_counter()
        output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, **lengths)
        seconds = time.perf_counter() - began
        if output.shape[1] != shape.input_len + shape.output_len:
            raise SystemExit(f"{shape}: {output.shape[1] - shape.input_len} tokens were generated")
        rates[str(shape)] = round(shape.num_requests * shape.output_len / seconds, 1)
    print(json.dumps({text: rates[text] for text in shapes}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
