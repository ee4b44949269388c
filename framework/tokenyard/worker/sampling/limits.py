"""min_p, top_k and top_p: how likely a token must be to be drawn.

Each limit is a floor under a row's probabilities. Tokens exactly as likely as the last one that a limit lets in are let
in with it, and the most likely token always is. The limits apply one after the other: top_p counts what the other two
have left as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from tokenyard.worker.sampling.running_sums import RunningSums
from tokenyard.worker.sampling.selection import drop_below, largest
from tokenyard.worker.uploads import to_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenyard.sampling_params import SamplingParams

_FIRST = 512  # most likely tokens that are tried before a row's whole vocabulary is put in order


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of S rows; R of them must be put in order."""

    min_p: torch.Tensor | None  # [S] float32; None when no row has it
    ranking: _Ranking | None  # None when no row has top_k or top_p

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> Limits | None:
        """None when no row is limited."""
        has_min_p = any(row.min_p for row in params)
        limits = cls(
            min_p=to_device(torch.tensor([row.min_p for row in params]), device) if has_min_p else None,
            ranking=_Ranking.of(params, vocab_size, device),
        )
        return limits if has_min_p or limits.ranking is not None else None

    def apply(self, probabilities: torch.Tensor) -> None:
        """Put 0 in place at the tokens of [S, V] that must not be drawn."""
        if self.min_p is None:
            floors = torch.zeros_like(probabilities[:, 0])
        else:
            floors = self.min_p * probabilities.amax(dim=-1)
        if self.ranking is not None:
            floors = self.ranking.raise_floors(floors, probabilities)
        drop_below(probabilities, floors)


class _Floors(NamedTuple):
    floors: torch.Tensor  # [R] float32
    is_final: torch.Tensor  # [R] bool; False = more of the row must be put in order


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ranking:
    """top_k and top_p of R rows."""

    rows: torch.Tensor | None  # [R] among the S; None = all of them
    top_k: torch.Tensor  # [R] int64, V = unlimited
    top_p: torch.Tensor | None  # [R] float64, 1 = unlimited; None when no row limits
    width: int  # how many of the most likely tokens are put in order at first
    is_settled: bool  # those are enough for every row, whatever its probabilities

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> _Ranking | None:
        """None when no row needs its tokens in order."""
        top_k = [min(row.top_k, vocab_size) if row.top_k > 0 else vocab_size for row in params]
        rows = [row for row, one in enumerate(params) if top_k[row] < vocab_size or one.top_p < 1.0]
        if not rows:
            return None
        has_top_p = any(params[row].top_p < 1.0 for row in rows)
        top_p = torch.tensor([params[row].top_p for row in rows], dtype=torch.float64)
        few = [top_k[row] for row in rows if top_k[row] <= _FIRST]
        width = min(vocab_size, _FIRST if has_top_p or not few else max(few))
        return cls(
            rows=to_device(torch.tensor(rows), device) if len(rows) < len(params) else None,
            top_k=to_device(torch.tensor([top_k[row] for row in rows]), device),
            top_p=to_device(top_p, device) if has_top_p else None,
            width=width,
            is_settled=not has_top_p and all(top_k[row] <= width or top_k[row] == vocab_size for row in rows),
        )

    def raise_floors(self, floors: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
        """[S] `floors` with those of the R rows raised to what they let in of probabilities [S, V]."""
        if self.rows is None:
            return self._ranked(floors, probabilities)
        return floors.index_copy(0, self.rows, self._ranked(floors[self.rows], probabilities[self.rows]))

    def _ranked(self, floors: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
        """The first tokens of all R rows; then all tokens of the rows for which those do not settle it."""
        first = _floors(largest(probabilities, self.width), floors, self.top_k, self.top_p, probabilities.shape[-1])
        if self.is_settled:
            return first.floors
        rest = (~first.is_final).nonzero().squeeze(-1)  # on a GPU the host waits here
        if not len(rest):
            return first.floors
        vocab_size = probabilities.shape[-1]
        top_p = self.top_p[rest] if self.top_p is not None else None
        ranked = largest(probabilities[rest], vocab_size)
        return first.floors.index_copy(
            0, rest, _floors(ranked, floors[rest], self.top_k[rest], top_p, vocab_size).floors
        )


def _floors(
    ranked: torch.Tensor, floors: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor | None, vocab_size: int
) -> _Floors:
    """Floors of R rows from their W most likely probabilities [R, W], most likely first."""
    width = ranked.shape[-1]
    kth = ranked.gather(-1, (top_k.clamp(max=width) - 1)[:, None]).squeeze(-1)
    floors = torch.where(top_k < vocab_size, torch.maximum(floors, kth), floors)
    is_final = (top_k <= width) | (top_k == vocab_size)
    if top_p is None:
        return _Floors(floors, is_final)
    nucleus = _nucleus(ranked, floors, top_p)
    has_top_p = top_p < 1.0
    is_final &= nucleus.is_final | ~has_top_p | (width == vocab_size)
    return _Floors(torch.where(has_top_p, nucleus.floors, floors), is_final)


def _nucleus(ranked: torch.Tensor, floors: torch.Tensor, top_p: torch.Tensor) -> _Floors:
    """Floors raised to the token whose probability, with all more likely ones, reaches `top_p` of what is let in."""
    width = ranked.shape[-1]
    is_whole = floors == 0  # everything is let in: that is 1 by definition, without a sum over the vocabulary
    let_in = torch.where(ranked >= floors[:, None], ranked, 0.0)
    needed = top_p * torch.where(is_whole, 1.0, let_in.sum(dim=-1, dtype=torch.float64))
    just_below = torch.nextafter(needed, torch.zeros_like(needed))  # to exceed it is to reach what is needed
    reached = RunningSums(ranked).first_above(just_below)  # [R] W = not within these
    edge = ranked.gather(-1, reached.clamp(max=width - 1)[:, None]).squeeze(-1)
    is_final = (reached < width) & (is_whole | (ranked[:, -1] < floors))
    return _Floors(torch.where(reached < width, torch.maximum(floors, edge), floors), is_final)
