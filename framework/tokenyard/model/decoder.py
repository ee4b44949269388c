"""The fast decoder: Llama's forward pass on packed tokens, by hand. Imports no transformers.

Queries, keys and values come from one matrix, gate and up from another; there is no module tree to walk. In float32
with plain linear layers the logits are bit-identical to transformers' for the same packed input and attention.

Legend: T = tokens, E = hidden size, I = intermediate size, H / HK = query / KV heads, D = head size, V = vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F  # noqa: N812

from tokenyard.errors import ModelLoadError
from tokenyard.interfaces.attention import AttentionLayer
from tokenyard.model.causal_lm import CausalLM, ModelShape
from tokenyard.model.decoder_config import FAST_DESCRIPTION
from tokenyard.model.linear import Linear, fuse
from tokenyard.model.rope import RotaryEmbedding, Rotation, rotate

if TYPE_CHECKING:
    from tokenyard.model.causal_lm import PagedAttention
    from tokenyard.model.decoder_config import DecoderConfig

_EMBEDDING = "model.embed_tokens.weight"
_NORM = "model.norm.weight"
_HEAD = "lm_head.weight"
_LEFTOVER = re.compile(r"(^|\.)rotary_emb\.inv_freq$")  # a table that old checkpoints carry; computed here
_MAX_NAMES_SHOWN = 8


class Weights(Protocol):
    """Tensors by their Hugging Face names."""

    def names(self) -> frozenset[str]: ...

    def get(self, name: str, dtype: torch.dtype) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: torch.Tensor  # [E]
    qkv: Linear  # E -> (H + 2 HK) D
    output: Linear  # H D -> E
    post_norm: torch.Tensor  # [E]
    gate_up: Linear  # E -> 2 I
    down: Linear  # I -> E


class FastDecoder(CausalLM):
    """Llama from `weights`. Every tensor is loaded or declared tied; one too few or too many raises ModelLoadError.

    `pack=False` keeps plain linear layers: slower on a CPU, and equal to transformers to the last bit.
    """

    description = FAST_DESCRIPTION

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        *,
        dtype: torch.dtype,
        device: torch.device,
        pack: bool = True,
    ) -> None:
        self._config = config
        _check_names(config, weights.names())
        loader = _Loader(config, weights, dtype, device, pack)
        self._embedding = loader.tensor(_EMBEDDING, config.vocab_size, config.hidden_size)
        self._layers = [loader.layer(index) for index in range(config.num_layers)]
        self._norm = loader.tensor(_NORM, config.hidden_size)
        self._head = loader.head(self._embedding)
        self._rotary = RotaryEmbedding(config.rope, config.head_dim, device)
        self._shape = _shape_of(config)

    @property
    def shape(self) -> ModelShape:
        return self._shape

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logits_rows: torch.Tensor,
        attention: PagedAttention,
    ) -> torch.Tensor:
        hidden = F.embedding(token_ids, self._embedding)  # [T, E]
        rotation = self._rotary(positions, hidden.dtype)
        for index, layer in enumerate(self._layers):
            attended = self._attend(index, layer, self._normalise(hidden, layer.input_norm), rotation, attention)
            hidden = hidden + layer.output(attended)
            gate, up = layer.gate_up(self._normalise(hidden, layer.post_norm)).chunk(2, -1)
            hidden = hidden + layer.down(F.silu(gate).mul_(up))
        rows = self._normalise(hidden.index_select(0, logits_rows), self._norm)
        return self._head(rows).float()  # [R, V]

    def _attend(
        self, index: int, layer: _Layer, normed: torch.Tensor, rotation: Rotation, attention: PagedAttention
    ) -> torch.Tensor:
        """Attention of one layer: [T, E] -> [T, H D]."""
        sizes = self._config
        heads = layer.qkv(normed).view(normed.shape[0], -1, sizes.head_dim)  # [T, H + 2 HK, D]
        rotated = rotate(heads[:, : sizes.num_heads + sizes.num_kv_heads], rotation)
        query, key = rotated[:, : sizes.num_heads], rotated[:, sizes.num_heads :]
        value = heads[:, sizes.num_heads + sizes.num_kv_heads :]
        return attention(index, query, key, value).flatten(1)

    def _normalise(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden, weight.shape, weight, self._config.rms_norm_eps)


class _Loader:
    """Takes tensors by name, checks their shapes and fuses what shares an input."""

    def __init__(
        self, config: DecoderConfig, weights: Weights, dtype: torch.dtype, device: torch.device, pack: bool
    ) -> None:
        self._config = config
        self._weights = weights
        self._dtype = dtype
        self._device = device
        self._pack = pack

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """The tensor `name` in the model's data type, on its device."""
        tensor = self._weights.get(name, self._dtype)
        if tuple(tensor.shape) != shape:
            raise ModelLoadError(
                f"tensor '{name}' has the shape {list(tensor.shape)}, but config.json asks for {list(shape)}; "
                "the weights belong to another config"
            )
        return tensor.to(self._device)

    def layer(self, index: int) -> _Layer:
        config, prefix = self._config, f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        hidden, inner = config.hidden_size, config.intermediate_size
        qkv = ((f"{attention}.q_proj", queries), (f"{attention}.k_proj", keys), (f"{attention}.v_proj", keys))
        gate_up = ((f"{mlp}.gate_proj", inner), (f"{mlp}.up_proj", inner))
        biased = config.attention_bias
        return _Layer(
            input_norm=self.tensor(f"{prefix}.input_layernorm.weight", hidden),
            qkv=self._linear(qkv, hidden, bias=biased),
            output=self._linear(((f"{attention}.o_proj", hidden),), queries, bias=biased),
            post_norm=self.tensor(f"{prefix}.post_attention_layernorm.weight", hidden),
            gate_up=self._linear(gate_up, hidden, bias=config.mlp_bias),
            down=self._linear(((f"{mlp}.down_proj", hidden),), inner, bias=config.mlp_bias),
        )

    def head(self, embedding: torch.Tensor) -> Linear:
        """The output layer: the embedding when tied, unless the checkpoint has another one of its own."""
        own = _HEAD in self._weights.names()
        weight = self.tensor(_HEAD, *embedding.shape) if own else embedding
        return Linear(weight, pack=self._pack)

    def _linear(self, parts: Iterable[tuple[str, int]], inputs: int, *, bias: bool) -> Linear:
        parts = tuple(parts)
        weight = fuse([self.tensor(f"{name}.weight", outputs, inputs) for name, outputs in parts])
        offset = fuse([self.tensor(f"{name}.bias", outputs) for name, outputs in parts]) if bias else None
        return Linear(weight, offset, pack=self._pack)


