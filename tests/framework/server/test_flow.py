"""FlowControl: what is let in, what is refused, how long to wait; over HTTP in test_overload."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenyard.async_llm import AsyncLLM
from tokenyard.config import EngineConfig, ServerConfig
from tokenyard.engine.async_client import Load
from tokenyard.engine.input_processor import TokenizedPrompt
from tokenyard.errors import EngineDeadError, EngineOverloadedError, ValidationError
from tokenyard.server.flow import FlowControl, Ticket
from tokenyard.server.scheduling import Terms
from tokenyard.server.service import Service


class FakeEngine:
    """An engine that has to do what a test says."""

    def __init__(self) -> None:
        self.load = Load()


class FakeTime:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def make(
    max_reqs: int | None = None, max_tokens: int | None = None
) -> tuple[FlowControl, FakeEngine, Service, FakeTime]:
    engine, clock = FakeEngine(), FakeTime()
    server = ServerConfig(max_num_queued_reqs=max_reqs, max_num_queued_tokens=max_tokens)
    service = Service(config=EngineConfig(server=server))
    service.llm = cast("AsyncLLM", engine)
    return FlowControl(service, clock), engine, service, clock


def test_without_limits_everything_is_let_in() -> None:
    flow, engine, _, _ = make()
    engine.load = Load(10**6, 10**9)
    flow.admit(10**6, 10**9)


def test_requests_are_counted_from_the_ticket_on_and_in_the_engine_after_it() -> None:
    flow, engine, _, _ = make(max_reqs=5)
    engine.load = Load(num_unfinished=2)
    first = flow.admit(2)
    with pytest.raises(
        EngineOverloadedError, match=r"4 requests are unfinished and 2 more .* at most 5 .*max_num_queued_reqs"
    ):
        flow.admit(2)
    second = flow.admit(1)
    first.release()
    engine.load = Load(num_unfinished=4)  # those of the first ticket are the engine's now
    with pytest.raises(EngineOverloadedError):
        flow.admit(1)
    second.release()
    second.release()
    assert flow.reserved_requests == 0
    flow.admit(1)


def test_more_requests_than_there_will_ever_be_room_for_are_the_clients_mistake() -> None:
    flow, *_ = make(max_reqs=5)
    with pytest.raises(ValidationError, match=r"6 requests.* at most 5 \(server.max_num_queued_reqs\)") as caught:
        flow.admit(6)
    assert caught.value.parameter == "n"


def test_2_3_14_long_prompts_are_refused_by_the_token_limit_and_short_ones_let_in() -> None:
    flow, engine, _, _ = make(max_tokens=1000)
    long = flow.admit(1, 5000)  # above the limit alone, but nothing waits: otherwise it could never run
    with pytest.raises(EngineOverloadedError, match=r"5000 prompt tokens wait .* at most 1000 .*max_num_queued_tokens"):
        flow.admit(1, 5000)
    long.release()
    engine.load = Load(num_unfinished=3, num_queued_tokens=900)
    with pytest.raises(EngineOverloadedError):
        flow.admit(1, 5000)
    for _ in range(10):
        flow.admit(1, 10).release()


def test_tokens_that_are_counted_late_are_refused_late_and_leave_nothing() -> None:
    flow, engine, _, _ = make(max_tokens=100)
    engine.load = Load(num_queued_tokens=60)
    ticket = flow.admit(1)
    with pytest.raises(EngineOverloadedError):
        ticket.set_tokens(41)
    ticket.set_tokens(40)
    assert flow.reserved_tokens == 40
    ticket.release()
    assert (flow.reserved_requests, flow.reserved_tokens) == (0, 0)


def test_a_server_that_is_shutting_down_takes_nothing() -> None:
    flow, _, service, _ = make()
    service.is_draining = True
    with pytest.raises(EngineOverloadedError, match="shutting down"):
        flow.admit(1)


def test_without_an_engine_nothing_is_let_in() -> None:
    flow, _, service, _ = make()
    service.llm = None
    with pytest.raises(EngineDeadError):
        flow.admit(1)


@pytest.mark.parametrize(
    ("ended_in_10_s", "wanted", "seconds"),
    [(20, 8, 4.0), (1000, 8, 1.0), (1, 8, 60.0), (0, 8, 60.0), (20, 1, 1.0)],
)
def test_retry_after_is_what_the_measured_rate_says_within_bounds(
    ended_in_10_s: int, wanted: int, seconds: float
) -> None:
    flow, engine, _, clock = make(max_reqs=8)
    flow.admit(1).release()
    clock.now += 10
    engine.load = Load(num_unfinished=8, num_ended=ended_in_10_s)
    with pytest.raises(EngineOverloadedError) as caught:
        flow.admit(wanted)
    assert caught.value.retry_after == pytest.approx(seconds)


def test_retry_after_of_the_token_limit_is_measured_in_tokens() -> None:
    flow, engine, _, clock = make(max_tokens=1000)
    flow.admit(1).release()
    clock.now += 10
    engine.load = Load(num_queued_tokens=900, num_begun_tokens=500)
    with pytest.raises(EngineOverloadedError) as caught:
        flow.admit(1, 600)
    assert caught.value.retry_after == pytest.approx(10.0)


def test_a_new_engine_whose_counters_begin_at_nothing_does_not_confuse_the_rate() -> None:
    flow, engine, _, clock = make(max_reqs=1)
    engine.load = Load(num_ended=1000)
    flow.admit(1).release()
    clock.now += 10
    engine.load = Load(num_unfinished=1, num_ended=3)
    with pytest.raises(EngineOverloadedError) as caught:
        flow.admit(1)
    assert 1 <= caught.value.retry_after <= 60


@pytest.mark.slow
def test_a_ticket_that_is_dropped_gives_its_room_back() -> None:
    flow, *_ = make(max_reqs=1)
    ticket: Ticket | None = flow.admit(1)
    assert ticket is not None
    del ticket
    gc.collect()
    flow.admit(1)


class SlowInt(int):
    """A number whose sums take a moment, in which other threads run."""

    def __add__(self, other: int) -> SlowInt:
        time.sleep(0.001)
        return SlowInt(int(self) + other)

    def __sub__(self, other: int) -> SlowInt:
        return self + -other


def test_tickets_that_are_dropped_in_many_threads_give_all_of_their_room_back() -> None:
    """Any thread collects garbage: one that tokenizes as well as the event loop's."""
    flow, *_ = make()
    tickets = [flow.admit(1, 2) for _ in range(16)]
    flow.reserved_requests, flow.reserved_tokens = SlowInt(16), SlowInt(32)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: tickets.pop().__del__(), range(16)))
    assert (flow.reserved_requests, flow.reserved_tokens) == (0, 0)


