"""The load-time check of adapter models: a small packed batch must give the logits of its sequences alone.

A model's own code decides what its attention function is asked for, and some families ask for less than they compute
with. So two sequences run packed, one of them in two chunks, with a plain attention that knows only what Tokenyard's
backends are told; the same sequences run alone with the model's own eager attention; the logits must agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from tokenyard.errors import ModelLoadError

if TYPE_CHECKING:
    from tokenyard.interfaces.attention import AttentionLayer
    from tokenyard.model.hf_attention import AttentionCall

    Packed = Callable[[torch.Tensor, torch.Tensor, AttentionCall], torch.Tensor]
    Alone = Callable[[torch.Tensor], torch.Tensor]

_LENGTHS = (14, 7)  # tokens of the two sequences; the last chunk has 5 and 1 of them
_SECOND_CHUNK = (5, 1)
# Root mean square of the difference, relative to that of the logits. Half precision differs by a few per cent between
# any two orders of summation, over some tens of layers; attention over wrong tokens differs by about 1.
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 0.03, torch.bfloat16: 0.15}
# Rounding can send a token near a tie to another expert, which changes much; a mistake shows with any tokens.
_HALF_PRECISION_ATTEMPTS = 3


class Part(NamedTuple):
    """Query rows start:stop of a packed step belong to `sequence`."""

    sequence: int
    start: int
    stop: int


class PackedReference:
    """Attention over packed rows as plainly as it can be: K/V of every sequence kept whole, scores in float32."""

    def __init__(self, layers: Sequence[AttentionLayer]) -> None:
        self._layers = layers
        self._parts: Sequence[Part] = ()
        self._history: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def begin_step(self, parts: Sequence[Part]) -> None:
        """Say whose rows the next forward pass has."""
        self._parts = parts

    def __call__(self, layer_index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        outputs = []
        for part in self._parts:
            rows = slice(part.start, part.stop)
            keys, values = self._extend((layer_index, part.sequence), key[rows], value[rows])
            outputs.append(attend(self._layers[layer_index], query[rows], keys, values))
        return torch.cat(outputs)

    def _extend(
        self, place: tuple[int, int], key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if place in self._history:
            past_key, past_value = self._history[place]
            key, value = torch.cat((past_key, key)), torch.cat((past_value, value))
        self._history[place] = (key, value)
        return key, value


def attend(layer: AttentionLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention of one sequence whose last rows are `query` [Q, H, D]; keys and values [L, HK, D]."""
    group = query.shape[1] // key.shape[1]
    keys, values = (tensor.float().repeat_interleave(group, 1).transpose(0, 1) for tensor in (key, value))
    scores = query.float().transpose(0, 1) @ keys.transpose(1, 2) * layer.scale  # [H, Q, L]
    if layer.soft_cap is not None:
        scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
    key_positions = torch.arange(len(key), device=key.device)
    positions = key_positions[len(key) - len(query) :, None]
    hidden = key_positions > positions
    if layer.sliding_window is not None:
        hidden = hidden | (key_positions <= positions - layer.sliding_window)
    scores = scores.masked_fill(hidden, -torch.inf)
    if layer.sinks is not None:
        sinks = layer.sinks.float()[:, None, None].expand(-1, len(query), 1)
        scores = torch.cat((scores, sinks), -1)
    weights = scores.softmax(-1)[..., : len(key)]
    return (weights @ values).transpose(0, 1).to(query.dtype)


def check_packed_batch(
    name: str,
    packed: Packed,
    alone: Alone,
    layers: Sequence[AttentionLayer],
    *,
    vocab_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Raise ModelLoadError with the measured difference when packed and lone logits do not agree.

    `packed(token_ids, positions, attention)` and `alone(token_ids)` return logits of all rows, [T, V].
    """
    attempts = 1 if dtype is torch.float32 else _HALF_PRECISION_ATTEMPTS
    differences = (_difference(packed, alone, layers, vocab_size, device, seed) for seed in range(attempts))
    allowed = _TOLERANCES[dtype]
    measured: list[float] = []
    for difference in differences:
        if difference <= allowed:
            return
        measured.append(difference)
    raise ModelLoadError(
        f"{name} gives other logits in a packed batch than alone: they differ by {min(measured):.2g} of their "
        f"size, allowed is {allowed:g}; its attention or its positions need something that Tokenyard does not give, "
        "so it cannot be run"
    )


def _difference(
    packed: Packed, alone: Alone, layers: Sequence[AttentionLayer], vocab_size: int, device: torch.device, seed: int
) -> float:
    """Root mean square of packed minus lone logits of random sequences, relative to that of the lone ones."""
    random = torch.Generator().manual_seed(seed)
    sequences = [torch.randint(vocab_size, (length,), generator=random).to(device) for length in _LENGTHS]
    expected = torch.cat([alone(tokens) for tokens in sequences])
    actual = torch.cat(_run_packed(sequences, packed, PackedReference(layers)))
    centred = expected - expected.mean(-1, keepdim=True)
    return float(_root_mean_square(actual - expected) / _root_mean_square(centred))


def _run_packed(
    sequences: Sequence[torch.Tensor],
    packed: Packed,
    attention: PackedReference,
) -> list[torch.Tensor]:
    """Logits of each sequence [length, V], computed in two packed steps."""
    splits = [len(tokens) - last for tokens, last in zip(sequences, _SECOND_CHUNK, strict=True)]
    ends = [len(tokens) for tokens in sequences]
    logits: list[list[torch.Tensor]] = [[] for _ in sequences]
    for starts, stops in (([0] * len(sequences), splits), (splits, ends)):
        parts, row = [], 0
        for index, (start, stop) in enumerate(zip(starts, stops, strict=True)):
            parts.append(Part(index, row, row + stop - start))
            row += stop - start
        attention.begin_step(parts)
        chunks = [tokens[a:b] for tokens, a, b in zip(sequences, starts, stops, strict=True)]
        positions = [
            torch.arange(a, b, device=tokens.device) for tokens, a, b in zip(sequences, starts, stops, strict=True)
        ]
        result = packed(torch.cat(chunks), torch.cat(positions), attention)
        for part in parts:
            logits[part.sequence].append(result[part.start : part.stop])
    return [torch.cat(parts) for parts in logits]


def _root_mean_square(values: torch.Tensor) -> torch.Tensor:
    return values.double().square().mean().sqrt()
