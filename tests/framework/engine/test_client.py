"""InprocClient: requests with all their choices, queued all or none, run together, taken one by one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from step_outputs import ended, step
from tiny_tokenizers import byte_level
from tokenyard.clock import VirtualClock
from tokenyard.engine.client import InprocClient
from tokenyard.engine.input_processor import InputProcessor, TokenizedPrompt
from tokenyard.engine.output_processor import OutputProcessor, Update
from tokenyard.engine_outputs import EngineCoreOutputs, SchedulerStats
from tokenyard.errors import CapacityError, ValidationError
from tokenyard.interfaces.engine_core import EngineCore, PauseMode
from tokenyard.request import EngineCoreRequest, FinishReason
from tokenyard.sampling_params import RequestOutputKind, SamplingParams

TOKENIZER = byte_level()
(A,) = TOKENIZER.encode("a")
PROMPT = TokenizedPrompt("x", TOKENIZER.encode("x"))


class LetterEngine(EngineCore):
    """Gives each request one token "a" a step until its max_tokens; takes at most `limit` at a time."""

    def __init__(self, limit: int = 100) -> None:
        self.requests: dict[str, EngineCoreRequest] = {}
        self.num_left: dict[str, int] = {}
        self.ended: list[tuple[str, FinishReason]] = []
        self.num_steps = 0
        self._limit = limit

    def add_request(self, request: EngineCoreRequest) -> None:
        if len(self.num_left) >= self._limit:
            raise CapacityError("full")
        assert request.request_id not in self.requests
        assert isinstance(request.params, SamplingParams)
        self.requests[request.request_id] = request
        self.num_left[request.request_id] = request.params.max_tokens or 1000

    def finish_requests(self, request_ids: Sequence[str], reason: FinishReason) -> Sequence[str]:
        alive = [request_id for request_id in request_ids if self.num_left.pop(request_id, None) is not None]
        self.ended += [(request_id, reason) for request_id in alive]
        return alive

    def step(self) -> EngineCoreOutputs:
        self.num_steps += 1
        rows = [(request_id, [A]) for request_id in self.num_left]
        self.num_left = {request_id: count - 1 for request_id, count in self.num_left.items()}
        done = [request_id for request_id, count in self.num_left.items() if count == 0]
        for request_id in done:
            del self.num_left[request_id]
        return step(rows, finished=[ended(request_id) for request_id in done])

    def has_requests(self) -> bool:
        return bool(self.num_left)

    def wake_at(self) -> float | None:
        return None

    def pause(self, mode: PauseMode = PauseMode.KEEP) -> Sequence[str]:
        return ()

    def resume(self) -> None:
        """Never paused."""

    @property
    def is_paused(self) -> bool:
        return False

    def reset_prefix_cache(self) -> bool:
        return True

    def stats(self) -> SchedulerStats:
        raise NotImplementedError

    def check_health(self) -> None:
        """Always well."""

    def shutdown(self) -> None:
        """Nothing to stop."""


def make_client(engine: EngineCore) -> tuple[InprocClient, OutputProcessor]:
    outputs = OutputProcessor(TOKENIZER)
    inputs = InputProcessor(tokenizer=TOKENIZER, max_model_len=100, vocab_size=300, eos_token_ids=())
    return InprocClient(engine=engine, clock=VirtualClock(), inputs=inputs, outputs=outputs), outputs


def submit(client: InprocClient, *params: SamplingParams) -> list[str]:
    return client.submit([PROMPT] * len(params), params, [0] * len(params))


def pass_over(request_ids: Sequence[str], update: Update) -> None:
    """Nobody watches."""


def test_e12_the_children_of_a_request_are_queued_with_their_parent_and_taken_as_one() -> None:
    engine = LetterEngine()
    client, outputs = make_client(engine)
    params = [SamplingParams(n=3, max_tokens=2, seed=5), SamplingParams(max_tokens=1)]
    first, second = client.complete([PROMPT, PROMPT], params, [1, 2], pass_over)
    parent, *_ = [request.parent_id for request in engine.requests.values()]
    assert parent is not None
    assert [(request.request_id, request.parent_id, request.priority) for request in engine.requests.values()] == [
        *((f"{index}_{parent}", parent, 1) for index in range(3)),
        (second.request_id, None, 2),
    ]
    assert [choice.text for choice in first.outputs] == ["aa"] * 3
    assert (first.request_id, [choice.text for choice in second.outputs]) == (parent, ["a"])
    assert outputs.num_unfinished == 0


@pytest.mark.parametrize("limit", [0, 1, 2, 4, 5])
def test_req_05_when_one_choice_is_refused_none_of_any_request_stays(limit: int) -> None:
    engine = LetterEngine(limit)
    client, outputs = make_client(engine)
    with pytest.raises(CapacityError):
        submit(client, SamplingParams(n=2), SamplingParams(n=4))
    assert not engine.has_requests()
    assert outputs.num_unfinished == 0
    client.run(None, pass_over)
    assert engine.num_steps == 0


def test_parameters_are_checked_before_anything_is_queued() -> None:
    engine = LetterEngine()
    client, outputs = make_client(engine)
    with pytest.raises(ValidationError):
        submit(client, SamplingParams(n=2), SamplingParams(stop_token_ids=[5000]))
    assert (engine.requests, outputs.num_unfinished) == ({}, 0)


def test_req_05_an_abort_reaches_every_choice_in_the_engine() -> None:
    engine = LetterEngine()
    client, outputs = make_client(engine)

    def abort_at_once(request_ids: Sequence[str], update: Update) -> None:
        if update.touched:
            client.abort([*request_ids, "unknown"])

    (output,) = client.complete([PROMPT], [SamplingParams(n=4, max_tokens=50)], [0], abort_at_once)
    assert [choice.finish_reason for choice in output.outputs] == ["abort"] * 4
    assert [choice.text for choice in output.outputs] == ["a"] * 4
    assert {reason for _, reason in engine.ended} == {FinishReason.ABORT}
    assert (len(engine.ended), engine.has_requests(), outputs.num_unfinished) == (4, False, 0)


def test_a_stop_string_ends_its_choice_in_the_engine_and_no_other() -> None:
    engine = LetterEngine()
    client, _ = make_client(engine)
    (stopped, other) = client.complete(
        [PROMPT, PROMPT],
        [SamplingParams(n=2, stop="aaa", max_tokens=9), SamplingParams(max_tokens=5)],
        [0, 0],
        pass_over,
    )
    assert [(choice.text, choice.stop_reason) for choice in stopped.outputs] == [("", "aaa")] * 2
    assert other.outputs[0].text == "aaaaa"
    assert [reason for _, reason in engine.ended] == [FinishReason.STOP] * 2


def test_requests_that_were_submitted_before_run_along_and_are_not_lost() -> None:
    engine = LetterEngine()
    client, _ = make_client(engine)
    waiting = submit(client, SamplingParams(max_tokens=6), SamplingParams(n=2, max_tokens=2))
    (output,) = client.complete([PROMPT], [SamplingParams(max_tokens=3)], [0], pass_over)
    assert (output.outputs[0].text, engine.num_steps) == ("aaa", 3)
    client.run(waiting, pass_over)
    assert [[choice.text for choice in client.take(request_id).outputs] for request_id in waiting] == [
        ["a" * 6],
        ["aa", "aa"],
    ]
    assert not engine.has_requests()


def test_run_without_ids_ends_everything_that_is_open() -> None:
    engine = LetterEngine()
    client, outputs = make_client(engine)
    ids = submit(client, SamplingParams(max_tokens=2), SamplingParams(max_tokens=4))
    seen: list[Sequence[str]] = []
    client.run(None, lambda request_ids, update: seen.append(request_ids))
    assert seen == [ids] * 4
    assert [outputs.is_finished(request_id) for request_id in ids] == [True, True]
    client.run(None, pass_over)
    assert engine.num_steps == 4
    client.take(ids[0])
    client.discard(ids[1:])
    seen.clear()
    later = submit(client, SamplingParams(max_tokens=1))
    client.run(None, lambda request_ids, update: seen.append(request_ids))
    assert seen == [later]


def test_what_a_callback_raises_leaves_submitted_requests_to_run_again() -> None:
    client, _ = make_client(LetterEngine())
    ids = submit(client, SamplingParams(n=2, max_tokens=3))

    def fail(request_ids: Sequence[str], update: Update) -> None:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        client.run(ids, fail)
    client.run(ids, pass_over)
    assert [choice.text for choice in client.take(ids[0]).outputs] == ["aaa", "aaa"]


def test_a_request_that_is_taken_early_is_ended() -> None:
    engine = LetterEngine()
    client, _ = make_client(engine)
    (request_id,) = submit(client, SamplingParams(n=2, max_tokens=3))
    assert [choice.finish_reason for choice in client.take(request_id).outputs] == ["abort", "abort"]
    assert not engine.has_requests()


def test_req_01_ids_never_come_again() -> None:
    engine = LetterEngine()
    client, _ = make_client(engine)
    ids = submit(client, SamplingParams(), SamplingParams())
    client.discard(ids)
    assert not set(ids) & set(submit(client, SamplingParams(), SamplingParams()))


def test_streams_of_submitted_requests_get_each_token_once() -> None:
    client, _ = make_client(LetterEngine())
    params = SamplingParams(n=2, max_tokens=4, output_kind=RequestOutputKind.DELTA)
    (request_id,) = submit(client, params)
    texts = ["", ""]

    def gather(request_ids: Sequence[str], update: Update) -> None:
        output = client.stream_output(request_id)
        for choice in output.outputs if output is not None else ():
            texts[choice.index] += choice.text

    client.run([request_id], gather)
    assert texts == ["aaaa", "aaaa"]


def test_a_request_that_is_discarded_takes_nothing_from_the_others() -> None:
    engine = LetterEngine()
    client, _ = make_client(engine)
    first, second = submit(client, SamplingParams(max_tokens=3), SamplingParams(max_tokens=4))
    client.discard([first])
    assert (engine.num_steps, engine.ended) == (0, [(first, FinishReason.ABORT)])
    client.run([second], pass_over)
    assert client.take(second).outputs[0].text == "aaaa"
    client.discard([second, "unknown"])
