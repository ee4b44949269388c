"""GGUF metadata -> the form of Hugging Face's config.json and generation_config.json."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenyard.errors import ModelLoadError
from tokenyard.model.gguf_architectures import Architecture, architecture_of, bias_flags, check_tensors, hf_names
from tokenyard.model.gguf_metadata import Metadata
from tokenyard.model.gguf_rope import rope_scaling, shortest
from tokenyard.model.gguf_vocabulary import special_ids

if TYPE_CHECKING:
    from tokenyard.model.gguf_reader import GGUFHeader, GGUFTensor

_USED = frozenset(
    {
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "block_count",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "attention.sliding_window",
        "attention.sliding_window_pattern",
        "attention.causal",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scale_linear",
        "expert_count",
        "pooling_type",
    }
)
# What says nothing that changes a result: the embedding has the vocabulary's size, all norms here are RMS norms.
_NEUTRAL = frozenset(
    {"vocab_size", "attention.layer_norm_epsilon", "expert_used_count", "tensor_data_layout", "use_parallel_residual"}
)
_ROPE_SCALING = "rope.scaling."  # gguf_rope knows these
_LARGEST_THETA = 1e30
_CONFIG_IDS = {"bos": "bos_token_id", "eos": "eos_token_id", "pad": "pad_token_id"}
_END_IDS = ("eos", "eot", "eom")  # of a text, a turn, a message


def config_from_gguf(header: GGUFHeader) -> tuple[dict[str, object], dict[str, object]]:
    """(config, generation_config) of a GGUF file; ModelLoadError for an architecture or feature not supported."""
    keys = Metadata(header)
    architecture = architecture_of(keys)
    prefix = keys.text("general.architecture") + "."
    _refuse_unsupported(keys, prefix)
    hf_names(header, architecture)  # refuses tensors that would not be loaded
    embedding = _embedding(header, keys.count(f"{prefix}embedding_length"))
    num_layers = keys.count(f"{prefix}block_count")
    check_tensors(header, architecture, num_layers)
    ids = special_ids(keys, embedding.shape[0])
    biases = bias_flags(header, architecture)
    config: dict[str, object] = {
        "architectures": [architecture.hf_class],
        "model_type": architecture.model_type,
        "vocab_size": embedding.shape[0],
        **_sizes(keys, prefix),
        "hidden_act": "silu",
        **biases,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "dtype": _dtype(header),
        **{key: ids[kind] for kind, key in _CONFIG_IDS.items() if kind in ids},
        **_rope(header, keys, prefix),
        **_windows(keys, prefix, architecture, num_layers, has_biases=any(biases.values())),
    }
    end_ids = list(dict.fromkeys(ids[kind] for kind in _END_IDS if kind in ids))
    return config, {"eos_token_id": end_ids} if end_ids else {}


def _sizes(keys: Metadata, prefix: str) -> dict[str, object]:
    num_heads = keys.count(f"{prefix}attention.head_count")
    epsilon = keys.number(f"{prefix}attention.layer_norm_rms_epsilon")
    return {
        "hidden_size": keys.count(f"{prefix}embedding_length"),
        "intermediate_size": keys.count(f"{prefix}feed_forward_length"),
        "num_hidden_layers": keys.count(f"{prefix}block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.count(f"{prefix}attention.head_count_kv", num_heads),
        "head_dim": _head_dim(keys, prefix),
        "rms_norm_eps": shortest(epsilon),
        "max_position_embeddings": keys.count(f"{prefix}context_length"),
    }


def _rope(header: GGUFHeader, keys: Metadata, prefix: str) -> dict[str, object]:
    theta = shortest(keys.number(f"{prefix}rope.freq_base", 10000.0))
    if not 1.0 < theta <= _LARGEST_THETA:
        raise keys.wrong(f"{prefix}rope.freq_base", f"a number above 1 and up to {_LARGEST_THETA:g}")
    scaling = rope_scaling(header, keys, prefix, head_dim=_head_dim(keys, prefix), theta=theta)
    return {"rope_theta": theta} | ({"rope_scaling": scaling} if scaling else {})


def _head_dim(keys: Metadata, prefix: str) -> int:
    hidden_size, num_heads = keys.count(f"{prefix}embedding_length"), keys.count(f"{prefix}attention.head_count")
    if not keys.has(f"{prefix}attention.key_length") and hidden_size % num_heads:
        raise ModelLoadError(
            f"{keys.path}: a hidden size of {hidden_size} does not divide into {num_heads} heads, and no key "
            f"'{prefix}attention.key_length' says how large they are"
        )
    head_dim = keys.count(f"{prefix}attention.key_length", hidden_size // num_heads or None)
    if keys.whole(f"{prefix}rope.dimension_count", head_dim) != head_dim:
        raise keys.refuse("rotary embedding covers a part of each head")
    if keys.whole(f"{prefix}attention.value_length", head_dim) != head_dim:
        raise keys.refuse("values have another size than keys")
    return head_dim


def _embedding(header: GGUFHeader, hidden_size: int) -> GGUFTensor:
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelLoadError(f"{header.path}: no embedding (tensor 'token_embd.weight' with two dimensions)")
    if embedding.shape[1] != hidden_size:
        raise ModelLoadError(f"{header.path}: embedding is {embedding.shape}, hidden size is {hidden_size}")
    return embedding


def _refuse_unsupported(keys: Metadata, prefix: str) -> None:
    if keys.whole("split.count", 1) > 1:
        raise keys.refuse("the file is one part of several (merge them with `llama-gguf-split --merge`)")
    known = _USED | _NEUTRAL
    unknown = sorted(name for name in keys.names(prefix) if name not in known and not name.startswith(_ROPE_SCALING))
    if unknown:
        raise keys.refuse(f"key {prefix + unknown[0]!r} asks for what may change every result")
    reasons = {
        "the model is a mixture of experts": keys.whole(f"{prefix}expert_count", 0) != 0,
        "attention is not causal": not keys.flag(f"{prefix}attention.causal", True),
        "the model is an embedding model (it pools)": keys.whole(f"{prefix}pooling_type", 0) != 0,
    }
    for reason, holds in reasons.items():
        if holds:
            raise keys.refuse(reason)


def _windows(
    keys: Metadata, prefix: str, architecture: Architecture, num_layers: int, *, has_biases: bool
) -> dict[str, object]:
    """What the config says about sliding windows, in the words of the architecture's class."""
    window = keys.whole(f"{prefix}attention.sliding_window", 0) or None
    if architecture.windows_by_layer:
        slides = _sliding_layers(keys, prefix, num_layers) if window else [False] * num_layers
        if not any(slides):
            return {"use_sliding_window": False}
        kinds = ["sliding_attention" if sliding else "full_attention" for sliding in slides]
        return {"use_sliding_window": True, "sliding_window": window, "layer_types": kinds, "max_window_layers": 0}
    if window and not all(_sliding_layers(keys, prefix, num_layers)):
        raise keys.refuse("the sliding window holds for some layers only")
    if architecture.window_class is None:
        return {"sliding_window": window}
    if window is None:
        return {}
    if has_biases:
        raise keys.refuse("the model has a sliding window and biases")
    model_type, hf_class = architecture.window_class
    return {"model_type": model_type, "architectures": [hf_class], "sliding_window": window}


def _sliding_layers(keys: Metadata, prefix: str, num_layers: int) -> list[bool]:
    """Which layers have the window: those of the pattern, or all. A pattern of N means that every N-th has none."""
    key = f"{prefix}attention.sliding_window_pattern"
    if not keys.has(key):
        return [True] * num_layers
    if keys.is_array(key):
        flags = keys.flags(key)
        if len(flags) != num_layers:
            raise keys.wrong(key, f"one entry for each of {num_layers} layers")
        return flags
    period = keys.whole(key)
    return [period == 0 or layer % period < period - 1 for layer in range(num_layers)]


def _dtype(header: GGUFHeader) -> str:
    """The dtype to compute in: the file's own where all matrices share one, else bfloat16 (quantised files)."""
    types = {tensor.type_name for tensor in header.tensors.values() if len(tensor.shape) > 1}
    return {frozenset({"F32"}): "float32", frozenset({"F16"}): "float16"}.get(frozenset(types), "bfloat16")
