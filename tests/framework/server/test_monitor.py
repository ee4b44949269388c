"""What the server's monitor makes of an engine's steps."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenyard import PolicyDescriptor, SamplingParams
from tokenyard.engine.input_processor import TokenizedPrompt
from tokenyard.engine.open_requests import OpenRequest
from tokenyard.engine.output_processor import OutputProcessor
from tokenyard.engine.request_listener import GuardedListener
from tokenyard.engine_outputs import (
    AdmittedRequest,
    EngineCoreOutputs,
    FinishedRequest,
    PluginStats,
    PluginTime,
    RequestEvent,
    RequestEventKind,
    SchedulerStats,
)
from tokenyard.errors import CapacityError, EngineDeadError, ValidationError
from tokenyard.interfaces import AdmitDecision, RequestView, SchedulerView, SchedulingPolicy
from tokenyard.request import FinishReason
from tokenyard.server.monitor import Monitor
from tokenyard.server.timeline import MAX_EVENTS, Timeline, Timelines
from tokenyard.server.totals import EngineCounters, Totals
from tokenyard.server.waits import WaitClock
from tokenyard.testing import catalogue_with
from watched_engine import TOKENIZER, WatchedEngine, names_of

SMALL = ("kv_cache.block_size=4", "kv_cache.enable_prefix_caching=false")


class Night(SchedulingPolicy):
    """Holds everybody back until 110 s."""

    def admit(self, request: RequestView, view: SchedulerView) -> AdmitDecision:
        return AdmitDecision.accept() if view.now >= 110.0 else AdmitDecision.defer("it is night")

    def wake_at(self, view: SchedulerView) -> float | None:
        return 110.0


NIGHT = catalogue_with(PolicyDescriptor(name="night", api_version=(1, 7), factory=lambda options, context: Night()))


def test_a_request_is_followed_from_its_arrival_to_its_end() -> None:
    engine = WatchedEngine(*SMALL, "scheduler.max_num_batched_tokens=8", "scheduler.max_num_seqs=8")
    engine.add("a", 20, max_tokens=3)
    engine.run()
    assert engine.events("a") == [
        (0, "queued"),
        (0, "scheduled"),
        (0, "chunk"),
        (1, "chunk"),
        (2, "chunk"),
        (3, "first_token"),
        (5, "end"),
    ]
    totals = engine.monitor.snapshot().totals
    assert (totals.prompt_tokens, totals.computed_prompt_tokens, totals.generation_tokens) == (20, 20, 3)
    for histogram, seconds in (
        (totals.queue_seconds, 0),
        (totals.first_token_seconds, 3),
        (totals.prefill_seconds, 3),
        (totals.decode_seconds, 2),
        (totals.inference_seconds, 5),
        (totals.seconds_per_output_token, 1),
        (totals.request_seconds, 5),
    ):
        assert (sum(histogram.counts), histogram.total) == (1, seconds)
    assert (sum(totals.inter_token_seconds.counts), totals.inter_token_seconds.total) == (2, 2)


def test_who_runs_and_who_waits_for_what_is_known_at_every_step() -> None:
    engine = WatchedEngine(*SMALL, "scheduler.max_num_seqs=2")
    for name in "abcde":
        engine.add(name, 4, max_tokens=3)
    assert engine.monitor.snapshot().gauges.waiting_by_reason == {"new": 5}
    engine.step()
    gauges = engine.monitor.snapshot().gauges
    assert (gauges.num_running, gauges.num_waiting, gauges.waiting_by_reason) == (2, 3, {"max_num_seqs": 3})
    assert gauges.kv_cache_usage > 0
    engine.abort("c")
    assert engine.monitor.snapshot().gauges.num_waiting == 2
    engine.run()
    gauges = engine.monitor.snapshot().gauges
    assert (gauges.num_running, gauges.num_waiting, gauges.kv_cache_usage) == (0, 0, 0)
    assert engine.timeline("c").waited == {"new": pytest.approx(1)}
    assert engine.timeline("e").waited == {"new": pytest.approx(1), "max_num_seqs": pytest.approx(2)}
    totals = engine.monitor.snapshot().totals
    assert totals.queue_seconds.total == 3 + 3


def test_what_the_policy_holds_back_waits_for_that_and_says_so_in_its_words() -> None:
    engine = WatchedEngine(*SMALL, "scheduler=night", catalogue=NIGHT)
    engine.add("a", 4, max_tokens=2)
    engine.step()
    gauges = engine.monitor.snapshot().gauges
    assert (gauges.num_running, gauges.num_deferred, gauges.waiting_by_reason) == (0, 1, {"deferred": 1})
    engine.run()
    timeline = engine.timeline("a")
    assert [event.reason for event in timeline.events if event.event == "deferred"] == ["it is night"]
    assert timeline.waited == {"deferred": pytest.approx(10)}


@pytest.mark.parametrize("loop", ["sync", "overlap"])
def test_times_of_waiting_add_up_to_the_time_waited(loop: str) -> None:
    """Preemptions, resumptions and all: seconds by reason, of every request."""
    engine = WatchedEngine(*SMALL, "kv_cache.num_blocks=6", "model.max_model_len=24", f"engine={loop}")
    for number in range(4):
        engine.add(str(number), 6, first=30 * number, max_tokens=12)
    while engine.harness.has_requests:
        outputs, _ = engine.step()
        gauges = engine.monitor.snapshot().gauges
        assert outputs.stats is not None
        if loop == "sync":  # else the next step was scheduled already when this one was told
            assert gauges.num_running == outputs.stats.num_running
            assert gauges.num_waiting == outputs.stats.num_waiting
    assert (gauges.num_running, gauges.num_waiting) == (0, 0)
    timelines = [engine.timeline(str(number)) for number in range(4)]
    assert sum(timeline.num_preemptions for timeline in timelines) == engine.harness.stats.num_preemptions > 0
    for timeline in timelines:
        events = sorted(timeline.events, key=lambda event: event.seconds)
        waited, since = 0.0, None
        for event in events:
            if event.event in ("queued", "preempted"):
                since = event.seconds
            elif event.event in ("scheduled", "resumed") and since is not None:
                waited, since = waited + event.seconds - since, None
        assert sum(timeline.waited.values()) == pytest.approx(waited)
        assert {event.reason for event in events if event.event == "preempted"} <= {"kv_blocks"}


@given(
    st.lists(st.tuples(st.floats(0.01, 5), st.sampled_from(["kv_blocks", "max_num_seqs", None])), max_size=12),
    st.floats(0, 3),
    st.floats(0, 1),
)
def test_seconds_by_reason_add_up_however_late_the_reasons_are_told(
    told: Sequence[tuple[float, str | None]], begins_at: float, share: float
) -> None:
    clock, now = WaitClock(), 0.0
    clock.set_reason(None, now)
    began = clock.begin(begins_at)
    for seconds, reason in told:
        now += seconds
        clock.set_reason(reason, now)
    length = max(0.0, now - begins_at) * share  # it was scheduled when the last step began, not when that was told
    found = clock.seconds(began, length, now)
    assert sum(found.values()) == pytest.approx(length, abs=1e-9)
    assert all(seconds > 0 for seconds in found.values())


def test_the_queue_ends_with_the_last_start_before_the_first_token() -> None:
    """Interval semantics of vLLM: queue = QUEUED to latest SCHEDULED, prefill from there to the first token."""
    engine = WatchedEngine(*SMALL, "scheduler.max_num_seqs=1")
    engine.add("a", 4, max_tokens=4)
    engine.add("b", 4, max_tokens=1)
    engine.run()
    totals = engine.monitor.snapshot().totals
    assert totals.queue_seconds.total == 4
    assert totals.prefill_seconds.total == 2


def test_choices_of_a_prompt_count_apart_and_the_prompt_once() -> None:
    engine = WatchedEngine(*SMALL)
    engine.add("a", 10, n=3, max_tokens=5)
    engine.run()
    totals = engine.monitor.snapshot().totals
    assert (totals.prompt_tokens, totals.generation_tokens, totals.success) == (10, 15, {"length": 3})
    assert (sum(totals.request_seconds.counts), sum(totals.generation_tokens_of_choice.counts)) == (1, 3)
    assert (totals.n.total, totals.longest_choice.total, totals.max_tokens.total) == (3, 5, 5)
    assert names_of(engine.events("a")).count("end") == 3


def test_s22_tokens_behind_a_stop_string_count_for_nobody() -> None:
    """Under `overlap` a step with one more token is in flight when it is seen."""
    engine = WatchedEngine(*SMALL, "engine=overlap")
    engine.add("a", 4, max_tokens=50)
    engine.run()
    text = engine.outputs.pop("a").outputs[0].text
    stopped = WatchedEngine(*SMALL, "engine=overlap")
    stopped.add("a", 4, max_tokens=50, stop=text[7:9])
    stopped.run()
    totals = stopped.monitor.snapshot().totals
    taken = stopped.outputs.pop("a").outputs[0]
    assert len(taken.token_ids) < 50
    assert totals.generation_tokens == len(taken.token_ids) == totals.generation_tokens_of_choice.total
    assert totals.success == {"stop": 1}
    assert stopped.timeline("a").events[-1].reason == "stop (string)"


def test_aborted_lost_and_refused_requests_are_counted_once_each() -> None:
    engine = WatchedEngine(*SMALL, "scheduler.max_num_seqs=2")
    for name in "abcdef":
        engine.add(name, 4, max_tokens=30)
    engine.step()
    engine.abort("a", "e")
    engine.abort("a")
    engine.outputs.forget(["b"])  # its consumer left
    engine.outputs.lose(["c"], EngineDeadError("gone"))
    engine.outputs.lose(["d"], ValidationError("bad", parameter="x", value=1))
    engine.outputs.lose(["f"], CapacityError("too long"))
    engine.outputs.forget(list("abcdef"))
    snapshot = engine.monitor.snapshot()
    assert snapshot.totals.success == {"abort": 3, "error": 1}
    assert snapshot.totals.rejections == {"invalid": 1, "capacity": 1}
    assert (snapshot.gauges.num_running, snapshot.gauges.num_waiting) == (0, 0)
    assert [engine.timeline(name).is_ended for name in "abcdef"] == [True] * 6
    assert engine.timeline("d").error == "refused: ValidationError"


def test_s23_an_engine_without_stats_leaves_the_servers_own_counts() -> None:
    engine = WatchedEngine(*SMALL, "engine.log_stats=false", "scheduler.max_num_seqs=1")
    engine.add("a", 4, max_tokens=3)
    engine.add("b", 4, max_tokens=3)
    engine.step()
    snapshot = engine.monitor.snapshot()
    assert not snapshot.has_stats
    assert (snapshot.gauges.num_running, snapshot.gauges.waiting_by_reason) == (1, {"new": 1})
    engine.run()
    assert engine.monitor.snapshot().totals.generation_tokens == 6


NAMES = [*"ab"]
CHILDREN = [*NAMES, *(f"{index}_{name}" for index in range(2) for name in NAMES)]
EVENTS = st.builds(
    RequestEvent,
    request_id=st.sampled_from(CHILDREN),
    kind=st.sampled_from(RequestEventKind),
    at=st.floats(90, 110),
    reason=st.just("kv_blocks"),
)
ADMISSIONS = st.builds(
    AdmittedRequest,
    request_id=st.sampled_from(CHILDREN),
    num_cached_tokens=st.just(0),
    scheduled_at=st.floats(90, 110),
)
ENDS = st.builds(FinishedRequest, request_id=st.sampled_from(CHILDREN), reason=st.sampled_from(FinishReason))
SOME = st.lists(st.sampled_from(NAMES), max_size=3, unique=True)
ACTIONS = st.one_of(
    st.tuples(st.just("add"), st.tuples(st.sampled_from(NAMES), st.booleans())),
    st.tuples(st.sampled_from(["abort", "forget", "refuse", "die"]), SOME),
    st.tuples(
        st.just("step"),
        st.tuples(
            st.lists(ADMISSIONS, max_size=4),
            st.lists(EVENTS, max_size=4),
            st.lists(st.sampled_from(CHILDREN), max_size=4, unique=True),
            st.lists(ENDS, max_size=3, unique_by=lambda end: end.request_id),
        ),
    ),
    st.tuples(st.just("begin_engine"), st.none()),
)


class Interleaved:
    """A front end and its monitor, told in any order what can be told: also of requests that are gone, or never were.

    At `begin_engine` the front end of another engine takes over whose requests have the same ids; the listener of the
    first may have been switched off before, so that it was told of no end.
    """

    def __init__(self) -> None:
        self.monitor = Monitor(4, now=lambda: 100.0)
        self.begin_engine()

    def begin_engine(self, given: None = None) -> None:
        self.monitor.begin_engine(1000)
        self.outputs = OutputProcessor(TOKENIZER)
        self.outputs.listener = GuardedListener(self.monitor)
        self.held: set[str] = set()

    def add(self, given: tuple[str, bool]) -> None:
        name, is_fanned = given
        if name not in self.held:
            self.held.add(name)
            children = [f"0_{name}", f"1_{name}"] if is_fanned else [name]
            params = SamplingParams(n=len(children), stop="zz")
            self.outputs.add(name, TokenizedPrompt(None, [1, 2]), params, 95.0, children)

    def abort(self, names: Sequence[str]) -> None:
        self.outputs.abort(names, 100.0)

    def forget(self, names: Sequence[str]) -> None:
        self.outputs.forget(names)
        self.held -= set(names)

    def refuse(self, names: Sequence[str]) -> None:
        self.outputs.lose(names, CapacityError("no"))

    def die(self, names: Sequence[str]) -> None:
        self.outputs.lose(names, EngineDeadError("gone"))

    def step(
        self,
        given: tuple[Sequence[AdmittedRequest], Sequence[RequestEvent], Sequence[str], Sequence[FinishedRequest]],
    ) -> None:
        admitted, events, with_tokens, ends = given
        ones = np.ones(len(with_tokens), dtype=np.int32)
        outputs = EngineCoreOutputs(
            request_ids=with_tokens,
            num_tokens=ones,
            token_ids=ones * ord("z"),
            admitted=admitted,
            events=events,
            finished=ends,
        )
        self.outputs.process(outputs, 100.0)


@settings(max_examples=300)
@given(st.lists(ACTIONS, max_size=30))
def test_whoever_runs_or_waits_is_counted_once_in_whatever_order_things_are_told(
    actions: Sequence[tuple[str, Any]],
) -> None:
    one = Interleaved()
    for name, details in actions:
        getattr(one, name)(details)
        gauges = one.monitor.snapshot().gauges
        assert gauges.num_running + gauges.num_waiting == one.outputs.num_unfinished
        assert gauges.num_running >= 0
        assert 0 <= gauges.num_deferred <= gauges.num_waiting
        assert sum(gauges.waiting_by_reason.values()) == gauges.num_waiting
    one.forget(NAMES)
    gauges = one.monitor.snapshot().gauges
    assert (gauges.num_running, gauges.num_waiting, gauges.num_deferred) == (0, 0, 0)


@given(st.permutations(range(4)))
def test_who_is_preempted_in_flight_waits_whichever_is_told_first(order: Sequence[int]) -> None:
    """A preemption is told at once and a start when its step has landed; the clocks of two processes tell no order."""
    one = Interleaved()
    one.add(("a", False))
    told = [
        AdmittedRequest(request_id="a", num_cached_tokens=0, scheduled_at=100.0),
        RequestEvent(request_id="a", kind=RequestEventKind.RESUMED, at=100.0),
        *(RequestEvent(request_id="a", kind=RequestEventKind.PREEMPTED, at=99.0) for _ in range(2)),
    ]
    for index in order:
        event = told[index]
        one.step(([event], [], [], []) if isinstance(event, AdmittedRequest) else ([], [event], [], []))
    gauges = one.monitor.snapshot().gauges
    assert (gauges.num_running, gauges.num_waiting) == (0, 1)


def test_prompts_of_one_request_are_numbered_without_looking_at_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of prompts arrive under the lock of the client."""

    def find(timelines: Timelines, request_id: str) -> list[Timeline]:
        raise AssertionError("it looks at each of them")

    engine = WatchedEngine(*SMALL, timeline_size=3)
    with monkeypatch.context() as patched:
        patched.setattr(Timelines, "find", find)
        for number in range(5):
            engine.outputs.add(
                str(number), TokenizedPrompt(None, [1]), SamplingParams(), 100.0, [str(number)], label="x"
            )
    assert [timeline.number for timeline in engine.monitor.timelines("x")] == [2, 3, 4]


