"""Windows that take clients in turn, and what a policy sees of clients and prefills."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenyard import PolicyDescriptor
from tokenyard.interfaces import RequestView, SchedulerView, SchedulingPolicy, StepOutcome
from tokenyard.scheduler.client_lines import ClientLines, Rank
from tokenyard.testing import EngineHarness, catalogue_with

if TYPE_CHECKING:
    from tokenyard.config import NoOptions
    from tokenyard.interfaces import PolicyContext
    from tokenyard.scheduler.request_state import Request


@dataclass(frozen=True)
class Waiting:
    request_id: str
    client_id: str | None


Line = list[tuple[Rank, Waiting]]


def in_turn(line: Line, limit: int, passed: set[str]) -> list[str]:
    """What `ClientLines.in_turn` is to return, the long way."""
    lines: dict[str | None, list[tuple[Rank, Waiting]]] = {}
    for rank, request in sorted(line, key=lambda entry: entry[0]):
        lines.setdefault(request.client_id, []).append((rank, request))
    left = [[one.request_id for _, one in own if one.request_id not in passed] for own in lines.values()]
    rounds = [own[place] for place in range(len(line)) for own in left if place < len(own)]
    return rounds[:limit]


@settings(max_examples=200, deadline=None)
@given(
    moves=st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["a", "b", None]), st.booleans()), max_size=30),
    limit=st.integers(1, 8),
    num_passed=st.integers(0, 4),
)
def test_clients_take_turns_in_the_order_of_their_first_requests(
    moves: list[tuple[int, str | None, bool]], limit: int, num_passed: int
) -> None:
    lines, model = ClientLines(), cast("Line", [])
    for number, (key, client, leaves) in enumerate(moves):
        if leaves and model:
            rank, gone = model.pop(key % len(model))
            lines.remove(rank, gone.client_id)
            continue
        entry: tuple[Rank, Waiting] = ((1, key, 0.0, f"{number:02}"), Waiting(f"{number:02}", client))
        model.append(entry)
        lines.insert(entry[0], cast("Request", entry[1]))
        passed = {one.request_id for _, one in model[:num_passed]}
        assert [one.request_id for one in lines.in_turn(limit, passed)] == in_turn(model, limit, passed)


class Probe(SchedulingPolicy):
    """Notes the windows that it is given, and what the view says at that moment."""

    window_by_client = True
    waiting_window = 4

    def __init__(self, names_nobody: bool = False) -> None:
        self.windows: list[list[str]] = []
        self.clients: list[dict[str | None, int]] = []
        self.prefills: list[list[str]] = []
        self.names_nobody = names_nobody

    def waiting_order(self, window: Sequence[RequestView], view: SchedulerView) -> Sequence[RequestView]:
        self.windows.append([one.request_id for one in window])
        self.clients.append(dict(view.num_waiting_by_client))
        return () if self.names_nobody and view.num_running else window

    def on_step(self, outcomes: Sequence[StepOutcome], view: SchedulerView) -> None:
        self.prefills.append([one.request_id for one in view.prefills])


def harness(probe: Probe, *overrides: str) -> EngineHarness:
    def make(options: NoOptions, context: PolicyContext) -> SchedulingPolicy:
        return probe

    descriptor = PolicyDescriptor(name="probe", api_version=(1, 7), factory=make)
    return EngineHarness(["scheduler=probe", *overrides], catalogue=catalogue_with(descriptor))


def test_one_clients_many_requests_do_not_hide_another_clients() -> None:
    probe = Probe()
    with harness(probe, "scheduler.max_num_seqs=1") as engine:
        for number in range(20):
            engine.add(range(8), f"flood{number}", client="flood", max_tokens=1)
        engine.add(range(8), "late", client="other", max_tokens=1)
        engine.add(range(8), "nobody's", max_tokens=1)
        engine.step()
        assert probe.windows == [["flood0", "late", "nobody's", "flood1"]]
        assert probe.clients == [{"flood": 20, "other": 1, None: 1}]
        engine.run()


def test_a_step_that_takes_in_more_than_a_window_goes_on_with_the_next() -> None:
    probe = Probe()
    with harness(probe) as engine:
        for number in range(6):
            engine.add(range(8), f"a{number}", client="a", max_tokens=1)
        engine.add(range(8), "b0", client="b", max_tokens=1)
        engine.step()
        assert probe.windows == [["a0", "b0", "a1", "a2"], ["a3", "a4", "a5"]]
        assert len(engine.scheduled) == 7


def test_whoever_is_left_out_is_not_offered_again_in_the_step() -> None:
    probe = Probe(names_nobody=True)
    with harness(probe) as engine:
        engine.add(range(8), "first", client="a", max_tokens=2)
        engine.step()
        for number in range(5):
            engine.add(range(8), f"a{number}", client="a", max_tokens=1)
        engine.add(range(8), "b0", client="b", max_tokens=1)
        probe.windows.clear()
        engine.step()
        assert probe.windows == [["a0", "b0", "a1", "a2"], ["a3", "a4"]]
        probe.names_nobody = False
        engine.run()


def test_clients_are_counted_while_they_have_somebody_in_line() -> None:
    probe = Probe()
    with harness(probe, "scheduler.max_num_seqs=2", "kv_cache.num_blocks=4", "kv_cache.block_size=4") as engine:
        engine.add(range(7), "one", client="a", max_tokens=5)
        engine.add(range(10, 17), "two", client="b", max_tokens=5)
        engine.step()
        assert probe.clients == [{"a": 1, "b": 1}]
        engine.step()
        engine.step()  # both need a third block: the later one gives up its own, and is in line again
        assert engine.request("two").num_preemptions == 1
        engine.add(range(20, 22), "three", client="a", max_tokens=1)
        engine.run()
        assert {"b": 1, "a": 1} in probe.clients
        engine.check_idle()


@pytest.mark.parametrize("loop", ["sync", "overlap"])
def test_prefills_are_those_whose_next_step_is_no_decode(loop: str) -> None:
    probe = Probe()
    overrides = ("scheduler.max_num_seqs=4", "scheduler.max_num_batched_tokens=8", f"engine={loop}")
    with harness(probe, *overrides) as engine:
        engine.add(range(4), "a short one", max_tokens=8)
        engine.add(range(10, 30), "long", max_tokens=8)
        engine.run()
    # By what has landed: 4 tokens of "long" beside the short prompt, then 7, 7 and 2 beside its decodes.
    assert probe.prefills[:4] == [["long"], ["long"], ["long"], []]
    assert not any(probe.prefills[4:])
