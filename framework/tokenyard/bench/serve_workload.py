"""The requests of `tokenyard bench serve`: lengths, prompts of random tokens, and JSON bodies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:
    import numpy as np

    from tokenyard.bench.serve_settings import ServeBench

DEFAULT_VOCAB_SIZE = 32_000  # most models have as many
_FIRST_ID = 100  # below are control tokens and single bytes in many vocabularies


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request, as it is sent."""

    body: bytes
    input_len: int  # prompt tokens
    output_len: int  # tokens asked for
    has_exact_prompt: bool  # token ids: the server must count as many


class Draw(NamedTuple):
    """One request before it is written."""

    tokens: list[int]
    output_len: int


def draw(settings: ServeBench, vocab_size: int, count: int, rng: np.random.Generator) -> list[Draw]:
    """`count` requests, the same for the same state of `rng`."""
    prefix = _tokens(settings.random_prefix_len, vocab_size, rng)
    drawn = []
    for _ in range(count):
        input_len, output_len = (
            _length(length, settings.random_range_ratio, rng)
            for length in (settings.random_input_len, settings.random_output_len)
        )
        drawn.append(Draw(prefix + _tokens(input_len, vocab_size, rng), output_len))
    return drawn


def load_request(settings: ServeBench, model: str, drawn: Draw, text: str | None) -> LoadRequest:
    """A request as it is sent; `text` is its prompt, None where that is sent as token ids."""
    prompt = drawn.tokens if text is None else text
    body = msgspec.json.encode(_body(settings, model, prompt, drawn.output_len))
    return LoadRequest(body, len(drawn.tokens), drawn.output_len, text is None)


def _length(length: int, ratio: float, rng: np.random.Generator) -> int:
    least, most = max(1, math.floor(length * (1 - ratio))), math.ceil(length * (1 + ratio))
    return int(rng.integers(least, most, endpoint=True))


def _tokens(count: int, vocab_size: int, rng: np.random.Generator) -> list[int]:
    first = min(_FIRST_ID, vocab_size - 1)
    tokens: list[int] = rng.integers(first, vocab_size, count).tolist()
    return tokens


def _body(settings: ServeBench, model: str, prompt: str | Sequence[int], output_len: int) -> dict[str, object]:
    body: dict[str, object] = {"model": model}
    if settings.is_chat:
        body |= {"messages": [{"role": "user", "content": prompt}], "max_completion_tokens": output_len}
    else:
        body |= {"prompt": prompt, "max_tokens": output_len}
    if settings.temperature is not None:
        body["temperature"] = settings.temperature
    if settings.ignore_eos:
        body["ignore_eos"] = True
    if settings.check_deltas:
        body["return_token_ids"] = True
    return body | {"stream": True, "stream_options": {"include_usage": True}} | dict(settings.extra_body)
