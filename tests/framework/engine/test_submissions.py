"""AsyncClient.submit over a link that the test plays: several prompts of one consumer, and the engine's load."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import TypeVar, cast

import pytest
from step_outputs import ended, step
from tiny_tokenizers import byte_level
from tokenyard.clock import VirtualClock
from tokenyard.engine.async_client import AsyncClient, Load
from tokenyard.engine.input_processor import InputProcessor, TokenizedPrompt
from tokenyard.engine.link import EngineLink, EngineListener
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
