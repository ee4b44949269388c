"""The rules for what a hook yields, and the messages for those that break one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
from plugin_makers import attention, build_policy, component, policy, scheduler
from tokenyard.config import NoOptions
from tokenyard.descriptor_rules import BrokenRuleError, check_config_path, check_descriptor
from tokenyard.descriptors import (
    PLUGIN_API,
    Descriptor,
    PolicyDescriptor,
)


def changed(descriptor: Descriptor[NoOptions], **changes: Any) -> object:
    """The descriptor with fields of a wrong type, as an untyped plugin may give them."""
    return replace(descriptor, **changes)


def test_a_descriptor_that_keeps_the_rules_is_returned_as_it_is() -> None:
    for hook, item in (
        ("tokenyard_policies", policy("a-b_9")),
        ("tokenyard_schedulers", scheduler("x")),
        ("tokenyard_attention_backends", attention("x", 3)),
        ("tokenyard_components", component("eviction", "lfu")),
    ):
        assert check_descriptor(hook, item) is item


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"name": "SJF"}, r"name 'SJF' must match \[a-z0-9_-\]\{1,64\}"),
        ({"name": ""}, "name '' must match"),
        ({"name": "sjf\n"}, "name .* must match"),
        ({"name": 3}, "name must be a str, not a value of type int"),
        ({"api_version": "1.1"}, "api_version must be a pair of ints such as .1, 1., not '1.1'"),
        ({"api_version": (1,)}, "api_version must be a pair"),
        ({"api_version": (1, True)}, "api_version must be a pair"),
        ({"api_version": (1, -1)}, "api_version must be a pair"),
        ({"summary": None}, "summary must be a str, not None"),
        ({"options_type": dict}, "options_type must be a dataclass, not the class dict"),
        ({"options_type": NoOptions()}, "options_type must be a dataclass, not a value of type NoOptions"),
        ({"requires": ["no GPU"]}, "requires must be callable"),
        ({"factory": "build"}, "factory must be callable, not a value of type str"),
        ({"tested_on": "cpu"}, "tested_on must be a frozenset of device types"),
        ({"tested_on": frozenset({1})}, "tested_on must be a frozenset of device types"),
    ],
)
def test_a_descriptor_that_breaks_a_rule_is_told_which(change: dict[str, object], rule: str) -> None:
    given: dict[str, Any] = {"name": "sjf", "api_version": PLUGIN_API, "factory": build_policy, **change}
    broken: PolicyDescriptor[NoOptions] = PolicyDescriptor(**given)
    with pytest.raises(BrokenRuleError, match=rule):
        check_descriptor("tokenyard_policies", broken)


@pytest.mark.parametrize(
    ("hook", "item", "rule"),
    [
        ("tokenyard_schedulers", policy("x"), "yielded a value of type PolicyDescriptor; it takes SchedulerDescriptor"),
        ("tokenyard_policies", PolicyDescriptor, "yielded the class PolicyDescriptor"),
        ("tokenyard_policies", "fcfs", "yielded a value of type str"),
        ("tokenyard_attention_backends", changed(attention("x"), supports=None), "supports must be callable"),
        ("tokenyard_attention_backends", changed(attention("x"), auto_rank="1"), "auto_rank must be an int or None"),
        ("tokenyard_schedulers", changed(scheduler("x"), takes_policy=1), "takes_policy must be a bool"),
        ("tokenyard_components", component("policy", "x"), "component_kind 'policy' has a hook"),
        ("tokenyard_components", component("Bad Kind", "x"), "component_kind 'Bad Kind' must match"),
    ],
)
def test_the_rules_of_single_kinds_hold(hook: str, item: object, rule: str) -> None:
    with pytest.raises(BrokenRuleError, match=rule):
        check_descriptor(hook, item)


def test_a_subclass_cannot_slip_in_under_another_kind() -> None:
    class Impostor(PolicyDescriptor[NoOptions]):
        kind = "attention"

    with pytest.raises(BrokenRuleError, match="kind 'attention'; it takes 'policy' only"):
        check_descriptor("tokenyard_policies", Impostor(name="x", api_version=PLUGIN_API, factory=build_policy))


def test_of_a_component_for_another_api_only_name_and_version_are_checked() -> None:
    odd = replace(policy("x", (2, 0)), summary=cast("str", None))
    assert check_descriptor("tokenyard_policies", odd) is odd


@pytest.mark.parametrize("path", ["pkg://a", "pkg://my_package.configs"])
def test_a_config_path_names_a_package(path: str) -> None:
    assert check_config_path(path) == path


@pytest.mark.parametrize("path", ["a.b", "file:///etc", "pkg://", "pkg://a/b", "pkg://a.", "/etc", "pkg://a\n", 3])
def test_any_other_config_path_is_refused(path: object) -> None:
    with pytest.raises(BrokenRuleError, match=r"write a path such as 'pkg://my_package\.configs'"):
        check_config_path(path)
