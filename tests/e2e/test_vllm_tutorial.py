"""Scripts written for vLLM, of which only the import is changed, on a tiny Qwen3 in the cache of the Hub."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fake_hub import environment, place_in_cache
from transformers import Qwen3Config, Qwen3ForCausalLM

THINKING_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{%- endif -%}
"""

CHAT_SCRIPT = """\
import json
from tokenyard import LLM, SamplingParams

llm = LLM('Qwen/Qwen3-0.6B', max_model_len=2048)
conversations = [
    [{'role': 'user', 'content': 'hi'}],
    [{'role': 'system', 'content': 'the'}, {'role': 'user', 'content': 'hello'}],
]
sampling_params = SamplingParams(temperature=0.7, max_tokens=64)
outputs = llm.chat(messages=conversations, sampling_params=sampling_params,
                   chat_template_kwargs={'enable_thinking': False}, use_tqdm=False)
tokenizer = llm.get_tokenizer()
print(json.dumps({
    'model': llm.model_config.model,
    'texts': [outputs[i].outputs[0].text for i in range(len(outputs))],
    'reasons': [output.outputs[0].finish_reason for output in outputs],
    'lengths': [len(output.outputs[0].token_ids) for output in outputs],
    'prompts': [tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False) for output in outputs],
    'rendered': tokenizer.apply_chat_template(conversations[0], tokenize=False, add_generation_prompt=True,
                                              enable_thinking=False),
}))
"""

QUICKSTART = """\
from tokenyard import LLM, SamplingParams

prompts = ["Hello, my name is", "The president of the", "The capital of", "The future of AI is"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
if __name__ == "__main__":
    llm = LLM(model="Qwen/Qwen3-0.6B", enforce_eager=True, gpu_memory_utilization=0.9, trust_remote_code=False)
    outputs = llm.generate(prompts, sampling_params)
    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs[0].text
        print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
"""


@pytest.fixture(scope="module")
def hub_cache(tmp_path_factory: pytest.TempPathFactory, tiny_llama_dir: Path) -> Path:
    """A cache of the Hub that holds a tiny Qwen3 under its big sister's name."""
    folder, cache = tmp_path_factory.mktemp("qwen3"), tmp_path_factory.mktemp("hub")
    torch.manual_seed(0)
    vocab_size = json.loads((tiny_llama_dir / "config.json").read_text())["vocab_size"]
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)  # type: ignore[no-untyped-call]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_llama_dir / name, folder / name)
    (folder / "chat_template.jinja").write_text(THINKING_TEMPLATE)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0], "temperature": 0.6}))
    place_in_cache(folder, "Qwen/Qwen3-0.6B", cache)
    return cache


def run_script(script: str, cache: Path, folder: Path, url: str | None) -> str:
    path = folder / "script.py"
    path.write_text(script)
    # No proxy and a server that nobody runs: the network is not there.
    given = {"OMP_NUM_THREADS": "1", "HTTPS_PROXY": "", "HTTP_PROXY": ""}
    done = subprocess.run(
        [sys.executable, str(path)],
        cwd=folder,
        env={**os.environ, **environment(cache, url), **given},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("url", [None, "http://127.0.0.1:9"], ids=["offline", "network blocked"])
def test_the_chat_tutorial_runs_with_only_the_import_changed(hub_cache: Path, tmp_path: Path, url: str | None) -> None:
    found = json.loads(run_script(CHAT_SCRIPT, hub_cache, tmp_path, url))
    assert found["model"] == "Qwen/Qwen3-0.6B"
    assert len(found["texts"]) == 2
    for length, reason in zip(found["lengths"], found["reasons"], strict=True):
        assert (reason == "length" and length == 64) or (reason == "stop" and length < 64)
    for prompt in found["prompts"]:
        assert prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")  # it was told not to think
    assert found["rendered"] == found["prompts"][0]


def test_the_quickstart_runs_with_only_the_import_changed(hub_cache: Path, tmp_path: Path) -> None:
    lines = run_script(QUICKSTART, hub_cache, tmp_path, None).splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("Prompt: 'Hello, my name is', Generated text: ")
