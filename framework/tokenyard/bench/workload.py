"""The throughput workload: shapes, and prompts of random token ids, the same for every engine that is compared."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from tokenyard.errors import ConfigError

_SHAPE = re.compile(r"(\d{1,7})x(\d{1,7})\+(\d{1,7})", re.ASCII)
_FIRST_ID, _LAST_ID = 100, 40_000  # a range that the vocabularies of most models have


@dataclass(frozen=True, slots=True)
class Shape:
    """So many requests of `input_len` prompt tokens that generate `output_len` tokens each."""

    num_requests: int
    input_len: int
    output_len: int

    def __str__(self) -> str:
        return f"{self.num_requests}x{self.input_len}+{self.output_len}"


WARM_UP = Shape(1, 8, 4)
"""What an engine runs untimed before it is measured."""


def warm_up(max_model_len: int) -> Shape:
    """As much of `WARM_UP` as a request of this model can have."""
    output_len = min(WARM_UP.output_len, max_model_len - 1)
    return Shape(1, min(WARM_UP.input_len, max_model_len - output_len), output_len)


def parse_shape(text: object) -> Shape:
    """`8x128+64`: eight requests of 128 prompt tokens and 64 output tokens."""
    match = _SHAPE.fullmatch(text) if isinstance(text, str) else None
    sizes = [int(number) for number in match.groups()] if match is not None else [0]
    if min(sizes) < 1:
        raise ConfigError(
            f"bench.shapes: {text!r} is no shape; give REQUESTSxINPUT+OUTPUT with numbers above 0, such as 8x128+64"
        )
    return Shape(*sizes)


def prompts(shape: Shape, *, vocab_size: int, seed: int) -> list[list[int]]:
    """Token ids of each request; with seed 0 those that `benchmarks/peers` use."""
    numbers = random.Random(seed * 10**12 + shape.num_requests * 1000 + shape.input_len)  # noqa: S311 - no secret
    last = min(_LAST_ID, vocab_size)
    first = min(_FIRST_ID, last - 1)
    return [[numbers.randrange(first, last) for _ in range(shape.input_len)] for _ in range(shape.num_requests)]
