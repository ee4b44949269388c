"""Offline generation from Python: `python offline.py [MODEL]`."""

from __future__ import annotations

import sys

from tokenyard import LLM, SamplingParams


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
    params = SamplingParams(temperature=0, max_tokens=12)
    with LLM(model, max_model_len=256, scheduler="fcfs", overrides=["kv_cache.num_blocks=64"]) as llm:
        for output in llm.generate(["The capital of France is", "One, two, three,"], params, use_tqdm=False):
            print(f"{output.prompt}|{output.outputs[0].text}")

    # The same from override strings alone, as on the command line.
    with LLM.from_config([f'model.name="{model}"', "model.max_model_len=256", "scheduler.max_num_seqs=2"]) as llm:
        (output,) = llm.chat([{"role": "user", "content": "Say hello."}], params, use_tqdm=False)
        print(f"chat|{output.outputs[0].text}")


if __name__ == "__main__":
    main()
