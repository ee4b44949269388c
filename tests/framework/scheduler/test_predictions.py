"""True output lengths: kept for oracles while a request lives, and out of every policy's reach otherwise."""

from __future__ import annotations

import gc
import types
from collections.abc import Callable, Iterator
from functools import cache
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenyard import ComponentDescriptor, PolicyDescriptor
from tokenyard.catalogue import Catalogue
from tokenyard.config import EngineConfig, NoOptions
from tokenyard.errors import PluginError
from tokenyard.interfaces import (
    OutputLengthPredictor,
    PredictorContext,
    RequestView,
    SchedulerView,
    SchedulingPolicy,
    StepOutcome,
)
from tokenyard.launch.compose import load_engine_config
from tokenyard.request import EngineCoreRequest
from tokenyard.sampling_params import SamplingParams
from tokenyard.scheduler.predictions import TrueLengths
from tokenyard.testing import EngineHarness, catalogue_with

TRUTH = 987_653  # a number that stands for nothing else
_NOT_FOLLOWED = (type, types.ModuleType, types.FrameType, types.CodeType, types.BuiltinFunctionType)


class Snooping(SchedulingPolicy):
    """Keeps everything that it was ever given."""

    def __init__(self) -> None:
        self.given: list[object] = []

    def waiting_key(self, request: RequestView, view: SchedulerView) -> object:
        self.given += [request, view, view.predictor]
        return ()

    def on_step(self, outcomes: list[StepOutcome], view: SchedulerView) -> None:  # type: ignore[override]
        self.given += [*outcomes, *view.running, *view.waiting(10)]


class Told(OutputLengthPredictor):
    """A planted predictor: it notes its context."""

    contexts: list[PredictorContext]

    def __init__(self, context: PredictorContext) -> None:
        self.contexts.append(context)

    def output_len(self, request: RequestView) -> float:
        return request.num_output_tokens + 1


def told(name: str) -> tuple[ComponentDescriptor[NoOptions], list[PredictorContext]]:
    contexts: list[PredictorContext] = []
    made = type("Told", (Told,), {"contexts": contexts})
    descriptor = ComponentDescriptor(
        component_kind="predictor", name=name, api_version=(1, 7), factory=lambda options, context: made(context)
    )
    return descriptor, contexts


def reachable(roots: list[object], limit: int = 200_000) -> Iterator[object]:
    """What attributes, items, closures and bound methods lead to; a function's globals do not count."""
    seen: dict[int, object] = {}
    todo = list(roots)
    while todo and len(seen) < limit:
        found = todo.pop()
        if id(found) in seen or isinstance(found, _NOT_FOLLOWED):
            continue
        seen[id(found)] = found
        yield found
        if isinstance(found, types.FunctionType):
            todo += [found.__closure__, found.__defaults__, found.__kwdefaults__]
        else:
            todo += gc.get_referents(found)
    assert not todo, "more is reachable than was looked at"


def is_the_truth(found: object) -> bool:
    if isinstance(found, np.ndarray):
        return found.dtype != object and TRUTH in found
    return isinstance(found, int) and found == TRUTH


@pytest.mark.parametrize(
    ("predictor", "is_told"),
    [("max_tokens", False), ("prompt", False), ("own", False), ("oracle", True), ("noisy", True)],
)
def test_a_policy_reaches_the_truth_through_an_oracle_alone(predictor: str, is_told: bool) -> None:
    policy = Snooping()
    descriptor = PolicyDescriptor(name="snooping", api_version=(1, 7), factory=lambda options, context: policy)
    choices = ["scheduler=snooping", f"scheduler.predictor={predictor}", "scheduler.max_num_seqs=1"]
    harness = EngineHarness(choices, catalogue=catalogue_with(descriptor, told("own")[0]))
    for name in "ab":
        harness.add([1, 2, 3], name, max_tokens=5, true_output_tokens=TRUTH, metadata={"some": "thing"})
    harness.step()
    assert any(is_the_truth(found) for found in reachable(policy.given)) == is_told


@pytest.mark.parametrize(("name", "is_told"), [("own", False), ("oracle", True), ("noisy", True), ("oracles", False)])
def test_a_predictor_is_told_the_truth_by_its_name_alone(name: str, is_told: bool) -> None:
    descriptor, contexts = told(name)
    EngineHarness([f"scheduler.predictor={name}", "seed=7"], catalogue=catalogue_with(descriptor))
    (context,) = contexts
    assert (context.true_output_tokens is not None) == is_told
    assert context.seed == 7


