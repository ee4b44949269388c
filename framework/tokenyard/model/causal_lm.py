"""CausalLM: what the model runner needs of a decoder, and the attention call that the decoder makes back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch

    from tokenyard.interfaces.attention import AttentionBackend, AttentionLayer


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes that the engine needs. Heads are those of one rank."""

    vocab_size: int  # rows of the embedding
    num_heads: int
    num_kv_heads: int
    head_dim: int  # of query and key
    v_head_dim: int
    layers: Sequence[AttentionLayer]  # in the order of the K/V caches


class PagedAttention:
    """A worker's attention: a backend, the K/V cache of each layer, and the plans of the step that runs."""

    def __init__(
        self,
        backend: AttentionBackend,
        layers: Sequence[AttentionLayer],
        kv_caches: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        self._backend = backend
        self._layers = layers
        self._kv_caches = kv_caches
        self._plans: Sequence[object] = ()

    def begin_step(self, plans: Sequence[object]) -> None:
        """Set the plan of each KV group; valid until the next call."""
        self._plans = plans

    def __call__(
        self,
        layer_index: int,
        query: torch.Tensor,  # [T, num_heads, head_dim]
        key: torch.Tensor,  # [T, num_kv_heads, head_dim]
        value: torch.Tensor,  # [T, num_kv_heads, v_head_dim]
    ) -> torch.Tensor:
        """Write the step's K/V and attend; returns [T, num_heads, v_head_dim]."""
        layer = self._layers[layer_index]
        out = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
        plan = self._plans[layer.group]
        self._backend.forward(layer, query, key, value, self._kv_caches[layer_index], plan, out)
        return out


class CausalLM(ABC):
    """A loaded decoder. Used by the model runner in the worker process, from one thread, under torch.inference_mode."""

    can_record: ClassVar[bool] = False  # `states` may be recorded in a CUDA graph: it never waits for the device
    description: str  # which decoder this is and why, for `doctor` and the worker's report: "fast decoder (llama)"

    @property
    @abstractmethod
    def shape(self) -> ModelShape:
        """Sizes; constant."""

    @abstractmethod
    def states(
        self,
        token_ids: torch.Tensor,  # [T] int64, all scheduled tokens of all requests, packed
        positions: torch.Tensor,  # [T] int64
        rows: torch.Tensor,  # [R] int64 indices into T
        attention: PagedAttention,
    ) -> torch.Tensor:
        """The forward pass, up to where a row becomes as long as the vocabulary: [R, E], for `logits` alone to read.

        A model that cannot be parted there returns its logits, [R, vocab_size]: many rows then cost memory at once.
        """

    @abstractmethod
    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Logits [N, vocab_size] in float32 of any rows of `states`, in memory that the caller may write to."""

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, attention: PagedAttention
    ) -> torch.Tensor:
        """Logits [R, vocab_size] in float32 of the named rows."""
        return self.logits(self.states(token_ids, positions, rows, attention))
