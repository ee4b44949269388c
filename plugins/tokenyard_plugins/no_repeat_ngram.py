"""no_repeat_ngram: no sequence of n tokens comes twice in prompt and output together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenyard import ComponentDescriptor, hookimpl
from tokenyard.errors import ValidationError
from tokenyard.interfaces import LogitsProcessor

if TYPE_CHECKING:
    import torch
    from tokenyard.arrays import IntArray
    from tokenyard.interfaces import LogitsProcessorContext, LogitsRequest, RowLogitsProcessor

ARGUMENT = "no_repeat_ngram_size"
MAX_SIZE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class NoRepeatNgramOptions:
    """Options of `logits_processors=[{name: no_repeat_ngram, size: 3}]`."""

    size: int = 0  # for requests whose extra_args name none; 0 = off

    def __post_init__(self) -> None:
        check_size("size", self.size)


def check_size(name: str, size: object) -> int:
    """`size`, when it is a number of tokens; 0 = off."""
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= MAX_SIZE:
        raise ValidationError(
            f"{name}={size!r} is not valid: it must be an integer from 0 to {MAX_SIZE}, 0 = off",
            parameter=name,
            value=size,
        )
    return size


class NoRepeatNgram(LogitsProcessor):
    """A request asks with `extra_args={"no_repeat_ngram_size": n}`."""

    def __init__(self, options: NoRepeatNgramOptions) -> None:
        self._size = options.size

    def start(self, request: LogitsRequest) -> RowLogitsProcessor | None:
        size = check_size(ARGUMENT, (request.params.extra_args or {}).get(ARGUMENT, self._size))
        return _Row(size, request.prompt_token_ids.tolist()) if size else None


class _Row:
    """Knows which tokens followed each sequence of size - 1; a token costs the same however long the text is."""

    def __init__(self, size: int, prompt: Sequence[int]) -> None:
        self._num_before = size - 1
        self._tokens: list[int] = []
        self._num_output = 0
        self._followers: defaultdict[tuple[int, ...], dict[int, None]] = defaultdict(dict)
        self._take(prompt)

    def __call__(self, logits: torch.Tensor, output_token_ids: IntArray) -> None:
        self._take(output_token_ids[self._num_output :].tolist())
        self._num_output = len(output_token_ids)
        if banned := self._followers.get(self._ending(len(self._tokens))):
            logits[list(banned)] = -float("inf")

    def _take(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if len(self._tokens) >= self._num_before:
                self._followers[self._ending(len(self._tokens))][token_id] = None
            self._tokens.append(token_id)

    def _ending(self, end: int) -> tuple[int, ...]:
        return tuple(self._tokens[max(0, end - self._num_before) : end])


def _make(options: NoRepeatNgramOptions, context: LogitsProcessorContext) -> LogitsProcessor:
    return NoRepeatNgram(options)


@hookimpl
def tokenyard_components() -> Iterator[ComponentDescriptor[NoRepeatNgramOptions]]:
    yield ComponentDescriptor(
        component_kind="logits_processor",
        name="no_repeat_ngram",
        api_version=(1, 7),
        summary="no sequence of n tokens comes twice; n from extra_args or an option",
        options_type=NoRepeatNgramOptions,
        factory=_make,
    )
