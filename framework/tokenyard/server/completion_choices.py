"""What a completion request's choices look like, whether they come whole or in parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET, UnsetType

from tokenyard.server.logprobs import (
    CompletionLogprobs,
    LogprobWriter,
    TokenLogprob,
    by_token_id,
    no_logprobs,
    of_prompt,
)

if TYPE_CHECKING:
    from tokenyard.engine.input_processor import TokenizedPrompt
    from tokenyard.model.tokenizer import Tokenizer
    from tokenyard.outputs import CompletionOutput, LogprobsOfPosition, RequestOutput
    from tokenyard.sampling_params import SamplingParams
    from tokenyard.server.protocol.completions import CompletionRequest


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One choice, or the next part of one; the ids and prompt logprobs are there if they were asked for."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[Mapping[int, TokenLogprob] | None] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceOptions:
    """What of its choices a request wants to see."""

    num_choices: int  # of each prompt
    echo: bool = False
    has_logprobs: bool = False
    has_prompt_logprobs: bool = False  # by token id, besides those of an echo
    has_token_ids: bool = False
    as_token_ids: bool = False  # what tokens are called
    skip_special_tokens: bool = True

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing but the text of the choice."""
        return not (self.echo or self.has_logprobs or self.has_prompt_logprobs or self.has_token_ids)

    @property
    def needs_prompt_logprobs(self) -> bool:
        return self.has_prompt_logprobs or (self.echo and self.has_logprobs)


def choice_options(body: CompletionRequest, params: SamplingParams) -> ChoiceOptions:
    """Those of a request with checked parameters."""
    return ChoiceOptions(
        num_choices=params.n,
        echo=bool(body.echo),
        has_logprobs=params.logprobs is not None,
        has_prompt_logprobs=body.prompt_logprobs is not None,
        has_token_ids=bool(body.return_token_ids),
        as_token_ids=bool(body.return_tokens_as_token_ids),
        skip_special_tokens=params.skip_special_tokens,
    )


class PromptWriter:
    """The choices of one prompt: takes outputs of the engine, deltas or one whole, and gives what is to be sent."""

    def __init__(self, first_index: int, prompt: TokenizedPrompt, tokenizer: Tokenizer, options: ChoiceOptions) -> None:
        """`first_index` is the index of the first choice. Decodes an echoed prompt of token ids."""
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._options = options
        self._echoed = self._shown_prompt() if options.echo else ""
        self._is_begun = not options.needs_prompt_logprobs
        self._choices = [self._choice(first_index + index) for index in range(options.num_choices)]

    def take(self, output: RequestOutput) -> list[CompletionChoice]:
        """What can be sent now. The prompt's logprobs come first, whichever choice is ahead of them."""
        touched = [self._choices[one.index] for one in output.outputs]
        for choice, one in zip(touched, output.outputs, strict=True):
            choice.take(one)
        if not self._is_begun:
            if output.prompt_logprobs is None and not output.finished:
                return []
            self._begin(output.prompt_logprobs or [None] * len(self._prompt.token_ids))
            touched = self._choices
        parts = [choice.part() for choice in touched]
        return [part for part in parts if part is not None]

    def _begin(self, positions: Sequence[LogprobsOfPosition | None]) -> None:
        self._is_begun = True
        if self._options.has_prompt_logprobs:
            logprobs = by_token_id(positions)
            for choice in self._choices:
                choice.first.prompt_logprobs = logprobs
        if self._options.echo and self._options.has_logprobs:
            ids, as_token_ids = self._prompt.token_ids, self._options.as_token_ids
            echoed = of_prompt(self._tokenizer, self._echoed, ids, positions, as_token_ids=as_token_ids)
            for choice in self._choices:
                choice.put_before(echoed)

    def _choice(self, index: int) -> _Choice:
        options, ids = self._options, self._prompt.token_ids
        logprobs = None
        if options.has_logprobs:
            logprobs = LogprobWriter(
                self._tokenizer,
                ids,
                start=len(self._echoed),
                skip_special_tokens=options.skip_special_tokens,
                as_token_ids=options.as_token_ids,
            )
        choice = _Choice(index, self._echoed, logprobs, has_token_ids=options.has_token_ids)
        if options.has_token_ids:
            choice.first.prompt_token_ids = ids
        return choice

    def _shown_prompt(self) -> str:
        if self._prompt.text is not None:
            return self._prompt.text
        skips = self._options.skip_special_tokens
        return self._tokenizer.decode(self._prompt.token_ids, skip_special_tokens=skips)


class _Choice:
    """What of a choice has not been sent yet."""

    def __init__(self, index: int, text: str, logprobs: LogprobWriter | None, *, has_token_ids: bool) -> None:
        self._index = index
        self._logprobs = logprobs
        self._has_token_ids = has_token_ids
        self._unsent = self.first = self._new(text)

    def take(self, output: CompletionOutput) -> None:
        """Take in what is new."""
        unsent = self._unsent
        unsent.text += output.text
        if unsent.token_ids is not UNSET:
            unsent.token_ids += output.token_ids
        if self._logprobs is not None and unsent.logprobs is not None:
            unsent.logprobs.extend(self._logprobs.part(output.token_ids, output.logprobs or []))
        unsent.finish_reason, unsent.stop_reason = output.finish_reason, output.stop_reason

    def put_before(self, logprobs: CompletionLogprobs) -> None:
        """These are of the tokens before all others."""
        own = self.first.logprobs
        self.first.logprobs = no_logprobs()
        self.first.logprobs.extend(logprobs)
        if own is not None:
            self.first.logprobs.extend(own)

    def part(self) -> CompletionChoice | None:
        """What is to be sent; None as long as there is no text and no end."""
        unsent = self._unsent
        if not unsent.text and unsent.finish_reason is None:
            return None
        self._unsent = self._new("")
        return unsent

    def _new(self, text: str) -> CompletionChoice:
        return CompletionChoice(
            index=self._index,
            text=text,
            logprobs=None if self._logprobs is None else no_logprobs(),
            token_ids=[] if self._has_token_ids else UNSET,
        )
