"""AsyncClient.submit over a link that the test plays: several prompts of one consumer, and the engine's load."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import TypeVar, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from step_outputs import ended, step
from tiny_tokenizers import byte_level
from tokenyard.clock import VirtualClock
from tokenyard.engine.async_client import AsyncClient, Load, Submission
from tokenyard.engine.input_processor import InputProcessor, TokenizedPrompt
from tokenyard.engine.link import EngineLink, EngineListener
from tokenyard.engine.open_requests import OpenRequest
from tokenyard.engine_outputs import EngineCoreOutputs
from tokenyard.errors import CapacityError, EngineDeadError, ValidationError
from tokenyard.request import EngineCoreRequest, FinishReason
from tokenyard.sampling_params import RequestOutputKind, SamplingParams

T = TypeVar("T")

TOKENIZER = byte_level()
(A,), (B,) = TOKENIZER.encode("a"), TOKENIZER.encode("b")
PROMPT, LONG_PROMPT = TokenizedPrompt("xy", TOKENIZER.encode("xy")), TokenizedPrompt("z" * 9, TOKENIZER.encode("z" * 9))
DELTA = SamplingParams(max_tokens=9, output_kind=RequestOutputKind.DELTA)
FINAL = SamplingParams(max_tokens=9, output_kind=RequestOutputKind.FINAL_ONLY)
DEADLINE = 60.0  # seconds: liveness only


class PlayedLink:
    """Keeps what it is given; the test calls the listener itself."""

    clock = VirtualClock()

    def __init__(self) -> None:
        self.added: list[Sequence[EngineCoreRequest]] = []
        self.finished: list[str] = []
        self.listener: EngineListener | None = None

    def begin(self, listener: EngineListener) -> None:
        self.listener = listener

    def add(self, requests: Sequence[EngineCoreRequest]) -> None:
        self.added.append(requests)

    def finish(self, request_ids: Sequence[str], reason: FinishReason) -> None:
        self.finished += request_ids

    @property
    def ids(self) -> list[str]:
        """Engine ids, in the order of their coming."""
        return [request.request_id for requests in self.added for request in requests]


def make() -> tuple[AsyncClient, PlayedLink]:
    link = PlayedLink()
    inputs = InputProcessor(tokenizer=TOKENIZER, max_model_len=100, vocab_size=300, eos_token_ids=())
    return AsyncClient(cast("EngineLink", link), inputs, TOKENIZER), link


def run(main: Coroutine[object, object, T]) -> T:
    async def limited() -> T:
        return await asyncio.wait_for(main, DEADLINE)

    return asyncio.run(limited())


def test_all_prompts_are_queued_at_once_in_one_message_and_come_as_they_are_ready() -> None:
    async def main() -> None:
        client, link = make()
        submission = client.submit("label", [PROMPT, PROMPT], [DELTA, DELTA], 0, None)
        assert len(link.added) == 1
        first, second = link.ids
        client.deliver(step([(second, [A])]))
        index, output = await anext(submission)
        assert (index, output.outputs[0].text, output.request_id) == (1, "a", "label")
        client.deliver(step([(first, [B]), (second, [B])], finished=[ended(second)]))
        got = {}
        for _ in range(2):
            index, output = await anext(submission)
            got[index] = (output.outputs[0].text, output.finished)
        assert got == {0: ("b", False), 1: ("b", True)}
        client.deliver(step([(first, [A])], finished=[ended(first)]))
        assert [(index, output.finished) async for index, output in submission] == [(0, True)]
        submission.close()
        assert link.finished == []
        assert client._streams == {}

    run(main())


def test_a_consumer_of_whole_outputs_is_not_woken_for_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        client, link = make()
        submission = client.submit(None, [PROMPT], [FINAL], 0, None)
        (name,) = link.ids
        waiting = asyncio.create_task(anext(submission))
        wakes = []
        monkeypatch.setattr("tokenyard.engine.async_client._wake_all", lambda streams: wakes.append(streams))
        for _ in range(5):
            client.deliver(step([(name, [A])]))
            await asyncio.sleep(0)
        assert wakes == []
        monkeypatch.undo()
        client.deliver(step([(name, [A])], finished=[ended(name)]))
        assert (await waiting)[1].outputs[0].text == "aaaaaa"
        submission.close()

    run(main())


def test_closing_ends_what_has_not_ended_and_only_that() -> None:
    async def main() -> None:
        client, link = make()
        submission = client.submit(None, [PROMPT, PROMPT], [DELTA, SamplingParams(n=2, max_tokens=5)], 0, None)
        first, *children = link.ids
        client.deliver(step([(first, [A])], finished=[ended(first)]))
        await anext(submission)
        submission.close()
        submission.close()
        assert link.finished == children
        assert client._streams == {}
        assert client.load.num_unfinished == 0

    run(main())


def test_a_refusal_is_raised_for_the_whole_submission() -> None:
    async def main() -> None:
        client, link = make()
        submission = client.submit(None, [PROMPT, PROMPT], [DELTA, DELTA], 0, None)
        client.refuse(link.ids, CapacityError("full"))
        with pytest.raises(CapacityError, match="full"):
            await anext(submission)
        submission.close()
        assert client._streams == {}

    run(main())


def test_one_prompt_that_does_not_hold_queues_none() -> None:
    async def main() -> None:
        client, link = make()
        with pytest.raises(ValidationError):
            client.submit(None, [PROMPT, PROMPT], [DELTA, SamplingParams(min_tokens=99, max_tokens=99)], 0, None)
        assert link.added == []
        assert client._streams == {}

    run(main())


def test_an_engine_that_ends_is_told_to_who_waits_and_to_who_comes_later() -> None:
    async def main() -> None:
        client, _ = make()
        submission = client.submit(None, [PROMPT], [DELTA], 0, None)
        client.end(RuntimeError("planted"))
        with pytest.raises(EngineDeadError, match="planted"):
            await anext(submission)
        submission.close()
        with pytest.raises(EngineDeadError):
            client.submit(None, [PROMPT], [DELTA], 0, None)

    run(main())


@pytest.mark.parametrize("params", [DELTA, FINAL])
def test_prc_02_an_answer_that_was_whole_before_the_engine_died_is_given_whole(params: SamplingParams) -> None:
    async def main() -> None:
        client, link = make()
        whole, half = (client.submit(None, [PROMPT], [params], 0, None) for _ in range(2))
        both = client.submit(None, [PROMPT, PROMPT], [params, params], 0, None)
        first, _, third, _ = link.ids
        client.deliver(step([(name, [A]) for name in link.ids], finished=[ended(first), ended(third)]))
        client.end(RuntimeError("planted"))
        assert [(output.outputs[0].text, output.finished) async for _, output in whole] == [("a", True)]
        assert (await anext(both))[1].finished
        for submission in (half, both):
            if params is DELTA:
                output = (await anext(submission))[1]
                assert (output.outputs[0].text, output.finished) == ("a", False)
            with pytest.raises(EngineDeadError, match="planted"):
                await anext(submission)
        assert client.load.num_unfinished == 0
        for submission in (whole, half, both):
            submission.close()
        assert client._streams == {}

    run(main())


def test_tokens_that_came_before_the_engine_died_come_before_the_error() -> None:
    async def main() -> None:
        client, link = make()
        submission = client.submit(None, [PROMPT, PROMPT], [DELTA, DELTA], 0, None)
        client.deliver(step([(name, [A, B]) for name in link.ids]))
        client.end(None)
        assert [(await anext(submission))[1].outputs[0].text for _ in range(2)] == ["ab", "ab"]
        with pytest.raises(EngineDeadError):
            await anext(submission)
        submission.close()
        assert link.finished == []

    run(main())


def test_a_refusal_for_somebody_whose_event_loop_is_closed_leaves_nothing() -> None:
    async def submit() -> tuple[AsyncClient, PlayedLink]:
        client, link = make()
        client.submit(None, [PROMPT], [DELTA], 0, None)
        return client, link

    client, link = run(submit())
    client.refuse(link.ids, CapacityError("full"))
    assert client._streams == {}


class Fates:
    """A RequestListener that keeps what it is told of each request."""

    def __init__(self) -> None:
        self.told: dict[str, list[str]] = {}

    def added(self, request: OpenRequest) -> None:
        self.told[request.request_id] = []

    def stepped(self, outputs: EngineCoreOutputs, num_new_tokens: int, now: float) -> None:
        """Nothing."""

    def ended(self, request: OpenRequest, now: float | None) -> None:
        self.told[request.request_id].append("ended")

    def lost(self, request_ids: Sequence[str], error: Exception) -> None:
        for request_id in request_ids:
            self.told[request_id].append("lost")


ACTIONS = ("submit", "token", "finish", "stop", "refuse", "abort", "take", "close", "close", "end")


@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 5)), max_size=30))
def test_every_request_that_was_added_is_ended_once_or_lost(actions: list[tuple[str, int]]) -> None:
    """Whatever comes in which order, as the RequestListener is promised; and the load comes back to nothing."""

    async def main() -> None:
        client, link = make()
        fates = Fates()
        client.watch(fates)
        submissions: list[Submission] = []
        for action, number in actions:
            names = link.ids[number : number + 2]
            if action == "submit":
                with contextlib.suppress(EngineDeadError):
                    params = replace(DELTA, n=1 + number % 3, stop=["b"])
                    count = 1 + number // 3
                    submissions.append(client.submit(str(number), [PROMPT] * count, [params] * count, 0, None))
            elif action == "end":
                client.end(None)
                break
            elif action in ("token", "stop"):
                client.deliver(step([(name, [A if action == "token" else B]) for name in names]))
            elif action == "finish":
                client.deliver(step([(name, [A]) for name in names], finished=[ended(name) for name in names]))
            elif action == "refuse":
                client.refuse(names, CapacityError("full"))
            elif action == "abort":
                client.abort([str(number)])
            elif submission := next(iter(submissions[number:]), None):
                if action == "close":
                    submission.close()
                else:
                    with contextlib.suppress(CapacityError):
                        client.take(submission)
        for submission in submissions:
            submission.close()
        assert all(len(told) == 1 for told in fates.told.values()), fates.told
        assert client._streams == {}
        assert client.load[:2] == (0, 0)
        assert client.load.num_ended == len(link.ids)

    run(main())


def test_what_a_consumer_is_failed_with_is_raised_where_it_waits() -> None:
    async def main() -> None:
        client, link = make()
        submission = client.submit(None, [PROMPT], [DELTA], 0, None)
        waiting = asyncio.create_task(anext(submission))
        await asyncio.sleep(0)
        submission.fail(KeyError("late"))
        with pytest.raises(KeyError, match="late"):
            await waiting
        submission.close()
        assert link.finished == link.ids

    run(main())


def test_the_load_counts_choices_and_the_tokens_whose_prefill_has_not_begun() -> None:
    async def main() -> None:
        client, link = make()
        first = client.submit(None, [PROMPT], [SamplingParams(n=2, max_tokens=5)], 0, None)
        second = client.submit(None, [LONG_PROMPT], [DELTA], 0, None)
        assert client.load == Load(3, 2 * 2 + 9, 0, 0)
        one, _, long = link.ids
        client.deliver(step([(one, [A])], admitted=[(one, 0)]))
        assert client.load == Load(3, 2 + 9, 0, 2)
        client.deliver(step([(long, [A])], admitted=[(long, 0)], finished=[ended(long)]))
        assert client.load == Load(2, 2, 1, 11)
        client.deliver(step([(one, [A])], admitted=[(one, 0)]))  # resumed after a preemption
        assert client.load == Load(2, 2, 1, 11)
        first.close()
        second.close()
        assert client.load == Load(0, 0, 3, 11)

    run(main())
