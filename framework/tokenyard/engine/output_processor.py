"""OutputProcessor: EngineCoreOutputs -> text, stop strings and RequestOutputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tokenyard.engine.detokenizer import Detokenizer
from tokenyard.outputs import CompletionOutput, RequestMetrics, RequestOutput
from tokenyard.request import FinishReason

if TYPE_CHECKING:
    from tokenyard.engine.input_processor import TokenizedPrompt
    from tokenyard.engine_outputs import EngineCoreOutputs
    from tokenyard.model.tokenizer import Tokenizer
    from tokenyard.sampling_params import SamplingParams


class Update(NamedTuple):
    """What one step changed for the users."""

    touched: Sequence[str]  # request ids with new text or tokens
    finished: Sequence[str]  # request ids that are complete
    stopped: Sequence[str]  # of these, the ones that a stop string ended: the engine has to be told
    num_new_tokens: int


@dataclass(slots=True)
class _State:
    prompt: TokenizedPrompt
    detokenizer: Detokenizer
    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None


class OutputProcessor:
    """Holds a request from `add` until `pop`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._states: dict[str, _State] = {}

    def add(self, request_id: str, prompt: TokenizedPrompt, params: SamplingParams, arrival_time: float) -> None:
        """Expect outputs of this request."""
        detokenizer = Detokenizer(self._tokenizer, prompt.token_ids, params.stop_strings, params.min_tokens)
        self._states[request_id] = _State(prompt, detokenizer, arrival_time)

    def process(self, outputs: EngineCoreOutputs, now: float) -> Update:
        """Take in one step. Tokens of a request that a stop string has ended already are dropped."""
        for admitted in outputs.admitted:
            if state := self._states.get(admitted.request_id):
                state.num_cached_tokens = admitted.num_cached_tokens
                state.first_scheduled_time = admitted.scheduled_at
        stopped = self._take_tokens(outputs, now)
        finished = list(stopped)
        for end in outputs.finished:
            state = self._states.get(end.request_id)
            if state is not None and state.finish_reason is None:
                state.error = end.error
                self._finish(state, end.reason, end.stop_reason, now)
                finished.append(end.request_id)
        alive_elsewhere = [request_id for request_id in stopped if request_id not in _ended(outputs)]
        return Update(outputs.request_ids, finished, alive_elsewhere, len(outputs.token_ids))

    def abort(self, request_ids: Sequence[str], now: float) -> None:
        """These requests were ended from outside."""
        for request_id in request_ids:
            state = self._states.get(request_id)
            if state is not None and state.finish_reason is None:
                self._finish(state, FinishReason.ABORT, None, now)

    def text(self, request_id: str) -> str:
        """The text so far; it only ever grows."""
        return self._states[request_id].detokenizer.text

    def output(self, request_id: str) -> RequestOutput:
        """The request with what it has produced so far."""
        state = self._states[request_id]
        completion = CompletionOutput(
            index=0,
            text=state.detokenizer.text,
            token_ids=list(state.detokenizer.token_ids),
            finish_reason=state.finish_reason.value if state.finish_reason else None,
            stop_reason=state.stop_reason,
        )
        return RequestOutput(
            request_id=request_id,
            prompt=state.prompt.text,
            prompt_token_ids=list(state.prompt.token_ids),
            outputs=[completion],
            finished=state.finish_reason is not None,
            metrics=RequestMetrics(
                arrival_time=state.arrival_time,
                first_scheduled_time=state.first_scheduled_time,
                first_token_time=state.first_token_time,
                finished_time=state.finished_time,
            ),
            num_cached_tokens=state.num_cached_tokens,
            error=state.error,
        )

    def pop(self, request_id: str) -> RequestOutput:
        """The request's output; it is forgotten here."""
        output = self.output(request_id)
        del self._states[request_id]
        return output

    def forget(self, request_ids: Sequence[str]) -> None:
        """Expect nothing more of these; unknown ones are ignored."""
        for request_id in request_ids:
            self._states.pop(request_id, None)

    def _take_tokens(self, outputs: EngineCoreOutputs, now: float) -> list[str]:
        stopped, start = [], 0
        token_ids = outputs.token_ids.tolist()
        ended_by_token = _ended_by_token(outputs)
        for request_id, count in zip(outputs.request_ids, outputs.num_tokens.tolist(), strict=True):
            tokens = token_ids[start : start + count]
            start += count
            state = self._states.get(request_id)
            if state is None or state.finish_reason is not None:
                continue
            if state.first_token_time is None:
                state.first_token_time = now
            if _take(state.detokenizer, tokens, request_id in ended_by_token) is not None:
                self._finish(state, FinishReason.STOP, state.detokenizer.stop_string, now)
                stopped.append(request_id)
        return stopped

    def _finish(self, state: _State, reason: FinishReason, stop_reason: int | str | None, now: float) -> None:
        state.detokenizer.finish()
        if reason is not FinishReason.ERROR and state.detokenizer.stop_string is not None:
            # The text that was held back until now completed a stop string.
            reason, stop_reason = FinishReason.STOP, state.detokenizer.stop_string
        state.finish_reason, state.stop_reason, state.finished_time = reason, stop_reason, now


def _take(detokenizer: Detokenizer, tokens: Sequence[int], ends: bool) -> str | None:
    """Add a step's tokens; `ends` says that the last one is a stop token, whose text nobody sees."""
    if not ends:
        return detokenizer.add(tokens)
    detokenizer.add(tokens[:-1])
    detokenizer.add_hidden(tokens[-1])
    return detokenizer.stop_string


def _ended_by_token(outputs: EngineCoreOutputs) -> frozenset[str]:
    """Requests that ended in this step at EOS or a stop token: the last of their new tokens."""
    return frozenset(
        end.request_id
        for end in outputs.finished
        if end.reason is FinishReason.STOP and not isinstance(end.stop_reason, str)
    )


def _ended(outputs: EngineCoreOutputs) -> frozenset[str]:
    return frozenset(end.request_id for end in outputs.finished)
