"""`tokenyard bench serve` on a clock of the test's own: every token's time is known, and so is every figure."""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenyard.bench.arrivals import send_times
from tokenyard.bench.load import Record, Send, run_load
from tokenyard.bench.serve_metrics import errors, figures, wrong_counts
from tokenyard.bench.serve_settings import ServeBench
from tokenyard.bench.serve_workload import LoadRequest, draw, load_request
from tokenyard.client.chunks import Choice, Chunk, Usage
from tokenyard.errors import TokenyardError

ResultT = TypeVar("ResultT")


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that never waits: when nothing is ready, its time is that of the next timer."""

    def __init__(self) -> None:
        super().__init__(_NoWait(self))
        self.now = 1000.0

    def time(self) -> float:
        return self.now


class _NoWait(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._virtual = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "everybody waits for everybody"
        self._virtual.now += max(0.0, timeout)
        return super().select(0)


def run(main: Callable[[Callable[[], float]], Coroutine[object, object, ResultT]]) -> ResultT:
    """Run what takes the clock."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.get_loop()
        return runner.run(main(loop.time))


def request(number: int = 0, output_len: int = 3) -> LoadRequest:
    return LoadRequest(str(number).encode(), 8, output_len, True)


def server(pauses: Sequence[Sequence[float]], usage: Callable[[int], Usage | None] | None = None) -> Send:
    """Answers request i with a chunk after each of its pauses, in seconds, and with its usage."""

    async def send(asked: LoadRequest) -> AsyncGenerator[Chunk, None]:
        number = int(asked.body)
        for place, pause in enumerate(pauses[number]):
            await asyncio.sleep(pause)
            is_last = place == len(pauses[number]) - 1
            yield Chunk(choices=[Choice(text="x", finish_reason="length" if is_last else None)])
        count = len(pauses[number])
        yield Chunk(usage=Usage(8, count) if usage is None else usage(number))

    return send


def play(
    pauses: Sequence[Sequence[float]],
    times: Sequence[float] | None = None,
    max_concurrency: int | None = None,
    usage: Callable[[int], Usage | None] | None = None,
) -> list[Record]:
    requests = [request(number, len(one)) for number, one in enumerate(pauses)]
    due = [0.0] * len(requests) if times is None else times
    return run(lambda clock: run_load(requests, due, max_concurrency, server(pauses, usage), clock))


@given(
    st.lists(st.lists(st.floats(0.001, 2.0), min_size=1, max_size=6), min_size=1, max_size=8),
    st.sampled_from([(50.0,), (1.0, 25.0, 99.9)]),
    st.data(),
)
@settings(max_examples=60, deadline=None)
def test_every_figure_equals_what_numpy_makes_of_the_known_times(
    pauses: list[list[float]], percentiles: tuple[float, ...], data: st.DataObject
) -> None:
    starts = sorted(data.draw(st.lists(st.floats(0, 3), min_size=len(pauses), max_size=len(pauses))))
    found = figures(play(pauses, starts), percentiles, {})
    known = {
        "ttft": [one[0] for one in pauses],
        "tpot": [sum(one[1:]) / (len(one) - 1) for one in pauses if len(one) > 1],
        "itl": [gap for one in pauses for gap in one[1:]],
        "e2el": [sum(one) for one in pauses],
    }
    for name, seconds in known.items():
        values = np.array(seconds) * 1000
        for figure, function in (("mean", np.mean), ("median", np.median), ("std", np.std), ("max", np.max)):
            expected = pytest.approx(function(values), abs=0.002) if seconds else None
            assert found[f"{figure}_{name}_ms"] == expected
        for share in percentiles:
            expected = pytest.approx(np.percentile(values, share, method="linear"), abs=0.002) if seconds else None
            assert found[f"p{share:g}_{name}_ms"] == expected
    duration = max(start + sum(one) for start, one in zip(starts, pauses, strict=True)) - starts[0]
    num_output = sum(map(len, pauses))
    assert found["duration"] == pytest.approx(duration, abs=2e-6)
    assert found["request_throughput"] == pytest.approx(len(pauses) / duration, abs=0.001)
    assert found["output_throughput"] == pytest.approx(num_output / duration, abs=0.001)
    assert found["total_token_throughput"] == pytest.approx((num_output + 8 * len(pauses)) / duration, abs=0.001)
    assert (found["completed"], found["failed"]) == (len(pauses), 0)


def test_one_token_has_no_tpot_but_counts_as_fast_in_goodput() -> None:
    records = play([[0.1], [0.1, 0.5]])
    found = figures(records, (), {"tpot": 0.4})
    assert found["mean_tpot_ms"] == pytest.approx(500)
    assert found["goodput_attainment"] == 0.5
    assert found["request_goodput"] == pytest.approx(1 / 0.6, abs=0.001)


@pytest.mark.parametrize(
    ("slos", "good"),
    [
        ({"ttft": 0.25}, 2),
        ({"ttft": 0.05}, 0),
        ({"e2el": 0.7}, 2),
        ({"ttft": 0.25, "e2el": 0.5}, 1),
        ({"tpot": 9.0}, 2),
    ],
)
def test_a_good_request_meets_every_slo_and_one_that_failed_meets_none(slos: dict[str, float], good: int) -> None:
    records = play([[0.1, 0.2], [0.2, 0.4], [0.1]])
    records[2].error = "refused"
    found = figures(records, (), slos)
    assert found["goodput_attainment"] == pytest.approx(good / 3, abs=1e-6)
    assert (found["completed"], found["failed"]) == (2, 1)


