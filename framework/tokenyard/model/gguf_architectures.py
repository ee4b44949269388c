"""The architectures of GGUF files that are read: one table, with tensor names, biases and layouts of each.

`llama` is also what converters write for Mistral; `mistral` is what some tools call the same layout, and `mistral3`
what newer converters write for the text model of Mistral 3. llama.cpp stores the rows of Q and K of these so that the
two values of a rotary pair are neighbours; Qwen's stay as Hugging Face has them (halves).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tokenyard.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tokenyard.model.gguf_metadata import Metadata
    from tokenyard.model.gguf_reader import GGUFHeader, GGUFTensor

ROPE_FREQUENCIES = "rope_freqs.weight"  # divisors of Llama 3's RoPE frequencies; becomes config, not a weight
_EMBEDDING, _FINAL_NORM, _HEAD = "token_embd.weight", "output_norm.weight", "output.weight"
_TOP_NAMES = {
    _EMBEDDING: "model.embed_tokens.weight",
    _FINAL_NORM: "model.norm.weight",
    _HEAD: "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_QKV, _ATTENTION = ("attn_q", "attn_k", "attn_v"), ("attn_q", "attn_k", "attn_v", "attn_output")
_MLP = ("ffn_gate", "ffn_up", "ffn_down")
_LAYER_TENSOR = re.compile(r"blk\.(0|[1-9]\d{0,3})\.(\w+)\.(weight|bias)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One value of `general.architecture`."""

    model_type: str  # of Hugging Face's config.json
    hf_class: str
    weights: Mapping[str, str] = field(default_factory=lambda: _LAYER_NAMES)  # of every layer
    biases: tuple[str, ...] = ()  # that every layer has
    optional_biases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # config key -> all of these, or none
    interleaved: bool = False  # rows of Q and K in rotary pairs
    window_class: tuple[str, str] | None = None  # (model_type, class) where the file has a sliding window
    windows_by_layer: bool = False  # the config says for each layer whether it has the window


_LLAMA = Architecture(
    model_type="llama",
    hf_class="LlamaForCausalLM",
    optional_biases={"attention_bias": _ATTENTION, "mlp_bias": _MLP},
    interleaved=True,
    window_class=("mistral", "MistralForCausalLM"),
)
_MISTRAL = Architecture(model_type="mistral", hf_class="MistralForCausalLM", interleaved=True)
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "mistral3": _MISTRAL,
    "qwen2": Architecture(model_type="qwen2", hf_class="Qwen2ForCausalLM", biases=_QKV, windows_by_layer=True),
    "qwen3": Architecture(
        model_type="qwen3",
        hf_class="Qwen3ForCausalLM",
        weights=_LAYER_NAMES | _QK_NORMS,
        optional_biases={"attention_bias": _ATTENTION},
        windows_by_layer=True,
    ),
}


def architecture_of(keys: Metadata) -> Architecture:
    """The file's architecture; ModelLoadError for one that is not read."""
    name = keys.text("general.architecture")
    if name not in ARCHITECTURES:
        raise keys.refuse(f"the architecture is {name!r}", ARCHITECTURES)
    return ARCHITECTURES[name]


def bias_flags(header: GGUFHeader, architecture: Architecture) -> dict[str, bool]:
    """Config key -> whether the file has these optional biases, judged by the first of them in the first layer."""
    return {key: f"blk.0.{parts[0]}.bias" in header.tensors for key, parts in architecture.optional_biases.items()}


def hf_names(header: GGUFHeader, architecture: Architecture) -> dict[str, GGUFTensor]:
    """Hugging Face parameter name -> tensor of the file; a tensor without a counterpart is refused by name."""
    names: dict[str, GGUFTensor] = {}
    for name, tensor in header.tensors.items():
        if name == ROPE_FREQUENCIES:
            continue
        hf_name = _TOP_NAMES.get(name) or _layer_name(name, architecture)
        if hf_name is None:
            raise ModelLoadError(
                f"{header.path}: tensor {name!r} has no place in a {architecture.hf_class}; this file is not supported"
            )
        names[hf_name] = tensor
    return names


def check_tensors(header: GGUFHeader, architecture: Architecture, num_layers: int) -> None:
    """Every tensor that this many layers need is there; ModelLoadError names what is missing."""
    found = {int(match[1]) for name in header.tensors if (match := _LAYER_TENSOR.fullmatch(name))}
    if num_layers != len(found):
        raise ModelLoadError(
            f"{header.path}: {num_layers} layers are declared and {len(found)} are in the file; is it only a part?"
        )
    biases = [*architecture.biases]
    for key, has in bias_flags(header, architecture).items():
        biases += architecture.optional_biases[key] if has else ()
    of_a_layer = [f"{name}.weight" for name in architecture.weights] + [f"{name}.bias" for name in biases]
    expected = [_EMBEDDING, _FINAL_NORM, *(f"blk.{layer}.{name}" for layer in range(num_layers) for name in of_a_layer)]
    missing = [name for name in expected if name not in header.tensors]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelLoadError(f"{header.path}: tensor {missing[0]!r}{more} is missing; is the file only a part?")


def _layer_name(name: str, architecture: Architecture) -> str | None:
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None:
        return None
    layer, part, kind = match.groups()
    may_be_biased = {*architecture.biases, *(part for parts in architecture.optional_biases.values() for part in parts)}
    if part not in architecture.weights or (kind == "bias" and part not in may_be_biased):
        return None
    return f"model.layers.{layer}.{architecture.weights[part]}.{kind}"
