"""`complete` and `stream` over an engine that the test plays; over HTTP: test_request_lifecycle."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

import pytest
from starlette.requests import Request
from tokenyard.async_llm import AsyncLLM
from tokenyard.config import EngineConfig
from tokenyard.engine.async_client import Load
from tokenyard.engine.input_processor import TokenizedPrompt
from tokenyard.errors import DeadlineError, RequestFailedError
from tokenyard.outputs import CompletionOutput, RequestOutput
from tokenyard.request import SchedulingHints
from tokenyard.sampling_params import SamplingParams
from tokenyard.server.generation import Call, complete, stream
from tokenyard.server.scheduling import Terms
from tokenyard.server.service import Service

Planned = tuple[int, RequestOutput]


class FakeSubmission:
    """Gives what it was told to give, then waits for ever."""

    def __init__(self, planned: Sequence[Planned]) -> None:
        self.planned = list(planned)
        self.is_closed = False

    def __aiter__(self) -> FakeSubmission:
        return self

    async def __anext__(self) -> Planned:
        if not self.planned:
            raise StopAsyncIteration
        return self.planned.pop(0)

    def fail(self, error: Exception) -> None:
        raise AssertionError("nothing is late here")

    def close(self) -> None:
        self.is_closed = True


class FakeEngine:
    load = Load()

    def __init__(self, *planned: Planned) -> None:
        self.submission = FakeSubmission(planned)
        self.hints: SchedulingHints | None = None

    def submit(
        self,
        prompts: Sequence[TokenizedPrompt],
        params: Sequence[SamplingParams],
        label: str,
        priority: int,
        scheduling: SchedulingHints | None,
    ) -> FakeSubmission:
        self.hints = scheduling
        return self.submission


def output(
    tokens: list[int], *, reason: str | None = None, stop_reason: str | None = None, error: str | None = None
) -> RequestOutput:
    text = "".join(map(chr, tokens))
    completion = CompletionOutput(index=0, text=text, token_ids=tokens, finish_reason=reason, stop_reason=stop_reason)
    return RequestOutput(
        request_id="", prompt="", prompt_token_ids=[1], outputs=[completion], finished=reason is not None, error=error
    )


def service_with(engine: FakeEngine) -> Service:
    service = Service(config=EngineConfig())
    service.llm = cast("AsyncLLM", engine)
    return service


def call(num_prompts: int = 1, terms: Terms | None = None) -> Call:
    return Call(
        request_id="7",
        prompts=[TokenizedPrompt("a", [1])] * num_prompts,
        params=[SamplingParams()] * num_prompts,
        terms=terms or Terms(),
    )


async def never() -> dict[str, object]:
    await asyncio.Event().wait()
    raise AssertionError


async def streamed(engine: FakeEngine, wanted: type[Exception]) -> list[RequestOutput]:
    """What comes before the error."""
    outputs = []

    async def take_all() -> None:
        async for _, one in stream(service_with(engine), call()):
            outputs.append(one)

    with pytest.raises(wanted):
        await take_all()
    assert engine.submission.is_closed
    return outputs


@pytest.mark.parametrize(
    ("end", "wanted"),
    [
        ({"reason": "abort", "stop_reason": "deadline"}, DeadlineError),
        ({"reason": "error", "error": "it broke"}, RequestFailedError),
    ],
)
def test_what_comes_together_with_a_failure_is_delivered_before_it_and_ends_nothing(
    end: dict[str, str], wanted: type[Exception]
) -> None:
    engine = FakeEngine((0, output([65])), (0, output([66, 67], **end)))
    first, last = asyncio.run(streamed(engine, wanted))
    assert first.outputs[0].text == "A"
    assert last.outputs[0].text == "BC"
    assert (last.outputs[0].finish_reason, last.outputs[0].stop_reason, last.finished) == (None, None, False)


def test_a_failure_that_brings_nothing_delivers_nothing() -> None:
    engine = FakeEngine((0, output([], reason="error")))
    assert asyncio.run(streamed(engine, RequestFailedError)) == []


def test_an_abort_from_within_is_an_end_like_any_other() -> None:
    engine = FakeEngine((0, output([65], reason="abort")))

    async def main() -> list[Planned]:
        return [one async for one in stream(service_with(engine), call())]

    assert [one.outputs[0].finish_reason for _, one in asyncio.run(main())] == ["abort"]


def test_whole_outputs_are_in_the_order_of_their_prompts_however_they_end() -> None:
    engine = FakeEngine(*((index, output([65 + index], reason="stop")) for index in (2, 0, 1)))
    http = Request({"type": "http", "headers": []}, receive=never)
    outputs = asyncio.run(complete(service_with(engine), http, call(3)))
    assert [one.outputs[0].text for one in outputs] == ["A", "B", "C"]


def test_the_time_that_tokenizing_took_is_taken_off_the_deadline() -> None:
    async def main(terms: Terms) -> float | None:
        engine = FakeEngine((0, output([65], reason="stop")))
        async for _ in stream(service_with(engine), call(terms=terms)):
            pass
        assert engine.hints is not None
        return engine.hints.deadline

    now = Terms().since
    left = asyncio.run(main(Terms(hints=SchedulingHints(deadline=100), since=now - 40)))
    assert left == pytest.approx(60, abs=5)
    late = asyncio.run(main(Terms(hints=SchedulingHints(deadline=10), since=now - 40)))
    assert late is not None
    assert 0 < late < 0.001