def _shape_of(config: DecoderConfig) -> ModelShape:
    scale = config.head_dim**-0.5
    return ModelShape(
        vocab_size=config.vocab_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        v_head_dim=config.head_dim,
        layers=tuple(AttentionLayer(index=index, scale=scale) for index in range(config.num_layers)),
    )


def expected_names(config: DecoderConfig) -> frozenset[str]:
    """Every tensor that a checkpoint of this config must have; `lm_head.weight` only when it is not tied."""
    names = {_EMBEDDING, _NORM}
    if not config.tie_word_embeddings:
        names.add(_HEAD)
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}"
        names |= {f"{prefix}.input_layernorm.weight", f"{prefix}.post_attention_layernorm.weight"}
        for part, biased in (
            *((f"self_attn.{x}_proj", config.attention_bias) for x in "qkvo"),
            *((f"mlp.{x}_proj", config.mlp_bias) for x in ("gate", "up", "down")),
        ):
            names.add(f"{prefix}.{part}.weight")
            if biased:
                names.add(f"{prefix}.{part}.bias")
    return frozenset(names)


def _check_names(config: DecoderConfig, found: frozenset[str]) -> None:
    expected = expected_names(config)
    missing = sorted(expected - found)
    unexpected = sorted(name for name in found - expected - {_HEAD} if not _LEFTOVER.search(name))
    problems = [
        f"{what} tensors: {_shown(names)}"
        for what, names in (("missing", missing), ("unexpected", unexpected))
        if names
    ]
    if not problems:
        return
    hint = "; without tie_word_embeddings the checkpoint needs its own output layer" if _HEAD in missing else ""
    raise ModelLoadError(f"the checkpoint does not fit its config.json: {'; '.join(problems)}{hint}")


def _shown(names: list[str]) -> str:
    rest = len(names) - _MAX_NAMES_SHOWN
    return ", ".join(names[:_MAX_NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
