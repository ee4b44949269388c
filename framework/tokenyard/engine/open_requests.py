"""Requests between their start and their being taken: what they have produced, and what of it was sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tokenyard.outputs import CompletionOutput, RequestMetrics, RequestOutput
from tokenyard.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from tokenyard.engine.detokenizer import Detokenizer
    from tokenyard.engine.input_processor import TokenizedPrompt
    from tokenyard.engine.logprobs import CompletionLogprobs, PromptLogprobsTaken
    from tokenyard.outputs import LogprobsOfPosition
    from tokenyard.request import FinishReason
    from tokenyard.sampling_params import SamplingParams


@dataclass(slots=True, eq=False, kw_only=True)
class Choice:
    """One completion of a request, which the engine knows as a request of its own."""

    request: OpenRequest
    engine_id: str
    index: int
    detokenizer: Detokenizer
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_sent_tokens: int = 0
    num_sent_pieces: int = 0
    is_end_sent: bool = False

    def is_due(self, interval: int) -> bool:
        """Whether a stream has something to send: the first token, `interval` new ones, or the end."""
        if self.finish_reason is not None:
            return not self.is_end_sent
        num_tokens = len(self.detokenizer.token_ids)
        return num_tokens - self.num_sent_tokens >= (interval if self.num_sent_tokens else 1)

    def mark_sent(self) -> None:
        """A stream has sent all that there is."""
        self.num_sent_tokens = len(self.detokenizer.token_ids)
        self.num_sent_pieces = self.detokenizer.num_pieces
        self.is_end_sent = self.finish_reason is not None

    def whole(self) -> CompletionOutput:
        """All of it so far."""
        logprobs = None if self.logprobs is None else list(self.logprobs.positions)
        return self._completion(self.detokenizer.text, list(self.detokenizer.token_ids), logprobs)

    def unsent(self) -> CompletionOutput:
        """What has come since `mark_sent`."""
        start = self.num_sent_tokens
        return self._completion(
            self.detokenizer.text_since(self.num_sent_pieces),
            self.detokenizer.token_ids[start:],
            None if self.logprobs is None else self.logprobs.positions[start:],
        )

    def _completion(
        self, text: str, token_ids: list[int], logprobs: list[LogprobsOfPosition] | None
    ) -> CompletionOutput:
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=token_ids,
            cumulative_logprob=None if self.logprobs is None else self.logprobs.cumulative,
            logprobs=logprobs,
            finish_reason=self.finish_reason.value if self.finish_reason else None,
            stop_reason=self.stop_reason,
        )


@dataclass(slots=True, eq=False, kw_only=True)
class OpenRequest:
    """A request as its user sees it: one prompt, n choices. Times are engine-clock seconds."""

    request_id: str
    label: str  # what its outputs call it
    prompt: TokenizedPrompt
    params: SamplingParams
    arrival_time: float
    prompt_logprobs: PromptLogprobsTaken | None = None
    choices: list[Choice] = field(default_factory=list)  # by index
    num_unfinished: int = 0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    are_prompt_logprobs_sent: bool = False

    def admit(self, num_cached_tokens: int, scheduled_at: float) -> None:
        """A choice began to run. What the first one found cached counts: the others find what that one computed."""
        if self.first_scheduled_time is None:
            self.num_cached_tokens, self.first_scheduled_time = num_cached_tokens, scheduled_at

    def whole(self) -> RequestOutput:
        """All that it has produced so far; nothing in it changes later."""
        prompt_logprobs = None if self.prompt_logprobs is None else list(self.prompt_logprobs.positions)
        return self._output([choice.whole() for choice in self.choices], list(self.prompt.token_ids), prompt_logprobs)

    def next_output(self) -> RequestOutput | None:
        """What a stream sends next, by `output_kind` and `stream_interval`, or None; it counts as sent."""
        interval = self.params.stream_interval or 1
        due = [choice for choice in self.choices if choice.is_due(interval)]
        kind = self.params.output_kind
        if not due or (kind is RequestOutputKind.FINAL_ONLY and self.num_unfinished):
            return None
        if kind is RequestOutputKind.DELTA:
            output = self._unsent(due)
        else:
            output, due = self.whole(), self.choices
        for choice in due:
            choice.mark_sent()
        return output

    def _unsent(self, due: Sequence[Choice]) -> RequestOutput:
        first, taken = self.choices[0], self.prompt_logprobs
        prompt_logprobs = None
        # The first choice brings them, and under some policies another one may be ahead of it.
        are_whole = bool(first.detokenizer.token_ids) or first.finish_reason is not None
        if taken is not None and are_whole and not self.are_prompt_logprobs_sent:
            prompt_logprobs, self.are_prompt_logprobs_sent = list(taken.positions), True
        # The prompt's own list: a copy would make each token of a long prompt's answer cost more.
        return self._output([choice.unsent() for choice in due], self.prompt.token_ids, prompt_logprobs)

    def _output(
        self,
        completions: list[CompletionOutput],
        prompt_token_ids: list[int],
        prompt_logprobs: list[LogprobsOfPosition | None] | None,
    ) -> RequestOutput:
        return RequestOutput(
            request_id=self.label,
            prompt=self.prompt.text,
            prompt_token_ids=prompt_token_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=completions,
            finished=not self.num_unfinished,
            metrics=RequestMetrics(
                arrival_time=self.arrival_time,
                first_scheduled_time=self.first_scheduled_time,
                first_token_time=self.first_token_time,
                finished_time=self.finished_time,
            ),
            num_cached_tokens=self.num_cached_tokens,
            error=self.error,
        )
