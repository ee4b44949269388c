"""vLLM's LLM.generate on a CPU, on its defaults; prints one JSON line: output tokens a second by shape.

    PYTHON benchmarks/peers/vllm_generate.py FOLDER PROMPTS.json [--compiled]     (in an environment with vLLM)

PROMPTS.json holds a list of [shape, output tokens, lists of token ids], of which the first is not timed. Without
--compiled it runs eagerly, on one core of two, since vLLM reserves the other; with it, compiled and on both.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def main(folder: str, path: str, *, compiled: bool) -> None:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["HF_HUB_OFFLINE"] = "1"
    if compiled:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0-1")
        os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
        os.environ.setdefault("OMP_NUM_THREADS", "2")
    from vllm import LLM, SamplingParams

    llm = LLM(folder, max_model_len=2048, enforce_eager=not compiled, enable_prefix_caching=False)
    work = json.loads(Path(path).read_text())
    rates = {}
    for shape, output_len, prompts in work:
        params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
        began = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        count = sum(len(output.outputs[0].token_ids) for output in outputs)
        rates[shape] = round(count / (time.perf_counter() - began), 1)
    print(json.dumps({shape: rates[shape] for shape, _, _ in work[1:]}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], compiled="--compiled" in sys.argv[3:])
