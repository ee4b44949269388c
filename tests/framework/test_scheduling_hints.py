"""Typed scheduling hints: from what a user writes to what the active policy reads."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenyard import LLM, PolicyDescriptor, SamplingParams
from tokenyard.catalogue import Catalogue
from tokenyard.config import NoOptions
from tokenyard.descriptor_rules import BrokenRuleError, check_descriptor
from tokenyard.errors import ValidationError
from tokenyard.interfaces import RequestView, SchedulerView, SchedulingPolicy
from tokenyard.launch.compose import load_engine_config
from tokenyard.request import SchedulingHints, ServiceLevel
from tokenyard.scheduling_hints import read_hints
from tokenyard.testing import EngineHarness, catalogue_with


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    weight: float = 1.0
    tier: Literal["gold", "iron"] = "iron"
    tags: tuple[str, ...] = ()
    limits: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Needed:
    length: int


def read(**values: object) -> SchedulingHints:
    hints = read_hints(values, Metadata)
    assert hints is not None
    return hints


def test_a_mapping_becomes_typed_hints() -> None:
    hints = read(
        deadline=3,
        client="me",
        session="s1",
        slo={"ttft": 0.5, "e2e": 9},
        retention="high",
        weight=2,
        tier="gold",
        tags=["a"],
    )
    assert hints == SchedulingHints(
        deadline=3,
        client_id="me",
        session_id="s1",
        service_level=ServiceLevel(ttft=0.5, e2e=9),
        retention="high",
        metadata=Metadata(weight=2.0, tier="gold", tags=("a",)),
    )
    assert hints.metadata_values() == {"weight": 2.0, "tier": "gold", "tags": ("a",), "limits": {}}
    assert read_hints(hints, Metadata) is hints


def test_who_says_nothing_gets_the_policys_defaults_or_none_at_all() -> None:
    assert read_hints(None, NoOptions) is None
    assert read_hints({}, NoOptions) is None
    assert read_hints(None, Metadata) == SchedulingHints(metadata=Metadata())
    assert read_hints({"client": "me"}, NoOptions) == SchedulingHints(client_id="me")
    assert read_hints({"retention": None}, NoOptions) == SchedulingHints(retention="normal")
    with pytest.raises(ValidationError, match=r"scheduling\.length has no value; give it a whole number"):
        read_hints(None, Needed)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"wieght": 2}, "scheduling: unknown key 'wieght'; did you mean 'weight'.; allowed: deadline, client, session"),
        ({"dead_line": 2}, "did you mean 'deadline'"),
        ({3: 2}, "unknown key 3"),
        ({"weight": "2"}, r"scheduling\.weight must be a number, got '2' \(text\)"),
        ({"weight": True}, r"scheduling\.weight must be a number, got true"),
        ({"weight": math.nan}, r"scheduling\.weight=nan is not valid: it must be a finite number"),
        ({"weight": -math.inf}, r"scheduling\.weight=-inf is not valid: it must be a finite number"),
        ({"weight": 10**400}, r"scheduling\.weight must be a number that a float can hold"),
        ({"weight": 10**5000}, r"scheduling\.weight must be a number that a float can hold, got <int>"),
        ({"tier": "wood"}, r"scheduling\.tier must be one of 'gold', 'iron', got 'wood'"),
        ({"tags": "a"}, r"scheduling\.tags must be a list"),
        ({"tags": [1]}, r"scheduling\.tags\[0\] must be text, got 1"),
        ({"tags": ["x" * 257]}, r"scheduling\.tags\.0='x.* text of at most 256 characters"),
        ({"tags": ["x"] * 65}, r"scheduling\.tags=.* of at most 64 entries"),
        ({"limits": {"x" * 257: 1}}, r"scheduling\.limits='x.* text of at most 256 characters"),
        ({str(i): 1 for i in range(65)}, r"scheduling=.* of at most 64 entries"),
        ({"deadline": 0}, r"scheduling\.deadline=0 is not valid: it must be a number of seconds, above 0"),
        ({"deadline": math.inf}, r"scheduling\.deadline=inf"),
        ({"deadline": math.nan}, r"scheduling\.deadline=nan"),
        ({"deadline": "1"}, r"scheduling\.deadline='1'"),
        ({"deadline": True}, r"scheduling\.deadline=True"),
        ({"deadline": 10**400}, r"scheduling\.deadline=1000"),
        ({"client": ""}, r"scheduling\.client='' is not valid: it must be text of 1 to 256 characters"),
        ({"client": 5}, r"scheduling\.client=5"),
        ({"session": "x" * 257}, r"scheduling\.session='x"),
        (
            {"retention": "forever"},
            r"scheduling\.retention='forever' is not valid: it must be one of low, normal, high",
        ),
        ({"retention": False}, r"scheduling\.retention=False"),
        ({"retention": ["high"]}, r"scheduling\.retention=\['high'\]"),
        ({"slo": 5}, r"scheduling\.slo=5 is not valid: it must be a mapping with the keys ttft, tpot, e2e"),
        ({"slo": {"tft": 5}}, r"scheduling\.slo=.*the keys ttft, tpot, e2e"),
        ({"slo": {"ttft": -1}}, r"scheduling\.slo\.ttft=-1"),
        ({"slo": {"e2e": "x"}}, r"scheduling\.slo\.e2e='x'"),
    ],
)
def test_d22_what_is_wrong_is_told_in_one_line_with_its_key(values: dict[str, object], told: str) -> None:
    with pytest.raises(ValidationError, match=told) as caught:
        read_hints(values, Metadata)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "hints",
    [
        SchedulingHints(deadline=-1),
        SchedulingHints(client_id="x" * 257),
        SchedulingHints(retention="most"),  # type: ignore[arg-type]
        SchedulingHints(service_level=(1, 2, 3)),  # type: ignore[arg-type]
        SchedulingHints(service_level=ServiceLevel(ttft=math.nan)),
        SchedulingHints(metadata=Needed(length=3)),
        SchedulingHints(metadata={"weight": 3}),
        SchedulingHints(metadata=Metadata(tags=("x" * 257,))),
    ],
)
def test_hints_made_in_python_are_checked_as_those_that_are_read(hints: SchedulingHints) -> None:
    with pytest.raises(ValidationError):
        read_hints(hints, Metadata)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text()),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)),
    max_leaves=8,
)
KEYS = st.sampled_from(["deadline", "client", "session", "slo", "weight", "tier", "tags", "limits", "other"])


@given(st.one_of(JSON, st.dictionaries(KEYS, JSON)))
def test_whatever_json_says_it_is_taken_or_refused_and_nothing_else_happens(value: object) -> None:
    try:
        hints = read_hints(value, Metadata)  # type: ignore[arg-type]
    except ValidationError:
        return
    assert hints is not None
    assert read_hints(hints, Metadata) is hints


# ---- Policies --------------------------------------------------------------------------------------------------------


class HeavyFirst(SchedulingPolicy):
    """The greatest weight first."""

    def waiting_key(self, request: RequestView, view: SchedulerView) -> object:
        weight = request.metadata["weight"]
        assert isinstance(weight, float)
        return -weight


HEAVY: PolicyDescriptor[NoOptions] = PolicyDescriptor(
    name="heavy", api_version=(1, 3), factory=lambda options, context: HeavyFirst(), metadata_type=Metadata
)


def test_a_third_partys_policy_orders_requests_by_what_their_hints_say() -> None:
    harness = EngineHarness(["scheduler=heavy", "scheduler.max_num_seqs=1"], catalogue=catalogue_with(HEAVY))
    names = {}
    for weight in (1, 5, 3, None):
        hints = read_hints({} if weight is None else {"weight": weight}, HEAVY.metadata_type)
        assert hints is not None
        names[harness.add([1, 2, 3], max_tokens=1, metadata=hints.metadata_values())] = weight
    order = []
    while harness.waiting or harness.running:
        harness.step()
        order += [names[name] for name in harness.scheduled]
    assert order == [5, 3, 1, None]
    harness.close()


def test_a_front_end_learns_what_the_active_policy_may_be_told(
    tiny_llama_dir: Path, catalogue_with: Callable[..., Catalogue]
) -> None:
    for scheduler, expected in (("heavy", Metadata), ("fcfs", NoOptions)):
        overrides = [f"model.name={tiny_llama_dir}", "kv_cache.num_blocks=8", f"scheduler={scheduler}"]
        config = load_engine_config(overrides, catalogue=catalogue_with(HEAVY))
        with LLM.from_parts(*config) as llm:
            assert llm.engine.metadata_type is expected
            if expected is NoOptions:
                llm.generate([[1, 2]], SamplingParams(max_tokens=1), use_tqdm=False)


@pytest.mark.parametrize(
    ("metadata_type", "told"),
    [
        ({}, "metadata_type must be a dataclass, not a value of type dict"),
        (Metadata(), "metadata_type must be a dataclass"),
        (int, "metadata_type must be a dataclass, not the class int"),
        (
            dataclass(type("Taken", (), {"__annotations__": {"client": str}})),
            "has a field 'client', which is a hint for",
        ),
    ],
)
def test_a_metadata_type_that_cannot_be_is_told_when_the_plugin_is_loaded(metadata_type: type, told: str) -> None:
    descriptor: PolicyDescriptor[NoOptions] = PolicyDescriptor(
        name="broken", api_version=(1, 3), factory=lambda options, context: HeavyFirst(), metadata_type=metadata_type
    )
    with pytest.raises(BrokenRuleError, match=told):
        check_descriptor("tokenyard_policies", descriptor)
