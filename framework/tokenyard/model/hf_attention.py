"""Tokenyard's attention function in transformers' attention interface: one for running, one that records the layers.

Only the attention interface knows the name, not the mask interface: then transformers builds no mask, and hands the
function every keyword that the model's forward was called with. That is how a step's attention reaches it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import AttentionInterface

from tokenyard.errors import ModelLoadError

ATTENTION_NAME = "tokenyard_paged"
HANDLER_KEYWORD = "tokenyard_attention"

# Keywords that change nothing here, or that are read below. Any other one with a value would be ignored: refused.
_HARMLESS = frozenset({
    "cache",
    "is_causal",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "return_dict",
    "s_aux",
    "sliding_window",
    "softcap",
    "use_cache",
})  # fmt: skip


class AttentionCall(Protocol):
    """Write a layer's K/V and attend, on packed rows; `PagedAttention` is one."""

    def __call__(
        self, layer_index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor: ...


class Handler(ABC):
    """What a model's attention modules call in one forward pass."""

    @abstractmethod
    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,  # [1, H, T, D]
        key: torch.Tensor,  # [1, HK, T, D]
        value: torch.Tensor,  # [1, HK, T, DV]
        mask: torch.Tensor | None,
        scale: float | None,
        keywords: Mapping[str, object],
    ) -> torch.Tensor:
        """Returns [1, T, H, DV]."""


class RunningHandler(Handler):
    """Passes each module's rows to a step's attention; `index_of` maps a module's layer_idx to the cache's index."""

    def __init__(self, attention: AttentionCall, index_of: Mapping[int, int]) -> None:
        self._attention = attention
        self._index_of = index_of

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float | None,
        keywords: Mapping[str, object],
    ) -> torch.Tensor:
        rows = (_rows(tensor) for tensor in (query, key, value))
        return self._attention(self._index_of[_layer_index(module)], *rows).unsqueeze(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedLayer:
    """What one attention module asked for."""

    layer_idx: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    sliding_window: int | None
    soft_cap: float | None
    sinks: torch.Tensor | None


class RecordingHandler(Handler):
    """Computes nothing: keeps the facts of each call in order, and reasons why one could not be served."""

    def __init__(self) -> None:
        self.layers: list[RecordedLayer] = []
        self.reasons: list[str] = []

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float | None,
        keywords: Mapping[str, object],
    ) -> torch.Tensor:
        self._note_problems(module, key, query, mask, keywords)
        self.layers.append(
            RecordedLayer(
                layer_idx=_layer_index(module),
                num_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                head_dim=query.shape[3],
                v_head_dim=value.shape[3],
                scale=query.shape[3] ** -0.5 if scale is None else float(scale),
                sliding_window=_whole_number(keywords.get("sliding_window")),
                soft_cap=_number(keywords.get("softcap")),
                sinks=_tensor(keywords.get("s_aux")),
            )
        )
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])

    def _note_problems(
        self,
        module: torch.nn.Module,
        key: torch.Tensor,
        query: torch.Tensor,
        mask: torch.Tensor | None,
        keywords: Mapping[str, object],
    ) -> None:
        unknown = sorted(name for name, value in keywords.items() if value is not None and name not in _HARMLESS)
        problems = {
            "its attention brings a mask or bias of its own": mask is not None,
            "its attention is not causal": not keywords.get("is_causal", getattr(module, "is_causal", True)),
            "its attention reads other keys than those of its own tokens": key.shape[2] != query.shape[2],
            f"its attention needs {', '.join(unknown)}": bool(unknown),
        }
        self.reasons += [reason for reason, holds in problems.items() if holds and reason not in self.reasons]


def register() -> None:
    """Make ATTENTION_NAME known to transformers; may be called again."""
    AttentionInterface.register(ATTENTION_NAME, _attention)


def common_shape(layers: Sequence[RecordedLayer]) -> tuple[int, int, int, int] | None:
    """(heads, KV heads, head size, value head size) that all layers share, or None."""
    shapes = {(layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.v_head_dim) for layer in layers}
    return shapes.pop() if len(shapes) == 1 else None


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    tokenyard_attention: Handler | None = None,
    **keywords: object,
) -> tuple[torch.Tensor, None]:
    """The registered function; dropout is 0 outside of training."""
    if tokenyard_attention is None:
        raise ModelLoadError(f"{type(module).__name__} does not receive the keywords of the model's forward")
    handler = tokenyard_attention
    return handler.attend(module, query, key, value, attention_mask, scaling, keywords), None


def _rows(heads: torch.Tensor) -> torch.Tensor:
    """[1, H, T, D] as [T, H, D]; a row's heads lie one after the other, which backends rely on.

    After a rotary embedding it is usually a head's rows that do.
    """
    rows = heads[0].transpose(0, 1)
    is_packed = rows.stride(2) == 1 and (rows.shape[1] == 1 or rows.stride(1) == rows.shape[2])
    return rows if is_packed else rows.contiguous()


def _layer_index(module: torch.nn.Module) -> int:
    index = getattr(module, "layer_idx", None)
    if not isinstance(index, int):
        raise ModelLoadError(f"{type(module).__name__} has no layer index, so its K/V cannot be kept")
    return index


def _whole_number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def _tensor(value: object) -> torch.Tensor | None:
    return value.detach() if isinstance(value, torch.Tensor) else None
