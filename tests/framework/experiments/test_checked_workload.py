"""What a workload or a latency model does wrong is one clear error that names it, and never a wrong result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from planned_workloads import FollowUps, PlannedWorkload, planned, request, simulated
from tokenyard import ComponentDescriptor
from tokenyard.errors import PluginError, UserError
from tokenyard.experiments.checked_workload import CheckedWorkload
from tokenyard.experiments.simulation import run_simulated
from tokenyard.experiments.witness import Witness
from tokenyard.interfaces import LatencyModel, Observer, Segment, StepLoad, WorkloadRequest
from tokenyard.launch.compose import load_engine_config
from tokenyard.testing import catalogue_with


def _checked(requests: Sequence[WorkloadRequest], follow_ups: FollowUps = lambda request, end: ()) -> CheckedWorkload:
    return CheckedWorkload(PlannedWorkload(requests, follow_ups, has_content=True), "planned")


class _Breaks(Sequence[WorkloadRequest]):
    """One request, then an error."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, place: int) -> WorkloadRequest:  # type: ignore[override]
        if place:
            raise ValueError("no more\nto say")
        return request(0.0)


@pytest.mark.parametrize(
    ("second", "told"),
    [
        (request(-1.0), "arrival=-1.0"),
        (request(float("nan")), "arrival=nan"),
        (request(float("inf")), "arrival=inf"),
        (replace(request(0.0), arrival="now"), "arrival='now'"),
        (request(0.0, prompt=0), "num_prompt_tokens=0"),
        (request(0.0, output=2.5), "num_output_tokens=2.5"),
        (request(0.0, priority=2**53 + 1), "2\\*\\*53"),
        (request(0.0, priority=0.5), "priority=0.5"),
        (request(0.0, deadline=0.0), "deadline=0.0"),
        (request(0.0, deadline="soon"), "deadline='soon'"),
        (request(0.0, client=""), "client=''"),
        (request(0.0, client=["a"]), "client=\\['a'\\]"),
        (request(0.0, session=7), "session=7"),
        (request(0.0, 10, content=(Segment(1, 3),)), "10 prompt tokens and segments of 3"),
        (request(0.0, 10, content=(Segment(-7, 10),)), "content=-7"),
        (request(0.0, 10, content=(Segment(1, 0), Segment(1, 10))), "num_tokens=0"),
        (request(0.0, 10, content="what I say"), "'w' in its content"),
        (None, "is None"),
        ("later", "is a str"),
    ],
)
def test_a_request_that_breaks_the_interface_is_named(second: WorkloadRequest, told: str) -> None:
    with pytest.raises(PluginError, match=f"workload 'planned' is broken: request 1 .*{told}"):
        list(_checked([request(0.0), second]).requests())


def test_a_request_before_the_one_before_it_is_an_error_in_any_mode_of_arrivals() -> None:
    for mode in ("trace", "all_at_once", "sequential"):
        with pytest.raises(PluginError, match=r"request 1 arrives at 1\.0, after one that arrives at 5\.0"):
            simulated([request(5.0), request(1.0)], f"workload.arrivals={mode}")


def test_a_run_ends_with_what_its_workload_did_wrong() -> None:
    with pytest.raises(PluginError, match="a follow-up of request 0 has num_output_tokens=0"):
        simulated([request(0.0)], follow_ups=lambda ended, end: [request(end, output=0)])


def test_what_a_workload_raises_is_told_with_its_name_and_the_place() -> None:
    with pytest.raises(PluginError, match="workload 'planned' raised ValueError instead of request 1: no more"):
        simulated(_Breaks())


def _raises(ended: WorkloadRequest, end: float) -> list[WorkloadRequest]:
    raise KeyError("turn")


@pytest.mark.parametrize(
    ("follow_ups", "told"),
    [
        (_raises, "raised KeyError when request 0 had ended: 'turn'"),
        (lambda ended, end: None, "raised TypeError when request 0 had ended"),
        (lambda ended, end: [request(float("nan"))], "a follow-up of request 0 has arrival=nan"),
        (lambda ended, end: [request(end, output=0)], "a follow-up of request 0 has num_output_tokens=0"),
    ],
)
def test_a_follow_up_that_breaks_the_interface_is_named(follow_ups: FollowUps, told: str) -> None:
    with pytest.raises(PluginError, match=told):
        _checked([], follow_ups).follow_ups(request(0.0), 1.0, 0)


def test_times_so_late_that_a_step_would_take_none_are_refused() -> None:
    with pytest.raises(UserError, match=r"arrives at 2e\+18 s, and times are at most 1e\+10 s"):
        simulated([request(2.0)], "workload.time_scale=1e18")
    with pytest.raises(UserError, match=r"arrives at 2e\+10 s"):
        simulated([request(0.0)], follow_ups=lambda ended, end: [request(2e10)])


_INSTALLED = planned([request(5.0)])


class _Returns(LatencyModel):
    def __init__(self, answer: object) -> None:
        self._answer = answer

    def step_seconds(self, load: StepLoad) -> float:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (0.0, "returned 0.0"),
        (-1.0, "returned -1.0"),
        (float("nan"), "returned nan"),
        (1e300, "returned 1e\\+300 .* at most 1e\\+09"),
        (None, "returned None"),
        ("fast", "returned 'fast'"),
        (1e-300, "a step of 1e-300 s at time 5.0 ends when it begins"),
        (ZeroDivisionError("by what?"), "raised ZeroDivisionError .*: by what\\?"),
    ],
)
def test_what_a_latency_model_does_wrong_is_told_with_its_name(answer: object, told: str) -> None:
    latency = ComponentDescriptor(
        component_kind="latency", name="odd", api_version=(1, 7), factory=lambda options, context: _Returns(answer)
    )
    catalogue = catalogue_with(latency, installed=_INSTALLED)
    config, catalogue = load_engine_config(
        ["executor=simulated", "workload=planned", "latency=odd"], catalogue=catalogue
    )
    with pytest.raises(PluginError, match=told):
        run_simulated(config, catalogue)


class _Fails(Observer):
    def on_step(self, output: object, result: object, now: float) -> None:
        raise OverflowError("too much")


def test_a_record_that_lacks_steps_is_an_error() -> None:
    """An engine switches an observer that fails off, and goes on; what it would have counted is missing then."""
    witness = Witness([_Fails()])
    witness.check()
    with pytest.raises(OverflowError):
        witness.on_step(None, None, 0.0)  # type: ignore[arg-type]
    with pytest.raises(OverflowError, match="too much"):
        witness.check()
