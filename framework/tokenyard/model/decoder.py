"""The fast decoder: the forward pass of Llama and of what is shaped like it, by hand. Imports no transformers.

Queries, keys and values come from one matrix, gate and up from another; there is no module tree to walk. In float32
with plain linear layers the logits are bit-identical to transformers' for the same packed input and attention. In half
precision what the layers add up to is kept in float32, which costs nothing beside the matrices: rounded after every
layer it would lose what later layers add. `families` says where an architecture differs.

Several ranks may share a model: each computes its heads, its part of the MLP and of the vocabulary, and what they add
up to is summed in float32.

Legend: T = tokens, E = hidden size, H / HK = this rank's query / KV heads, D = head size, V = vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812

from tokenyard.interfaces.attention import AttentionLayer
from tokenyard.model.causal_lm import CausalLM, ModelShape
from tokenyard.model.decoder_weights import load_decoder_weights
from tokenyard.model.ranks import ONE_RANK
from tokenyard.model.rope import RotaryEmbedding, Rotation, rotate
from tokenyard.model.tensor_parallel import config_of_rank

if TYPE_CHECKING:
    from tokenyard.model.causal_lm import PagedAttention
    from tokenyard.model.decoder_config import DecoderConfig
    from tokenyard.model.decoder_weights import DecoderLayer, Weights
    from tokenyard.model.linear import Linear
    from tokenyard.model.ranks import RankGroup


class FastDecoder(CausalLM):
    """A model of one of `FAMILIES`. Every tensor is loaded or declared tied; anything else raises ModelLoadError.

    `pack=False` keeps plain linear layers: slower on a CPU, and equal to transformers to the last bit. `config` is the
    whole model's, whatever part of it this rank has; its logits are at the leader alone.
    """

    can_record = True

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        *,
        dtype: torch.dtype,
        device: torch.device,
        pack: bool = True,
        ranks: RankGroup = ONE_RANK,
    ) -> None:
        self.description = config.description
        self._ranks = ranks
        self._config = config_of_rank(config, ranks.size)
        self._weights = load_decoder_weights(config, weights, dtype=dtype, device=device, pack=pack, ranks=ranks)
        self._rotary = RotaryEmbedding(config.rope, config.head_dim, device)
        self._shape = shape_of(self._config)

    @property
    def shape(self) -> ModelShape:
        return self._shape

    def states(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, attention: PagedAttention
    ) -> torch.Tensor:
        residual = self._config.residual_multiplier
        hidden = self._embed(token_ids)  # [T, E] float32
        rotation = self._rotary(positions, self._weights.embedding.dtype)
        for layer in self._weights.layers:
            attended = self._attend(layer, self._normalise(hidden, layer.input_norm), rotation, attention)
            hidden = hidden.add(self._summed(layer.output, attended), alpha=residual)
            gate, up = layer.gate_up(self._normalise(hidden, layer.post_norm)).chunk(2, -1)
            hidden = hidden.add(self._summed(layer.down, F.silu(gate).mul_(up)), alpha=residual)
        return self._normalise(hidden.index_select(0, rows), self._weights.norm)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """At ranks that are not the leader, [N, 0]."""
        logits = self._ranks.gather(self._weights.head(states).float())  # [N, V], and padding behind it
        if logits is None:
            return states.new_empty((len(states), 0), dtype=torch.float32)
        if logits.shape[-1] != self._shape.vocab_size:
            logits = logits[:, : self._shape.vocab_size].contiguous()
        return logits if self._config.logits_scaling == 1 else logits.div_(self._config.logits_scaling)

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        multiplier, embedding = self._config.embedding_multiplier, self._weights.embedding
        if self._ranks.size == 1:
            hidden = F.embedding(token_ids, embedding)
        else:
            local = token_ids - self._ranks.rank * len(embedding)
            is_elsewhere = (local < 0) | (local >= len(embedding))
            hidden = F.embedding(local.masked_fill(is_elsewhere, 0), embedding)
            hidden = self._ranks.sum(hidden.masked_fill_(is_elsewhere[:, None], 0))  # all but one are 0: exact
        return (hidden if multiplier == 1 else hidden.mul_(multiplier)).float()

    def _summed(self, linear: Linear, inputs: torch.Tensor) -> torch.Tensor:
        """The result of a layer whose inputs the ranks share: [T, E]."""
        partial = linear(inputs)
        return partial if self._ranks.size == 1 else self._ranks.sum(partial.float())

    def _attend(
        self, layer: DecoderLayer, normed: torch.Tensor, rotation: Rotation, attention: PagedAttention
    ) -> torch.Tensor:
        """Attention of one layer: [T, E] -> [T, H D]."""
        num_heads, num_kv_heads = self._config.num_heads, self._config.num_kv_heads
        heads = layer.qkv(normed).view(normed.shape[0], -1, self._config.head_dim)  # [T, H + 2 HK, D]
        value = heads[:, num_heads + num_kv_heads :]
        heads = heads[:, : num_heads + num_kv_heads]
        if layer.head_norm is not None:
            heads = F.rms_norm(heads, heads.shape[-1:], None, self._config.rms_norm_eps).mul_(layer.head_norm)
        if layer.rotates:
            heads = rotate(heads, rotation)
        return attention(layer.index, heads[:, :num_heads], heads[:, num_heads:], value).flatten(1)

    def _normalise(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """`hidden` [T, E] float32 in the layers' data type."""
        return F.rms_norm(hidden, weight.shape, weight, self._config.rms_norm_eps).to(self._weights.embedding.dtype)


def shape_of(config: DecoderConfig) -> ModelShape:
    """The sizes that the engine needs, of a model that the fast decoder runs."""
    layers = tuple(
        AttentionLayer(index=index, scale=config.attention_scale, sliding_window=window)
        for index, window in enumerate(config.windows)
    )
    return ModelShape(
        vocab_size=config.vocab_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        v_head_dim=config.head_dim,
        layers=layers,
    )