def test_prepare_tokenizes_after_the_check_alone_and_salts_every_prompt() -> None:
    flow, engine, _, _ = make(max_reqs=4, max_tokens=100)
    calls = []

    def tokenize() -> Sequence[TokenizedPrompt]:
        calls.append(1)
        return [TokenizedPrompt("a", [1, 2]), TokenizedPrompt("b", [3], cache_salt="own")]

    async def main() -> None:
        prompts, ticket = await flow.prepare(Terms(cache_salt="salt"), 4, tokenize)
        assert [prompt.cache_salt for prompt in prompts] == ["salt", "salt"]
        assert (ticket.num_requests, ticket.num_tokens) == (4, 6)
        with pytest.raises(EngineOverloadedError):
            await flow.prepare(Terms(), 2, tokenize)
        ticket.release()
        engine.load = Load(num_queued_tokens=99)
        with pytest.raises(EngineOverloadedError):
            await flow.prepare(Terms(), 2, tokenize)

    asyncio.run(main())
    assert len(calls) == 2
    assert (flow.reserved_requests, flow.reserved_tokens) == (0, 0)


def test_prepare_gives_the_room_back_when_tokenizing_fails() -> None:
    flow, *_ = make(max_reqs=1)

    def fail() -> Sequence[TokenizedPrompt]:
        raise ValidationError("no", parameter="prompt", value=None)

    with pytest.raises(ValidationError):
        asyncio.run(flow.prepare(Terms(), 1, fail, 5))
    assert (flow.reserved_requests, flow.reserved_tokens) == (0, 0)


@given(st.lists(st.tuples(st.integers(1, 5), st.booleans()), max_size=40), st.integers(1, 8))
def test_there_is_never_more_than_the_limit_and_never_less_than_fits(steps: list[tuple[int, bool]], limit: int) -> None:
    flow, engine, _, _ = make(max_reqs=limit)
    tickets: list[Ticket] = []
    for count, submits in steps:
        used = engine.load.num_unfinished + flow.reserved_requests
        try:
            tickets.append(flow.admit(count))
        except (EngineOverloadedError, ValidationError):
            assert used + count > limit
        else:
            assert used + count <= limit
        if submits and tickets:
            ticket = tickets.pop(0)
            engine.load = Load(engine.load.num_unfinished + ticket.num_requests)
            ticket.release()
        assert engine.load.num_unfinished + flow.reserved_requests <= limit
