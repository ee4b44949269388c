"""OutputProcessor: EngineCoreOutputs -> text, stop strings and RequestOutputs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from tokenyard.engine.detokenizer import Detokenizer
from tokenyard.engine.logprobs import CompletionLogprobs, PromptLogprobsTaken, StepLogprobs, TokenTexts
from tokenyard.engine.open_requests import Choice, OpenRequest
from tokenyard.request import FinishReason

if TYPE_CHECKING:
    from tokenyard.engine.input_processor import TokenizedPrompt
    from tokenyard.engine.request_listener import GuardedListener
    from tokenyard.engine_outputs import EngineCoreOutputs, FinishedRequest
    from tokenyard.model.tokenizer import Tokenizer
    from tokenyard.outputs import RequestOutput
    from tokenyard.runner_output import PromptLogprobs
    from tokenyard.sampling_params import SamplingParams


class Update(NamedTuple):
    """What one step changed for the users."""

    touched: Sequence[str]  # request ids with new tokens or choices that ended
    finished: Sequence[str]  # request ids that are complete: their last choice has ended
    stopped: Sequence[str]  # engine ids of choices that a stop string ended: the engine has to be told
    num_new_tokens: int


class Load(NamedTuple):
    """What an engine has to do, and has done since the start. A request with n choices counts n times."""

    num_unfinished: int = 0  # requests
    num_queued_tokens: int = 0  # prompt tokens of those whose prefill has not begun
    num_ended: int = 0  # requests, however they ended
    num_begun_tokens: int = 0  # prompt tokens of those whose prefill has begun


class OutputProcessor:
    """Holds a request from `add` until `pop` or `forget`; for one thread at a time.

    A request is known by its id. The engine knows each of its choices by an id of its own, a child's; with n = 1 the
    two are the same.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts = TokenTexts(tokenizer)
        self.listener: GuardedListener | None = None
        self._requests: dict[str, OpenRequest] = {}
        self._choices: dict[str, Choice] = {}  # those that have not ended, by engine id
        self._queued: dict[str, int] = {}  # prompt tokens of those whose prefill has not begun, by engine id
        self._num_queued_tokens = 0
        self._num_begun_tokens = 0
        self._num_ended = 0

    @property
    def num_unfinished(self) -> int:
        """Choices that have not ended."""
        return len(self._choices)

    @property
    def load(self) -> Load:
        """What the requests held here are for the engine."""
        return Load(len(self._choices), self._num_queued_tokens, self._num_ended, self._num_begun_tokens)

    def add(
        self,
        request_id: str,
        prompt: TokenizedPrompt,
        params: SamplingParams,
        arrival_time: float,
        child_ids: Sequence[str],
        label: str | None = None,
    ) -> None:
        """Expect outputs of this request, which the engine knows as `child_ids`, one for each choice.

        Ids are of one use at a time; `label` is what the user calls the request, and need not be unique.
        """
        request = OpenRequest(
            request_id=request_id,
            label=request_id if label is None else label,
            prompt=prompt,
            params=params,
            arrival_time=arrival_time,
            num_unfinished=len(child_ids),
        )
        if params.prompt_logprobs is not None:
            request.prompt_logprobs = PromptLogprobsTaken(len(prompt.token_ids), with_text=params.detokenize)
        request.choices = [self._choice(request, index, child_id) for index, child_id in enumerate(child_ids)]
        self._requests[request_id] = request
        self._choices |= {choice.engine_id: choice for choice in request.choices}
        if self.listener is not None:
            self.listener.added(request)
        self._queued |= dict.fromkeys(child_ids, len(prompt.token_ids))
        self._num_queued_tokens += len(child_ids) * len(prompt.token_ids)

    def process(self, outputs: EngineCoreOutputs, now: float) -> Update:
        """Take in one step. Tokens of a choice that a stop string has ended already are dropped."""
        for admitted in outputs.admitted:
            self._num_begun_tokens += self._unqueue(admitted.request_id)
            if choice := self._choices.get(admitted.request_id):
                choice.request.admit(admitted.num_cached_tokens, admitted.scheduled_at)
        for chunk in outputs.prompt_logprobs:
            self._take_prompt_logprobs(chunk)
        ends = {end.request_id: end for end in outputs.finished}
        touched, stopped, num_new_tokens = self._take_tokens(outputs, ends, now)
        ended = [*stopped, *self._take_ends(outputs.finished, now)]
        touched |= {choice.request.request_id: None for choice in ended}
        finished = dict.fromkeys(choice.request.request_id for choice in ended if not choice.request.num_unfinished)
        alive_elsewhere = [choice.engine_id for choice in stopped if choice.engine_id not in ends]
        if self.listener is not None:
            self.listener.stepped(outputs, num_new_tokens, now)
            for request_id in finished:
                self.listener.ended(self._requests[request_id], now)
        return Update(tuple(touched), tuple(finished), alive_elsewhere, num_new_tokens)

    def abort(self, request_ids: Sequence[str], now: float) -> None:
        """These requests were ended from outside, with all their choices."""
        for request, choices in self._expected(request_ids):
            for choice in choices:
                self._finish(choice, FinishReason.ABORT, None, now)
            if self.listener is not None:
                self.listener.ended(request, now)

    def lose(self, request_ids: Sequence[str], error: Exception) -> Sequence[str]:
        """These were refused, or the engine ended under them; returns those that had not ended.

        Nothing more is expected of them; what has come is held until they are forgotten.
        """
        lost = [request.request_id for request, choices in self._expected(request_ids) if self._drop(choices)]
        if self.listener is not None and lost:
            self.listener.lost(lost, error)
        return lost

    def engine_ids(self, request_ids: Sequence[str]) -> list[str]:
        """What the engine calls the choices of these requests that have not ended."""
        return [choice.engine_id for _, choices in self._expected(request_ids) for choice in choices]

    def request_ids(self, engine_ids: Sequence[str]) -> list[str]:
        """The requests to which choices that have not ended belong, each once."""
        choices = [self._choices[engine_id] for engine_id in engine_ids if engine_id in self._choices]
        return list(dict.fromkeys(choice.request.request_id for choice in choices))

    def is_finished(self, request_id: str) -> bool:
        """Whether no more tokens will come; also of a request that is not known any more."""
        request = self._requests.get(request_id)
        return request is None or not request.num_unfinished

    def output(self, request_id: str) -> RequestOutput:
        """The request with what it has produced so far."""
        return self._requests[request_id].whole()

    def stream_output(self, request_id: str) -> RequestOutput | None:
        """What a stream sends next, by `output_kind` and `stream_interval`; None = nothing yet, or nothing any more.

        CUMULATIVE: all choices with all that they have. DELTA: the choices with something new, and that only; the
        prompt's logprobs come once, when they are whole: with n = 1 in the first output. FINAL_ONLY: all choices, once
        the last has ended. Asked less often, it returns more at once: nothing is lost, and each choice's finish reason
        comes once.
        """
        return self._requests[request_id].next_output()

    def pop(self, request_id: str) -> RequestOutput:
        """The request's output; it is forgotten here."""
        output = self.output(request_id)
        self.forget([request_id])
        return output

    def forget(self, request_ids: Sequence[str]) -> None:
        """Expect nothing more of these; unknown ones are ignored."""
        for request, choices in self._expected(request_ids):
            if self.listener is not None:
                self.listener.ended(request, None)
            self._drop(choices)
        for request_id in request_ids:
            self._requests.pop(request_id, None)

    def _choice(self, request: OpenRequest, index: int, engine_id: str) -> Choice:
        params = request.params
        detokenizer = Detokenizer(
            self._tokenizer,
            request.prompt.token_ids,
            params.stop_strings,
            params.min_tokens,
            includes_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            detokenizes=params.detokenize,
        )
        logprobs = None if params.logprobs is None else CompletionLogprobs(with_text=params.detokenize)
        return Choice(request=request, engine_id=engine_id, index=index, detokenizer=detokenizer, logprobs=logprobs)

    def _expected(self, request_ids: Sequence[str]) -> Iterator[tuple[OpenRequest, Sequence[Choice]]]:
        """Those of the requests of which the engine still owes something, with the choices that it owes."""
        for request_id in request_ids:
            if (request := self._requests.get(request_id)) is not None:
                choices = [choice for choice in request.choices if choice.engine_id in self._choices]
                if choices:
                    yield request, choices

    def _drop(self, choices: Sequence[Choice]) -> int:
        """Expect nothing more of these; returns how many they are."""
        for choice in choices:
            del self._choices[choice.engine_id]
            self._end(choice)
        return len(choices)

    def _take_tokens(
        self, outputs: EngineCoreOutputs, ends: Mapping[str, FinishedRequest], now: float
    ) -> tuple[dict[str, None], list[Choice], int]:
        """(requests with new tokens, choices that a stop string ended, how many tokens were taken)."""
        touched: dict[str, None] = {}
        stopped: list[Choice] = []
        choices, token_ids = self._choices, outputs.token_ids.tolist()
        logprobs = None if outputs.logprobs is None else StepLogprobs(outputs.logprobs, self._texts)
        stop, num_dropped = 0, 0
        for engine_id, count in zip(outputs.request_ids, outputs.num_tokens.tolist(), strict=True):
            start, stop = stop, stop + count
            choice = choices.get(engine_id)
            if choice is None:
                num_dropped += count
                continue
            request, detokenizer = choice.request, choice.detokenizer
            touched[request.request_id] = None
            if request.first_token_time is None:
                request.first_token_time = now
            if engine_id in ends and _is_by_token(ends[engine_id]):
                _take_last(detokenizer, token_ids[start:stop])
            else:
                detokenizer.add(token_ids[start:stop])
            if choice.logprobs is not None:
                num_new = len(detokenizer.token_ids) - len(choice.logprobs.positions)
                choice.logprobs.add(logprobs, range(start, start + num_new))
            if detokenizer.stop_string is not None:
                self._finish(choice, FinishReason.STOP, detokenizer.stop_string, now)
                stopped.append(choice)
        return touched, stopped, len(token_ids) - num_dropped

    def _take_ends(self, ends: Collection[FinishedRequest], now: float) -> list[Choice]:
        """The choices that the engine has ended, but for those that a stop string ended before."""
        ended = []
        for end in ends:
            if (choice := self._choices.get(end.request_id)) is not None:
                choice.request.error = choice.request.error or end.error
                self._finish(choice, end.reason, end.stop_reason, now)
                ended.append(choice)
        return ended

    def _take_prompt_logprobs(self, chunk: PromptLogprobs) -> None:
        choice = self._choices.get(chunk.request_id)
        if choice is not None and choice.request.prompt_logprobs is not None:
            choice.request.prompt_logprobs.add(chunk, self._texts)

    def _finish(self, choice: Choice, reason: FinishReason, stop_reason: int | str | None, now: float) -> None:
        detokenizer, request = choice.detokenizer, choice.request
        detokenizer.finish()
        if reason is not FinishReason.ERROR and detokenizer.stop_string is not None:
            # The text that was held back until now completed a stop string.
            reason, stop_reason = FinishReason.STOP, detokenizer.stop_string
        choice.finish_reason, choice.stop_reason = reason, stop_reason
        del self._choices[choice.engine_id]
        self._end(choice)
        request.num_unfinished -= 1
        if not request.num_unfinished:
            request.finished_time = now

    def _end(self, choice: Choice) -> None:
        self._num_ended += 1
        self._unqueue(choice.engine_id)

    def _unqueue(self, engine_id: str) -> int:
        """It does not wait for its prefill any more; returns the prompt tokens that did."""
        num_tokens = self._queued.pop(engine_id, 0)
        self._num_queued_tokens -= num_tokens
        return num_tokens


def _take_last(detokenizer: Detokenizer, token_ids: Sequence[int]) -> None:
    """Tokens of which the last one is a stop token."""
    detokenizer.add(token_ids[:-1])
    detokenizer.add_stop_token(token_ids[-1])


def _is_by_token(end: FinishedRequest) -> bool:
    """Whether the last of a choice's new tokens, EOS or a stop token, ended it."""
    return end.reason is FinishReason.STOP and not isinstance(end.stop_reason, str)
