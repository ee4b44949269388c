"""A recorded run is made again to the bit, and what was changed in a trace is found where it was changed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenyard.catalogue import Catalogue
from tokenyard.config import NoOptions
from tokenyard.descriptors import PolicyDescriptor
from tokenyard.errors import ConfigError, UserError
from tokenyard.interfaces.policy import RequestView, SchedulerView, SchedulingPolicy
from tokenyard.plugins import load_catalogue
from tokenyard.replay.run import ReplayResult, replay
from tokenyard.testing import EngineHarness
from tokenyard.testing.parts import catalogue_with
from traced_runs import (
    HOST_MEMORY,
    SMALL,
    base_config,
    drive,
    harness,
    lines_of,
    sizes,
    traced,
    with_sizes,
    write_lines,
)

POLICIES = load_catalogue().names("policy")
MANAGERS = load_catalogue().names("kv_cache")
EVICTION_RULES = load_catalogue().names("eviction")
LOOPS = st.sampled_from(["sync", "overlap"])
WINDOWS = st.sampled_from([(None,), (None,), (None, 3), (2, None, 6)])


def recorded_and_replayed(
    overrides: Sequence[str], limits: Mapping[str, Mapping[str, object]], windows: tuple[int | None, ...], seed: int
) -> ReplayResult:
    """A run with these overrides, replayed; everything that it wrote is gone afterwards."""
    config = with_sizes(base_config(*overrides), limits)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        with harness(traced(config, path), windows) as engine:
            drive(engine, seed)
            num_steps = engine.stats.num_steps
        result = replay(path)
    assert result.num_steps == num_steps
    assert not result.notes
    return result


class TestIdentity:
    """What is decided depends on nothing that is not in the trace."""

    @pytest.mark.parametrize("policy", POLICIES)
    @settings(max_examples=4, deadline=None)
    @given(loop=LOOPS, limits=sizes(), windows=WINDOWS, seed=st.integers(0, 1000))
    def test_every_policy_decides_the_same_again(
        self,
        policy: str,
        loop: str,
        limits: Mapping[str, Mapping[str, object]],
        windows: tuple[int | None, ...],
        seed: int,
    ) -> None:
        result = recorded_and_replayed([f"scheduler={policy}", f"engine={loop}"], limits, windows, seed)
        assert result.difference is None

    @pytest.mark.parametrize(
        "choice",
        [
            *(f"kv_cache={name}" for name in MANAGERS),
            *(f"kv_cache.eviction={name}" for name in EVICTION_RULES),
            "scheduler.preempt_mode=pause",
            f"scheduler.preempt_mode=swap kv_cache.host_memory={HOST_MEMORY}",
            "engine.log_stats=false",
        ],
    )
    @settings(max_examples=5, deadline=None)
    @given(loop=LOOPS, limits=sizes(), seed=st.integers(0, 1000))
    def test_every_manager_eviction_rule_and_mode_does(
        self, choice: str, loop: str, limits: Mapping[str, Mapping[str, object]], seed: int
    ) -> None:
        result = recorded_and_replayed([*choice.split(), f"engine={loop}"], limits, (None,), seed)
        assert result.difference is None

    @settings(max_examples=10, deadline=None)
    @given(limits=sizes(), seed=st.integers(0, 1000))
    def test_tracing_changes_no_schedule(self, limits: Mapping[str, Mapping[str, object]], seed: int) -> None:
        config = with_sizes(base_config("scheduler=priority"), limits)
        with tempfile.TemporaryDirectory() as folder:
            files = Path(folder) / "trace.jsonl", Path(folder) / "chrome.json"
            with harness(traced(config, *files)) as engine:
                with_trace = drive(engine, seed)
                told = engine.stats
            with harness(config) as engine:
                assert drive(engine, seed) == with_trace
                assert engine.stats == told


def change(path: Path, is_it: Callable[[dict[str, Any]], bool], edit: Callable[[dict[str, Any]], None]) -> int | None:
    """Edit the first line of this kind in the second half; returns its step."""
    lines = lines_of(path)
    found = next(line for line in lines[len(lines) // 2 :] if is_it(line))
    edit(found)
    write_lines(path, lines)
    step: int | None = found.get("step")
    return step


def _is_step(line: Mapping[str, object], *keys: str) -> bool:
    return line["call"] == "schedule" and "step" in line and all(line.get(key) for key in keys)


PLANTED: Mapping[str, tuple[str, Callable[[dict[str, Any]], bool], Callable[[dict[str, Any]], None]]] = {
    "a hit": ("hits", lambda line: _is_step(line, "new"), lambda line: line["new"][0].__setitem__(3, 999)),
    "who enters": ("order", lambda line: _is_step(line, "new"), lambda line: line["new"][0].__setitem__(0, "another")),
    "who decodes": ("order", lambda line: _is_step(line, "decodes"), lambda line: line["decodes"].append("another")),
    "a chunk": ("budget", lambda line: _is_step(line, "chunks"), lambda line: line["chunks"][0].__setitem__(2, 999)),
    "a victim": (
        "preemption",
        lambda line: _is_step(line, "preempted"),
        lambda line: line["preempted"][0].__setitem__(0, "another"),
    ),
    "a mode": (
        "preemption",
        lambda line: _is_step(line, "preempted"),
        lambda line: line["preempted"][0].__setitem__(1, "swap"),
    ),
    "blocks": ("kv", lambda line: _is_step(line, "new"), lambda line: line["new"][0][4][0].append(1)),
    "the K/V hash": ("kv", _is_step, lambda line: line.update(kv="0" * 16)),
    "free blocks": ("kv", _is_step, lambda line: line.update(num_free_blocks=999)),
    "a reason": (
        "waits",
        lambda line: _is_step(line) and line["waits"].get("by_reason"),
        lambda line: line["waits"].update(by_reason={"new": 999}),
    ),
    "a bit": ("bits", _is_step, lambda line: line.update(hash="0" * 16)),
    "the end of a request": (
        "ends",
        lambda line: line["call"] == "update_from_output" and bool(line.get("ended")),
        lambda line: line["ended"][0].__setitem__(1, "error"),
    ),
    "tokens that were given": (
        "ends",
        lambda line: line["call"] == "update_from_output",
        lambda line: line.update(num_kept=999),
    ),
}


class TestDifferences:
    def test_a_trace_that_was_not_changed_is_identical(self, trace: Path) -> None:
        result = replay(trace)
        assert result.difference is None
        assert result.num_steps > 30

    @pytest.mark.parametrize("planted", PLANTED)
    def test_what_was_changed_is_found_in_its_step(self, trace: Path, planted: str) -> None:
        kind, is_it, edit = PLANTED[planted]
        step = change(trace, is_it, edit)
        difference = replay(trace).difference
        assert difference is not None
        assert (difference.kind, difference.step) == (kind, step)

    def test_another_content_of_the_cache_is_found_at_the_end(self, trace: Path) -> None:
        lines = lines_of(trace)
        assert lines[-1]["call"] == "end"
        lines[-1]["cache"] = "0" * 16
        write_lines(trace, lines)
        difference = replay(trace).difference
        assert difference is not None
        assert (difference.kind, difference.record) == ("kv", len(lines) - 1)

    def test_another_sampled_token_shows_in_what_is_told(self, trace: Path) -> None:
        def edit(line: dict[str, Any]) -> None:
            line["sampled"]["tokens"][0] += 1

        step = change(trace, lambda line: line["call"] == "update_from_output" and line["sampled"]["tokens"], edit)
        difference = replay(trace).difference
        assert difference is not None
        assert difference.step == step

    def test_a_request_that_is_left_out_is_missed(self, trace: Path) -> None:
        lines = lines_of(trace)
        last = max(number for number, line in enumerate(lines) if line["call"] == "add_request")
        write_lines(trace, lines[:last] + lines[last + 1 :])
        assert replay(trace).difference is not None

    def test_a_step_that_is_left_out_breaks_the_trace(self, trace: Path) -> None:
        lines = lines_of(trace)
        first = next(number for number, line in enumerate(lines) if line["call"] == "schedule")
        write_lines(trace, lines[:first] + lines[first + 1 :])
        with pytest.raises(UserError, match=r"line \d+: the trace takes in step 0, which it did not schedule"):
            replay(trace)


class TestOverrides:
    def test_another_policy_is_followed_up_to_its_first_other_decision(self, trace: Path) -> None:
        result = replay(trace, ["scheduler=fcfs"])
        assert result.difference is not None
        assert result.difference.kind in ("order", "preemption", "hits", "budget")

    def test_the_same_policy_decides_the_same(self, trace: Path) -> None:
        assert replay(trace, ["scheduler=priority"]).difference is None

    def test_other_limits_are_what_ifs_too(self, trace: Path) -> None:
        result = replay(trace, ["scheduler.max_num_seqs=2"])
        assert result.difference is not None
        assert replay(trace, ["kv_cache.num_blocks=12"]).difference is None

    def test_options_of_the_recorded_policy_can_be_changed(self, tmp_path: Path) -> None:
        path = tmp_path / "trace.jsonl"
        limits = {"scheduler": {"max_num_seqs": 1}, "kv_cache": {}}
        with harness(traced(with_sizes(base_config("scheduler=priority"), limits), path)) as engine:
            engine.add([1], "a-first", max_tokens=2)
            engine.add([1], "b-calm", max_tokens=2)
            engine.step()
            engine.add([1], "c-urgent", priority=-1, max_tokens=2)
            engine.run()
        assert replay(path, ["scheduler.policy.ageing_seconds=100"]).difference is None
        difference = replay(path, ["scheduler.policy.ageing_seconds=0.001"]).difference
        assert difference is not None
        assert (difference.kind, difference.left, difference.right) == ("order", "c-urgent", "b-calm")

    def test_a_shadow_can_look_at_a_recorded_run(self, trace: Path) -> None:
        result = replay(trace, ["scheduler.shadow=fcfs"])
        assert result.difference is None
        assert result.shadow is not None
        assert sum(point.num_otherwise for point in result.shadow.points)

    def test_swapping_needs_host_memory_in_the_trace(self, trace: Path) -> None:
        with pytest.raises(ConfigError, match=r"preempt_mode=swap needs kv_cache\.host_memory, and the trace"):
            replay(trace, ["scheduler.preempt_mode=swap"])

    @pytest.mark.parametrize("override", ["model.name=x", "engine=overlap", "kv_cache.memory=1GiB", "trace.path=x"])
    def test_what_a_replay_has_not_cannot_be_changed(self, trace: Path, override: str) -> None:
        with pytest.raises(UserError, match=override.partition("=")[0]):
            replay(trace, [override])


class Level(Enum):
    """How much a client pays."""

    LOW = 2
    HIGH = 1


@dataclass(frozen=True)
class Told:
    """What the policy below is told of a request."""

    level: Level = Level.LOW


class ByLevel(SchedulingPolicy):
    """Orders by what it was told, which it needs in its own type."""

    def waiting_key(self, request: RequestView, view: SchedulerView) -> object:
        level = request.metadata["level"]
        assert isinstance(level, Level)
        return level.value


class Careless(SchedulingPolicy):
    """Uses randomness that nobody seeded."""

    def waiting_key(self, request: RequestView, view: SchedulerView) -> object:
        return os.urandom(8)


def installed(policy: type[SchedulingPolicy], metadata_type: type = NoOptions) -> Catalogue:
    return catalogue_with(
        PolicyDescriptor(
            name="fcfs",
            api_version=(1, 7),
            summary="",
            factory=lambda options, context: policy(),
            metadata_type=metadata_type,
        )
    )


class TestPolicies:
    def test_what_a_policy_was_told_of_a_request_comes_back_in_its_type(self, tmp_path: Path) -> None:
        path, catalogue = tmp_path / "trace.jsonl", installed(ByLevel, Told)
        with harness(traced(with_sizes(base_config(), SMALL), path), catalogue=catalogue) as engine:
            for number in range(8):
                engine.add([1, 2, 3], max_tokens=2, metadata={"level": Level.HIGH if number % 2 else Level.LOW})
            engine.run()
        assert replay(path, catalogue=catalogue).difference is None

    def test_randomness_that_is_not_the_engines_is_found(self, tmp_path: Path) -> None:
        path, catalogue = tmp_path / "trace.jsonl", installed(Careless)
        with harness(traced(with_sizes(base_config(), SMALL), path), catalogue=catalogue) as engine:
            for _ in range(12):
                engine.add([1, 2, 3], max_tokens=2)
            engine.run()
        difference = replay(path, catalogue=catalogue).difference
        assert difference is not None
        assert difference.kind == "order"


class FailsAtThird(SchedulingPolicy):
    """Fails when the third request comes."""

    def __init__(self) -> None:
        self._count = 0

    def waiting_key(self, request: RequestView, view: SchedulerView) -> object:
        self._count += 1
        if self._count == 3:
            raise ValueError("three is too many")
        return (view.rng.random(), view.now)


class FailsInAStep(SchedulingPolicy):
    """Fails when it is asked in the second step."""

    def __init__(self) -> None:
        self._count = 0

    def token_budget(self, view: SchedulerView) -> int | None:
        self._count += 1
        if self._count == 2:
            raise ValueError("no budget")
        return 4


@pytest.fixture(params=[FailsAtThird, FailsInAStep])
def failing(request: pytest.FixtureRequest) -> type[SchedulingPolicy]:
    policy: type[SchedulingPolicy] = request.param
    return policy


class TestErrors:
    def test_what_a_policy_raised_is_raised_again(self, tmp_path: Path, failing: type[SchedulingPolicy]) -> None:
        catalogue = installed(failing)
        path = tmp_path / "trace.jsonl"
        engine = EngineHarness(config=traced(with_sizes(base_config(), SMALL), path), catalogue=catalogue, checks=False)
        with pytest.raises(Exception, match=r"three is too many|no budget"):  # noqa: PT012 - of the engine's death
            for _ in range(4):
                engine.add([1, 2, 3, 4, 5], max_tokens=3)
            engine.run()
        engine.core.shutdown()
        assert any("error" in line for line in lines_of(path)[1:])
        assert replay(path, catalogue=catalogue).difference is None