def _stats(num_steps: int, hits: int, rejected: int) -> SchedulerStats:
    return SchedulerStats(
        num_running=0,
        num_waiting=0,
        num_steps=num_steps,
        num_preemptions=0,
        num_prompt_tokens=0,
        num_generation_tokens=0,
        prefix_cache_queries=2 * hits,
        prefix_cache_hits=hits,
        num_free_blocks=1,
        num_total_blocks=1,
        num_rejected_by_reason={"policy": rejected} if rejected else {},
        plugins=PluginStats(
            times=(PluginTime("policy", "p", "admit", hits / 2, hits),) if hits else (),
            step_seconds=float(hits),
            num_over_budget=hits,
        ),
    )


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), min_size=1, max_size=4))
def test_an_engine_that_was_started_again_makes_no_counter_go_down(engines: Sequence[Sequence[int]]) -> None:
    totals, counters, expected = Totals((1.0,)), EngineCounters(), 0
    for grown in engines:
        counters.restart()
        hits = 0
        for number, more in enumerate(grown):
            hits, expected = hits + more, expected + more
            counters.add(_stats(number + 1, hits, hits), totals)
            assert totals.engine.prefix_cache_hits == expected
            assert totals.rejections.get("policy", 0) == expected
            assert totals.plugin_calls.get(("policy", "p", "admit"), 0) == expected
            assert totals.plugin_seconds.get(("policy", "p", "admit"), 0) == expected / 2
            assert totals.engine.step_seconds == totals.engine.num_over_budget == expected
    assert totals.engine.num_steps == sum(map(len, engines))