def test_what_makes_no_predictor_is_refused_by_name() -> None:
    broken = ComponentDescriptor(
        component_kind="predictor", name="broken", api_version=(1, 7), factory=lambda options, context: 7
    )
    with pytest.raises(PluginError, match="predictor 'broken' is broken: its factory made a int"):
        EngineHarness(["scheduler.predictor=broken"], catalogue=catalogue_with(broken))


_ORACLE, _CONTEXTS = told("oracle")


@cache  # composing a config takes longer than a run does
def _with_oracle(*overrides: str) -> tuple[EngineConfig, Catalogue]:
    return load_engine_config(["scheduler.predictor=oracle", *overrides], catalogue=catalogue_with(_ORACLE))


def table_of(*overrides: str) -> tuple[EngineHarness, TrueLengths]:
    """A harness and the table in its scheduler, by way of an oracle."""
    config, catalogue = _with_oracle(*overrides)
    _CONTEXTS.clear()
    harness = EngineHarness(config=config, catalogue=catalogue)
    truth = cast("types.MethodType", _CONTEXTS[0].true_output_tokens)
    assert isinstance(truth.__self__, TrueLengths)
    return harness, truth.__self__


_OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.one_of(st.none(), st.integers(1, 20)), st.integers(1, 6)),
        st.tuples(st.just("finish"), st.integers(0, 10), st.just(0)),
        st.tuples(st.just("step"), st.just(0), st.just(0)),
        st.tuples(st.just("deadline"), st.integers(1, 20), st.integers(1, 6)),
    ),
    max_size=30,
)


@settings(max_examples=40, deadline=None)
@given(_OPERATIONS, st.sampled_from(["engine=sync", "engine=overlap"]))
def test_the_truth_is_kept_for_live_requests_and_for_no_other(
    operations: list[tuple[str, int | None, int]], engine: str
) -> None:
    sizes = ["scheduler.max_num_seqs=2", "kv_cache.num_blocks=4", "kv_cache.block_size=4", "model.max_model_len=16"]
    harness, table = table_of(engine, *sizes)
    names: list[str] = []
    for kind, number, max_tokens in operations:
        if kind == "step":
            harness.step()
        elif kind == "finish":
            harness.finish(names[(number or 0) % len(names)] if names else "none")
        else:
            deadline = None if kind == "add" else harness.clock.now()
            names.append(harness.add([1, 2, 3], max_tokens=max_tokens, true_output_tokens=number, deadline=deadline))
        alive = {name for name in names if harness.request(name).finish_reason is None}
        assert len(table) <= len(alive)
    harness.run()
    assert len(table) == 0


def test_a_request_that_is_refused_leaves_no_truth_behind() -> None:
    harness, table = table_of("model.max_model_len=16")
    harness.add([1, 2, 3], "a", max_tokens=4, true_output_tokens=3)
    for request_id, prompt in (("a", [1]), ("b", list(range(40)))):
        with pytest.raises(ValueError, match=r"in use|40 tokens"):
            harness.add(prompt, request_id, max_tokens=4, true_output_tokens=2)
    assert len(table) == 1
    harness.run()
    assert len(table) == 0


# The table itself


def request(truth: object = None, **sampling: object) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id="a",
        prompt_token_ids=np.arange(3, dtype=np.int32),
        params=SamplingParams(**sampling),  # type: ignore[arg-type]
        arrival_time=0.0,
        true_output_tokens=cast("int | None", truth),
    )


def test_a_request_without_a_truth_is_passed_on_as_it_is() -> None:
    table, plain = TrueLengths(), request()
    assert table.strip(plain) is plain
    assert len(table) == 0


def test_a_stripped_request_differs_in_nothing_else() -> None:
    table = TrueLengths()
    stripped = table.strip(request(5, max_tokens=9))
    plain = request(max_tokens=9)
    assert stripped.true_output_tokens is None
    for name in ("request_id", "params", "arrival_time", "stop_token_ids", "priority", "metadata"):
        assert getattr(stripped, name) == getattr(plain, name)


class OfScheduler:
    """As much of a scheduler's record as the table reads."""

    def __init__(self, core: EngineCoreRequest) -> None:
        self.core, self.request_id, self.max_output_tokens = core, core.request_id, 9


@pytest.mark.parametrize(
    ("sampling", "is_sure"),
    [({"ignore_eos": True}, True), ({"stop": ["x"], "ignore_eos": True}, False), ({}, True)],
)
def test_a_stop_string_may_end_a_request_before_its_limit(
    sampling: dict[str, object], is_sure: bool, caplog: pytest.LogCaptureFixture
) -> None:
    ask: Callable[[RequestView], int] = TrueLengths().true_output_tokens
    view = cast("RequestView", OfScheduler(request(**sampling)))
    assert [ask(view), ask(view)] == [9, 9]
    assert len(caplog.messages) == (0 if is_sure else 1)
