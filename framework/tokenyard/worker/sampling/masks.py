"""What rows may not sample, and what they are biased to. Each changes logits [N, V] in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from tokenyard.worker.sampling.history import History, Pairs
from tokenyard.worker.uploads import to_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenyard.arrays import IntArray, LongArray
    from tokenyard.worker.input_batch import SampledRequest

_NEVER = 2**62  # a position beyond any


def _in_vocabulary(token_ids: Sequence[int], vocab_size: int) -> list[int]:
    """Each once. A model's config may name ids that its vocabulary has not; a negative index would be another token."""
    return sorted({token_id for token_id in token_ids if 0 <= token_id < vocab_size})


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedTokens:
    """`allowed_token_ids`: rows that sample nothing else."""

    rows: torch.Tensor  # [rows that have it]
    places: tuple[torch.Tensor, torch.Tensor]  # ([M], [M]) what they may sample

    @classmethod
    def of(cls, requests: Sequence[SampledRequest], vocab_size: int, device: torch.device) -> AllowedTokens | None:
        """None when no row has it."""
        allowed = {row: request.params.allowed_token_ids for row, request in enumerate(requests)}
        lists = {row: _in_vocabulary(token_ids, vocab_size) for row, token_ids in allowed.items() if token_ids}
        if not lists:
            return None
        pairs = Pairs.of([(row, token_id) for row, token_ids in lists.items() for token_id in token_ids])
        return cls(rows=to_device(torch.tensor([*lists]), device), places=pairs.on(device))

    def apply(self, logits: torch.Tensor) -> None:
        """Put -inf at everything else."""
        kept = logits[self.places]
        logits.index_fill_(0, self.rows, -torch.inf)
        logits[self.places] = kept


@dataclass(frozen=True, slots=True, kw_only=True)
class BannedTokens:
    """Tokens that a row must not sample before some position: stop ids before `min_tokens`, bad words of one token."""

    pairs: Pairs  # [M]
    until: LongArray  # [M] the first position that may get the token

    @classmethod
    def of(cls, requests: Sequence[SampledRequest], vocab_size: int) -> BannedTokens | None:
        """None when there are none."""
        pairs, until = [], []
        for row, request in enumerate(requests):
            bad = [word[0] for word in request.bad_words_token_ids if len(word) == 1]
            stops = request.stop_token_ids if request.params.min_tokens else ()
            min_until = min(request.num_prompt_tokens + request.params.min_tokens, _NEVER)
            for token_ids, end in ((stops, min_until), (bad, _NEVER)):
                found = _in_vocabulary(token_ids, vocab_size)
                pairs += [(row, token_id) for token_id in found]
                until += [end] * len(found)
        return cls(pairs=Pairs.of(pairs), until=np.array(until, dtype=np.int64)) if pairs else None

    def apply(self, logits: torch.Tensor, positions: IntArray) -> None:
        """Put -inf where the rows, whose tokens get these positions [N], must not sample yet."""
        active = positions[self.pairs.rows] < self.until
        if active.any():
            banned = Pairs(self.pairs.rows[active], self.pairs.token_ids[active])
            logits[banned.on(logits.device)] = -torch.inf


@dataclass(frozen=True, slots=True)
class _RowBadWords:
    """Bad words of several tokens of one row, by the token before their last."""

    row: int
    num_prompt_tokens: int
    words: dict[int, list[tuple[int, ...]]]

    def banned(self, tokens: IntArray) -> list[tuple[int, int]]:
        """(row, last token) of the words that are complete but for that, as the end of the output."""
        output = tokens[self.num_prompt_tokens :]
        words = self.words.get(int(output[-1]), []) if len(output) else []
        return [(self.row, word[-1]) for word in words if np.array_equal(output[1 - len(word) :], word[:-1])]


@dataclass(frozen=True, slots=True, kw_only=True)
class BadWords:
    """`bad_words` of several tokens: the last one is banned while the output ends with those before it."""

    rows: tuple[_RowBadWords, ...]

    @classmethod
    def of(cls, requests: Sequence[SampledRequest], vocab_size: int) -> BadWords | None:
        """None when no row has any."""
        rows = []
        for row, request in enumerate(requests):
            words: dict[int, list[tuple[int, ...]]] = {}
            for word in request.bad_words_token_ids:
                if len(word) > 1 and 0 <= word[-1] < vocab_size:
                    words.setdefault(word[-2], []).append(word)
            if words:
                rows.append(_RowBadWords(row, request.num_prompt_tokens, words))
        return cls(rows=tuple(rows)) if rows else None

    def apply(self, logits: torch.Tensor, history: History) -> None:
        """Put -inf at the tokens that would complete a word."""
        if banned := [pair for words in self.rows for pair in words.banned(history(words.row))]:
            logits[Pairs.of(banned).on(logits.device)] = -torch.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitBias:
    """`logit_bias`: what is added to the logits of single tokens."""

    places: tuple[torch.Tensor, torch.Tensor]  # ([M], [M])
    biases: torch.Tensor  # [M] float32

    @classmethod
    def of(cls, requests: Sequence[SampledRequest], vocab_size: int, device: torch.device) -> LogitBias | None:
        """None when no row has any."""
        found = {
            (row, token_id): bias
            for row, request in enumerate(requests)
            for token_id, bias in (request.params.logit_bias or {}).items()
            if 0 <= token_id < vocab_size
        }
        if not found:
            return None
        biases = to_device(torch.tensor([*found.values()], dtype=torch.float32), device)
        return cls(places=Pairs.of([*found]).on(device), biases=biases)

    def apply(self, logits: torch.Tensor) -> None:
        """Add them."""
        logits[self.places] += self.biases