def test_an_answer_of_several_tokens_a_chunk_has_a_tpot_by_its_usage() -> None:
    found = figures(play([[0.1, 0.3, 0.3]], usage=lambda number: Usage(8, 13)), (), {})
    assert found["mean_tpot_ms"] == pytest.approx(50)
    assert found["mean_itl_ms"] == pytest.approx(300)
    assert found["total_output_tokens"] == 13


def test_an_open_loop_sends_at_its_times_whatever_comes_back() -> None:
    starts = [0.0, 0.1, 0.1, 0.7]
    records = play([[5.0]] * 4, starts)
    assert [record.sent - 1000 for record in records] == pytest.approx(starts)
    assert figures(records, (), {})["max_concurrent_requests"] == 4


def test_a_closed_loop_sends_the_next_when_one_has_ended() -> None:
    records = play([[1.0], [2.0], [0.5], [0.25]], max_concurrency=2)
    assert [record.sent - 1000 for record in records] == pytest.approx([0, 0, 1.0, 1.5])
    found = figures(records, (), {})
    assert found["max_concurrent_requests"] == 2
    assert found["mean_ttft_ms"] == pytest.approx((1000 + 2000 + 500 + 250) / 4)  # since it was sent, not since due


def test_a_failed_request_is_counted_and_its_times_are_not() -> None:
    async def send(asked: LoadRequest) -> AsyncGenerator[Chunk, None]:
        await asyncio.sleep(0.5)
        if asked.body == b"1":
            raise TokenyardError("503: busy")
        yield Chunk(choices=[Choice(text="x", finish_reason="stop")], usage=Usage(8, 1))

    requests = [request(number, 1) for number in range(3)]
    records = run(lambda clock: run_load(requests, [0.0, 1.0, 2.0], None, send, clock))
    found = figures(records, (), {})
    assert (found["completed"], found["failed"], found["total_input_tokens"]) == (2, 1, 16)
    assert errors(records) == {"503: busy": 1}


def told(*ids: int) -> Chunk:
    return Chunk(choices=[Choice(text="x", token_ids=list(ids), finish_reason="length")])


@pytest.mark.parametrize(
    ("chunks", "wrong"),
    [
        ([told(1, 2), told(3), Chunk(usage=Usage(8, 3))], set()),
        ([told(1, 2), Chunk(usage=Usage(8, 3))], {"num_wrong_deltas"}),
        ([told(1, 2), Chunk(usage=Usage(8, 2))], {"num_wrong_output_len"}),
        ([told(1, 2, 3), Chunk(usage=Usage(9, 3))], {"num_wrong_input_len"}),
        ([told(1, 2, 3)], {"num_without_usage", "num_wrong_output_len"}),
        ([Chunk(choices=[Choice(text="x")])] * 4 + [Chunk(usage=Usage(8, 3))], {"num_wrong_deltas"}),
    ],
)
def test_answers_that_contradict_themselves_are_counted(chunks: list[Chunk], wrong: set[str]) -> None:
    record = Record(request(), 0.0, 0.0)
    for chunk in chunks:
        record.take(chunk, 1.0)
    record.end(2.0)
    assert {name for name, count in wrong_counts([record], must_be_full=True).items() if count} == wrong


def test_an_answer_without_text_begins_with_its_end() -> None:
    record = Record(request(), 0.0, 1.0)
    record.take(Chunk(choices=[Choice(text="", finish_reason="stop")], usage=Usage(8, 1)), 3.0)
    record.end(4.0)
    assert figures([record], (), {})["mean_ttft_ms"] == 2000
    empty = Record(request(), 0.0, 1.0)
    empty.end(2.0)
    assert empty.error == "the answer had no choice"


# ---- Arrivals and prompts -------------------------------------------------------------------------------------------


@given(st.integers(1, 300), st.floats(0.1, 1000), st.sampled_from([0.01, 0.5, 1.0, 4.0, math.inf]), st.integers(0, 99))
@settings(max_examples=100, deadline=None)
def test_pauses_add_up_to_what_the_rate_says(count: int, rate: float, burstiness: float, seed: int) -> None:
    times = send_times(count, rate, burstiness, np.random.default_rng(seed))
    assert len(times) == count
    assert times[-1] == pytest.approx(count / rate)
    assert (np.diff(times) >= 0).all()
    assert times[0] >= 0
    if math.isinf(burstiness):
        assert np.diff(times) == pytest.approx(1 / rate)


def test_burstiness_is_the_shape_of_the_pauses() -> None:
    for burstiness in (0.25, 1.0, 4.0):
        pauses = np.diff(send_times(20_000, 10.0, burstiness, np.random.default_rng(1)))
        assert pauses.std() / pauses.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert send_times(5, math.inf, 1.0, np.random.default_rng(0)).tolist() == [0.0] * 5


@given(st.integers(1, 50), st.floats(0, 0.99), st.integers(0, 9), st.integers(2, 500), st.integers(0, 9))
@settings(max_examples=100, deadline=None)
def test_lengths_and_tokens_are_in_their_ranges_and_a_seed_repeats_them(
    length: int, ratio: float, prefix: int, vocab_size: int, seed: int
) -> None:
    bench = ServeBench(
        random_input_len=length, random_output_len=length, random_range_ratio=ratio, random_prefix_len=prefix
    )
    drawn = draw(bench, vocab_size, 20, np.random.default_rng(seed))
    assert drawn == draw(bench, vocab_size, 20, np.random.default_rng(seed))
    least, most = max(1, math.floor(length * (1 - ratio))), math.ceil(length * (1 + ratio))
    for one in drawn:
        assert least <= len(one.tokens) - prefix <= most
        assert least <= one.output_len <= most
        assert all(0 < token < vocab_size for token in one.tokens)
        assert one.tokens[:prefix] == drawn[0].tokens[:prefix]
    assert load_request(bench, "m", drawn[0], None).input_len == len(drawn[0].tokens)
