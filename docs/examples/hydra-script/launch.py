"""A Hydra script of one's own: `python launch.py scheduler.max_num_seqs=4 'prompts=["Name a colour."]'`."""

from __future__ import annotations

import hydra
from omegaconf import DictConfig
from tokenyard import LLM, SamplingParams


@hydra.main(version_base="1.3", config_path="conf", config_name="app")
def main(config: DictConfig) -> None:
    params = SamplingParams(temperature=0, max_tokens=config.max_tokens)
    with LLM.from_config(config) as llm:
        for prompt in config.prompts:
            (output,) = llm.chat([{"role": "user", "content": prompt}], params, use_tqdm=False)
            print(f"{prompt} -> {output.outputs[0].text}")


if __name__ == "__main__":
    main()
