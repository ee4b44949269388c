"""load_model: the fast decoder where it can, the adapter where it must, a refusal by name elsewhere."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import transformers
from lone_logits import logits_of
from safetensors.torch import load_file, save_file
from tokenyard.errors import ModelLoadError
from tokenyard.model.files import resolve_model
from tokenyard.model.loader import decoder_choice, load_model

if TYPE_CHECKING:
    pass

CPU = torch.device("cpu")


def test_a_llama_folder_gets_the_fast_decoder_and_transformers_logits(tiny_llama_dir: Path) -> None:
    files = resolve_model(str(tiny_llama_dir))
    model = load_model(files, dtype=torch.float32, device=CPU)
    assert (model.description, []) == decoder_choice(files)
    tokens = torch.arange(30)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama_dir, attn_implementation="eager")
    with torch.inference_mode():
        expected = reference(tokens[None], use_cache=False).logits[0]
    torch.testing.assert_close(logits_of(model, tokens), expected, rtol=1e-4, atol=1e-5)


def test_mod_01_a_tied_folder_loads(tiny_tied_llama_dir: Path) -> None:
    model = load_model(resolve_model(str(tiny_tied_llama_dir)), dtype=torch.float32, device=CPU)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tiny_tied_llama_dir)
    with torch.inference_mode():
        expected = reference(torch.arange(9)[None], use_cache=False).logits[0]
    torch.testing.assert_close(logits_of(model, torch.arange(9)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stored", ["embedding", "head", "both, equal", "both, different"])
def test_mod_01_a_tied_pair_is_loaded_as_transformers_loads_it(stored: str, make_llama: Callable[..., Path]) -> None:
    """Checkpoints in the wild have either tensor, or both; two that differ are not tied, whatever the config says."""
    folder = make_llama(tied=True)
    table = load_file(folder / "model.safetensors")
    embedding = table["model.embed_tokens.weight"]
    if stored != "embedding":
        table["lm_head.weight"] = embedding.flip(0).contiguous() if "different" in stored else embedding.clone()
    if stored == "head":
        del table["model.embed_tokens.weight"]
    save_file(table, folder / "model.safetensors", metadata={"format": "pt"})
    model = load_model(resolve_model(str(folder)), dtype=torch.float32, device=CPU)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.arange(9)
    with torch.inference_mode():
        expected = reference(tokens[None], use_cache=False).logits[0]
    torch.testing.assert_close(logits_of(model, tokens), expected, rtol=1e-4, atol=1e-5)


def test_mod_01_a_tied_model_with_neither_tensor_is_refused(make_llama: Callable[..., Path]) -> None:
    folder = make_llama(tied=True)
    table = load_file(folder / "model.safetensors")
    del table["model.embed_tokens.weight"]
    save_file(table, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"missing tensors: model\.embed_tokens\.weight"):
        load_model(resolve_model(str(folder)), dtype=torch.float32, device=CPU)


def test_mod_03_a_gguf_file_gives_the_logits_of_its_safetensors(tiny_gguf: Path, tiny_llama_dir: Path) -> None:
    tokens = torch.arange(40)
    models = [
        load_model(resolve_model(str(path)), dtype=torch.float32, device=CPU) for path in (tiny_gguf, tiny_llama_dir)
    ]
    torch.testing.assert_close(logits_of(models[0], tokens), logits_of(models[1], tokens))


def test_a_llama_that_the_fast_decoder_lacks_goes_to_the_adapter(tiny_llama_dir: Path) -> None:
    files = resolve_model(str(tiny_llama_dir))
    files = replace(files, config={**files.config, "hidden_act": "gelu"})
    assert decoder_choice(files) == ("adapter (LlamaForCausalLM)", ["hidden_act 'gelu' is not silu"])
    assert load_model(files, dtype=torch.float32, device=CPU).description == "adapter (LlamaForCausalLM)"


def test_a_gguf_of_another_family_is_refused_by_name(tiny_gguf: Path) -> None:
    files = resolve_model(str(tiny_gguf))
    files = replace(files, config={**files.config, "architectures": ["GemmaForCausalLM"]})
    with pytest.raises(ModelLoadError, match="GemmaForCausalLM from a GGUF file is not available; give a folder"):
        load_model(files, dtype=torch.float32, device=CPU)


def test_quantised_checkpoints_are_refused(tiny_llama_dir: Path) -> None:
    files = resolve_model(str(tiny_llama_dir))
    files = replace(files, config={**files.config, "quantization_config": {"quant_method": "awq"}})
    with pytest.raises(ModelLoadError, match="quantised weights"):
        load_model(files, dtype=torch.float32, device=CPU)


def test_choosing_a_decoder_imports_neither_torch_nor_transformers(tiny_llama_dir: Path) -> None:
    code = (
        "import sys; from tokenyard.model.files import resolve_model; "
        "from tokenyard.model.loader import decoder_choice; "
        f"print(decoder_choice(resolve_model({str(tiny_llama_dir)!r}))[0]); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    result = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "fast decoder (llama)\n"), result.stderr


@torch.inference_mode()
def test_mod_01_the_default_model_knows_the_capital_of_france(default_model_dir: Path) -> None:
    """Logits as transformers computes them, within 1e-4 of their size, and the same greedy token at every position."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(default_model_dir)
    tokens = tokenizer("The capital of France is Paris.", return_tensors="pt").input_ids[0]
    model = load_model(resolve_model(str(default_model_dir)), dtype=torch.float32, device=CPU)
    reference = transformers.AutoModelForCausalLM.from_pretrained(default_model_dir, dtype=torch.float32)
    expected = reference(tokens[None], use_cache=False).logits[0]
    logits = logits_of(model, tokens)
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    assert tokenizer.decode(logits[-3].argmax()) == " Paris"
