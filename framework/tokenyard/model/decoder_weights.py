"""Loading the fast decoder's weights: every tensor by its name, checked, and fused with those that share its input.

Of several ranks each has its heads' rows of Q, K and V, its part of the inner size of the MLP and of the vocabulary,
and reads nothing else.

Legend: E = hidden size, I = intermediate size, H / HK = query / KV heads, D = head size, V = vocabulary; I, H, HK and V
are those of this rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F  # noqa: N812

from tokenyard.errors import ModelLoadError
from tokenyard.model.linear import Linear, fuse
from tokenyard.model.ranks import ONE_RANK

if TYPE_CHECKING:
    from tokenyard.model.decoder_config import DecoderConfig
    from tokenyard.model.ranks import RankGroup

_EMBEDDING = "model.embed_tokens.weight"
_NORM = "model.norm.weight"
_HEAD = "lm_head.weight"
_LEFTOVER = re.compile(r"(^|\.)rotary_emb\.inv_freq$")  # a table that old checkpoints carry; computed here
_MAX_NAMES_SHOWN = 8
_OUTPUTS, _INPUTS = 0, -1  # axes of a weight [outputs, inputs]


class Weights(Protocol):
    """Tensors by their Hugging Face names."""

    def names(self) -> frozenset[str]: ...

    def get(self, name: str, dtype: torch.dtype) -> torch.Tensor: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def get_part(self, name: str, dtype: torch.dtype, axis: int, part: slice) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights and switches of one layer."""

    index: int
    input_norm: torch.Tensor  # [E] float32
    qkv: Linear  # E -> (H + 2 HK) D
    head_norm: torch.Tensor | None  # [H + HK, D], of each query and key head
    rotates: bool
    output: Linear  # H D -> E
    post_norm: torch.Tensor  # [E] float32
    gate_up: Linear  # E -> 2 I
    down: Linear  # I -> E


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights of a decoder, on its device."""

    embedding: torch.Tensor  # [V, E]; zeros in the rows behind the vocabulary's end
    layers: tuple[DecoderLayer, ...]
    norm: torch.Tensor  # [E] float32
    head: Linear  # E -> V


def load_decoder_weights(
    config: DecoderConfig,
    weights: Weights,
    *,
    dtype: torch.dtype,
    device: torch.device,
    pack: bool,
    ranks: RankGroup = ONE_RANK,
) -> DecoderWeights:
    """Every tensor of `weights`; one too few, too many or of another shape raises ModelLoadError with its name.

    `config` is the whole model's.
    """
    _check_names(config, weights.names())
    loader = _Loader(config, weights, dtype, device, pack, ranks)
    embedding = loader.embedding()
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(loader.layer(index) for index in range(config.num_layers)),
        norm=loader.tensor(_NORM, config.hidden_size).float(),
        head=loader.head(embedding),
    )


class _Loader:
    """Takes tensors by name, checks their shapes and fuses what shares an input."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        dtype: torch.dtype,
        device: torch.device,
        pack: bool,
        ranks: RankGroup,
    ) -> None:
        self._config = config
        self._weights = weights
        self._dtype = dtype
        self._device = device
        self._pack = pack
        self._ranks = ranks

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """The whole tensor `name` in the model's data type, on its device."""
        tensor = self._weights.get(name, self._dtype)
        _check_shape(name, tuple(tensor.shape), shape)
        return tensor.to(self._device)

    def part(self, name: str, *shape: int, axis: int = _OUTPUTS) -> torch.Tensor:
        """This rank's part of a tensor that has `shape`, along its outputs or its inputs."""
        if self._ranks.size == 1:
            return self.tensor(name, *shape)
        _check_shape(name, self._weights.shape(name), shape)
        return self._weights.get_part(name, self._dtype, axis, self._ranks.span(shape[axis])).to(self._device)

    def embedding(self) -> torch.Tensor:
        """A tied pair is in a checkpoint under either name, or under both."""
        return self._vocabulary(_EMBEDDING if _EMBEDDING in self._weights.names() else _HEAD)

    def head(self, embedding: torch.Tensor) -> Linear:
        """The output layer: the embedding when tied, unless the checkpoint has another one of its own."""
        own = {_EMBEDDING, _HEAD} <= self._weights.names()
        return Linear(self._vocabulary(_HEAD) if own else embedding, pack=self._pack)

    def layer(self, index: int) -> DecoderLayer:
        """A layer; its parts have the names that all families give them."""
        config, prefix = self._config, f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        hidden, inner = config.hidden_size, config.intermediate_size
        qkv = ((f"{attention}.q_proj", queries), (f"{attention}.k_proj", keys), (f"{attention}.v_proj", keys))
        gate_up = ((f"{mlp}.gate_proj", inner), (f"{mlp}.up_proj", inner))
        return DecoderLayer(
            index=index,
            input_norm=self.tensor(f"{prefix}.input_layernorm.weight", hidden).float(),
            qkv=self._by_outputs(qkv, hidden, bias=config.qkv_bias),
            head_norm=self._head_norm(attention) if config.head_norms else None,
            rotates=config.rotates[index],
            output=self._by_inputs(f"{attention}.o_proj", hidden, queries, bias=config.output_bias),
            post_norm=self.tensor(f"{prefix}.post_attention_layernorm.weight", hidden).float(),
            gate_up=self._by_outputs(gate_up, hidden, bias=config.mlp_bias),
            down=self._by_inputs(f"{mlp}.down_proj", hidden, inner, bias=config.mlp_bias),
        )

    def _vocabulary(self, name: str) -> torch.Tensor:
        """Rows of the vocabulary: as many in each rank."""
        size, ranks = self._config.vocab_size, self._ranks
        rows = self.part(name, size, self._config.hidden_size)
        missing = -(-size // ranks.size) - len(rows)
        return F.pad(rows, (0, 0, 0, missing)) if missing else rows

    def _head_norm(self, attention: str) -> torch.Tensor:
        config, size = self._config, self._ranks.size
        query = self.tensor(f"{attention}.q_norm.weight", config.head_dim).expand(config.num_heads // size, -1)
        key = self.tensor(f"{attention}.k_norm.weight", config.head_dim).expand(config.num_kv_heads // size, -1)
        return torch.cat((query, key))

    def _by_outputs(self, parts: tuple[tuple[str, int], ...], inputs: int, *, bias: bool) -> Linear:
        """Layers that share an input, of which each rank computes a part of the outputs."""
        weight = fuse([self.part(f"{name}.weight", outputs, inputs) for name, outputs in parts])
        offset = fuse([self.part(f"{name}.bias", outputs) for name, outputs in parts]) if bias else None
        return Linear(weight, offset, pack=self._pack)

    def _by_inputs(self, name: str, outputs: int, inputs: int, *, bias: bool) -> Linear:
        """A layer of which each rank has a part of the inputs; the ranks' results add up, so that one has the bias."""
        weight = fuse([self.part(f"{name}.weight", outputs, inputs, axis=_INPUTS)])
        offset = fuse([self.tensor(f"{name}.bias", outputs)]) if bias else None
        return Linear(weight, offset if self._ranks.is_leader else None, pack=self._pack)


def _check_shape(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if found != wanted:
        raise ModelLoadError(
            f"tensor '{name}' has the shape {list(found)}, but config.json asks for {list(wanted)}; "
            "the weights belong to another config"
        )


def expected_names(config: DecoderConfig) -> frozenset[str]:
    """Every tensor that a checkpoint of this config must have; `lm_head.weight` only when it is not tied."""
    names = {_EMBEDDING, _NORM}
    if not config.tie_word_embeddings:
        names.add(_HEAD)
    parts = tuple(_layer_names(config))
    names.update(f"model.layers.{index}.{part}" for index in range(config.num_layers) for part in parts)
    return frozenset(names)


def _layer_names(config: DecoderConfig) -> Iterator[str]:
    yield from ("input_layernorm.weight", "post_attention_layernorm.weight")
    if config.head_norms:
        yield from ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
    for parts, biased in (
        (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), config.qkv_bias),
        (("self_attn.o_proj",), config.output_bias),
        (("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"), config.mlp_bias),
    ):
        for part in parts:
            yield f"{part}.weight"
            if biased:
                yield f"{part}.bias"


def _check_names(config: DecoderConfig, found: frozenset[str]) -> None:
    expected = expected_names(config)
    if config.tie_word_embeddings and _HEAD in found:
        expected -= {_EMBEDDING}  # the one tensor of the pair that is needed is there
    missing = sorted(expected - found)
    unexpected = sorted(name for name in found - expected - {_EMBEDDING, _HEAD} if not _LEFTOVER.search(name))
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