def test_a_listener_that_fails_is_switched_off_and_reaches_no_step(caplog: pytest.LogCaptureFixture) -> None:
    """2.3 #24."""

    class Broken(Monitor):
        def stepped(self, outputs: EngineCoreOutputs, num_new_tokens: int, now: float) -> None:
            raise RuntimeError("the sink is broken")

        def ended(self, request: OpenRequest, now: float | None) -> None:
            raise AssertionError("it was switched off")

    engine = WatchedEngine(*SMALL, listener=Broken(10))
    engine.add("a", 4, max_tokens=5)
    with caplog.at_level(logging.WARNING):
        engine.run()
    assert len(engine.outputs.pop("a").outputs[0].token_ids) == 5
    assert [record.message for record in caplog.records] == ["Broken failed and is switched off"]


def _timeline(name: str, num_events: int = 0) -> Timeline:
    made = Timeline(
        request_id=name,
        client_label="shared",
        number=0,
        num_prompt_tokens=1,
        n=1,
        max_tokens=1,
        arrived_at=0.0,
    )
    for _ in range(num_events):
        made.add(0.0, "chunk", 0)
    return made


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=60), st.integers(0, 8))
def test_the_ring_holds_no_more_than_it_may_and_forgets_names_with_requests(
    requests: Sequence[tuple[int, bool]], size: int
) -> None:
    """D23: bounded, whatever clients call their requests."""
    ring = Timelines(size, max_bytes=20_000)
    for number, (num_events, ends) in enumerate(requests):
        timeline = _timeline(str(number), num_events)
        ring.add(timeline)
        if ends:
            timeline.finish_reasons = ["stop"]
            ring.ended(timeline)
        assert len(ring) <= size
        assert sum(one.num_bytes() for one in ring if one.is_ended) <= 20_000
        assert len(ring.find("shared")) == len(ring)
        kept = {one.request_id for one in ring}
        assert set(ring._by_id) == (kept | {"shared"} if kept else set())  # names go with their requests
        assert [one.request_id for one in ring] == [one.request_id for one in reversed(ring.find("shared"))]
    for number in range(len(requests) - len(ring)):
        assert ring.find(str(number)) == []


def test_a_request_with_very_many_events_keeps_the_first_ones_and_its_end() -> None:
    made = _timeline("a", MAX_EVENTS + 50)
    made.add(1.0, "end", 0)
    assert (len(made.events), made.num_left_out, made.events[-1].event) == (MAX_EVENTS + 1, 50, "end")
