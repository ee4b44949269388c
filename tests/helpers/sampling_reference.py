"""Sampling of one row in plain Python: one token after the other, in float64, written without a look at the sampler."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tokenyard.sampling_params import SamplingParams

LARGEST = float.fromhex("0x1.fffffep127")  # float32


def float32(value: float) -> float:
    """The nearest finite float32."""
    return float(struct.unpack("f", struct.pack("f", max(-LARGEST, min(LARGEST, value))))[0])


@dataclass(frozen=True, kw_only=True)
class Row:
    """All that decides about one token."""

    logits: Sequence[float]  # float32 numbers
    params: SamplingParams
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    stop_token_ids: Sequence[int] = ()
    bad_words: Sequence[Sequence[int]] = ()
    seed: int = field(default=0)


def edited_logits(row: Row) -> list[float]:
    """After masks, biases and penalties; float32 numbers."""
    biases: Mapping[int, float] = row.params.logit_bias or {}
    logits = []
    for token, logit in enumerate(row.logits):
        logit = float32(logit + float32(biases.get(token, 0.0)))
        if token in [*row.prompt, *row.output]:
            factor = row.params.repetition_penalty
            logit = float32(logit / factor if logit > 0 else logit * factor)
        if token in row.output:
            penalty = row.params.presence_penalty + row.params.frequency_penalty * list(row.output).count(token)
            logit = float32(logit - penalty)
        logits.append(-math.inf if _is_forbidden(token, row) else logit)
    return logits


def _is_forbidden(token: int, row: Row) -> bool:
    if row.params.allowed_token_ids is not None and token not in row.params.allowed_token_ids:
        return True
    if len(row.output) < row.params.min_tokens and token in row.stop_token_ids:
        return True
    output = [*row.output, token]
    return any(output[-len(word) :] == list(word) for word in row.bad_words if word[-1] == token)


def softmax(logits: Sequence[float], temperature: float = 1.0) -> list[float]:
    """Probabilities that add up to 1."""
    greatest = max(logits)
    weights = [math.exp((logit - greatest) / temperature) for logit in logits]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def limited(probabilities: Sequence[float], params: SamplingParams) -> list[float]:
    """What min_p, then top_k, then top_p leave, adding up to 1; whoever is as likely as the last one stays with it."""
    kept = [p if p >= params.min_p * max(probabilities) else 0.0 for p in probabilities]
    if params.top_k > 0:
        kth = sorted(kept, reverse=True)[: params.top_k][-1]
        kept = [p if p >= kth else 0.0 for p in kept]
    if params.top_p < 1:
        whole = math.fsum(kept)
        kept = [p if math.fsum(q for q in kept if q > p) < params.top_p * whole else 0.0 for p in kept]
    whole = math.fsum(kept)
    return [p / whole for p in kept]


def distribution(row: Row) -> list[float]:
    """The probability of each token."""
    logits = edited_logits(row)
    if row.params.temperature == 0:
        return [float(token == logits.index(max(logits))) for token in range(len(logits))]
    return limited(softmax(logits, row.params.temperature), row.params)


def is_close_call(row: Row, margin: float = 1e-5) -> bool:
    """Whether float32 might decide otherwise about who is drawn from."""
    params, probabilities = row.params, softmax(edited_logits(row), row.params.temperature or 1.0)
    ordered = sorted(probabilities, reverse=True)
    if any(0 < high - low < margin * high for high, low in pairwise(ordered)):
        return True
    if any(abs(p / ordered[0] - params.min_p) < margin for p in ordered) and 0 < params.min_p < 1:
        return True
    kept = limited(probabilities, SamplingParams(min_p=params.min_p, top_k=params.top_k))
    return any(abs(math.fsum(q for q in kept if q >= p) - params.top_p) < margin for p in kept) and params.top_p < 1


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that decides about the token at a position."""
    mask = 2**64 - 1

    def mixed(state: int) -> int:
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        return state ^ (state >> 31)

    gamma = 0x9E3779B97F4A7C15
    start = mixed((seed + gamma) & mask)
    return (mixed((start + (position + 1) * gamma) & mask) >> 11) / 2**53


def drawn(row: Row, margin: float = 1e-5) -> int | None:
    """The token of a row, or None where float32 might find the one beside it."""
    target, below = uniform(row.seed, len(row.prompt) + len(row.output)), 0.0
    for token, probability in enumerate(distribution(row)):
        if below - margin < target < below + margin and below > 0:
            return None
        below += probability
        if target < below - margin:
            return token
    return None


def logprobs(logits: Sequence[float]) -> list[float]:
    """log-softmax."""
    greatest = max(logits)
    total = greatest + math.log(math.fsum(math.exp(logit - greatest) for logit in logits))
    return [logit - total for logit in logits]
