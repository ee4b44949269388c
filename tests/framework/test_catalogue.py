"""The catalogue: choosing by name, and its errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import pytest
from plugin_makers import CPUOnly, attention, component, entry, policy, provider, scheduler
from tokenyard.catalogue import Blocked, BlockReason, Catalogue, Failure, format_api, is_compatible
from tokenyard.descriptors import (
    PLUGIN_API,
)
from tokenyard.errors import PluginConflictError, PluginError
from tokenyard.platform import Platform

if TYPE_CHECKING:
    pass


OURS = format_api(PLUGIN_API)


def message_of(catalogue: Catalogue, kind: str, name: str) -> str:
    with pytest.raises(PluginError) as caught:
        catalogue.get(kind, name)
    message = str(caught.value)
    assert "\n" not in message
    return message


# ---- Choosing by name ------------------------------------------------------------------------------------------------


def test_a_component_is_found_by_its_kind_and_name() -> None:
    mine = entry(policy("sjf"))
    catalogue = Catalogue([mine, entry(attention("sjf")), entry(component("eviction", "sjf"))])
    assert catalogue.get("policy", "sjf") is mine
    assert catalogue.get("eviction", "sjf").kind == "eviction"
    assert catalogue.conflicts == ()


def test_names_are_sorted_and_of_one_kind_only() -> None:
    catalogue = Catalogue([entry(policy("b")), entry(policy("a")), entry(scheduler("c"))])
    assert catalogue.names("policy") == ["a", "b"]
    assert catalogue.names("no_such_kind") == []


def test_changing_what_a_catalogue_returns_does_not_change_the_catalogue() -> None:
    catalogue = Catalogue([entry(policy("a"))], config_paths=[(provider(), "pkg://a")])
    catalogue.entries().clear()
    catalogue.names("policy").clear()
    catalogue.config_paths.clear()
    assert catalogue.names("policy") == ["a"]
    assert catalogue.config_paths == [(provider(), "pkg://a")]


def test_an_unknown_name_is_answered_with_the_known_ones_and_the_nearest() -> None:
    catalogue = Catalogue([entry(policy("fcfs")), entry(policy("priority"))])
    message = message_of(catalogue, "policy", "priorty")
    assert message == (
        "unknown policy 'priorty'; available: fcfs, priority; did you mean 'priority'?; "
        "is the plugin installed? see `tokenyard plugins`"
    )


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("FLASHINFER", "flashinfer"),
        ("FLASH_ATTN", "flashinfer"),
        ("TRITON_ATTN", "triton"),
        ("XFORMERS", "xformers"),
        ("TORCH_SDPA", "torch_native"),
    ],
)
def test_names_that_another_engine_writes_in_capitals_are_answered_with_ours(given: str, meant: str) -> None:
    names = ("cpu_native", "flashinfer", "torch_native", "triton", "xformers")
    catalogue = Catalogue([entry(attention(name)) for name in names])
    assert f"; did you mean '{meant}'?; " in message_of(catalogue, "attention", given)


def test_an_unknown_scheduler_is_answered_with_policies_and_schedulers() -> None:
    catalogue = Catalogue([entry(policy("fcfs")), entry(scheduler("batch"))])
    with pytest.raises(PluginError, match=r"unknown scheduler 'sjf'; available: batch, fcfs; is the plugin"):
        catalogue.get_scheduler_or_policy("sjf")


def test_scheduler_equals_name_finds_either_kind() -> None:
    catalogue = Catalogue([entry(policy("fcfs")), entry(scheduler("batch"))])
    assert catalogue.get_scheduler_or_policy("fcfs").kind == "policy"
    assert catalogue.get_scheduler_or_policy("batch").kind == "scheduler"


def test_a_scheduler_where_a_policy_is_asked_for_is_said_to_be_one() -> None:
    catalogue = Catalogue([entry(policy("fcfs")), entry(scheduler("batch"))])
    assert message_of(catalogue, "policy", "batch") == "'batch' is a scheduler, not a policy; available: fcfs"


def test_a_kind_without_any_component_says_so() -> None:
    assert "unknown policy 'x'; none is available" in message_of(Catalogue(), "policy", "x")


# ---- Conflicts -------------------------------------------------------------------------------------------------------


def test_two_distributions_with_one_name_conflict_only_when_it_is_chosen() -> None:
    catalogue = Catalogue([entry(policy("sjf"), "alpha"), entry(policy("sjf"), "beta"), entry(policy("fcfs"))])
    assert catalogue.get("policy", "fcfs").name == "fcfs"
    with pytest.raises(PluginConflictError) as caught:
        catalogue.get("policy", "sjf")
    assert str(caught.value) == (
        "policy 'sjf' is provided by plugin 'point' of alpha 1.0 and by plugin 'point' of beta 1.0: uninstall one of "
        "the distributions, or block one with plugins.disabled=[alpha] or plugins.disabled=[beta]"
    )


def test_a_policy_and_a_scheduler_of_one_name_conflict() -> None:
    catalogue = Catalogue([entry(policy("sjf"), "alpha"), entry(scheduler("sjf"), "beta")])
    for kind in ("policy", "scheduler"):
        with pytest.raises(PluginConflictError, match="policy and scheduler 'sjf'"):
            catalogue.get(kind, "sjf")
    with pytest.raises(PluginConflictError, match="policy and scheduler 'sjf'"):
        catalogue.get_scheduler_or_policy("sjf")


def test_a_duplicate_inside_one_distribution_names_the_two_entry_points() -> None:
    catalogue = Catalogue([entry(policy("sjf"), "alpha", "one"), entry(policy("sjf"), "alpha", "two")])
    with pytest.raises(PluginConflictError) as caught:
        catalogue.get("policy", "sjf")
    message = str(caught.value)
    assert "plugin 'one' of alpha 1.0" in message
    assert "plugin 'two' of alpha 1.0" in message
    assert "plugins.disabled=[one] or plugins.disabled=[two]" in message
    assert "uninstall" not in message


def test_a_duplicate_inside_one_entry_point_is_for_its_author() -> None:
    catalogue = Catalogue([entry(policy("sjf")), entry(policy("sjf"))])
    message = message_of(catalogue, "policy", "sjf")
    assert message.endswith("report it to the author of alpha")
    assert "plugins.disabled" not in message


@pytest.mark.parametrize(
    ("builtin_entry_point", "remedy"),
    [
        ("fcfs", "block one with plugins.disabled=[alpha] or plugins.disabled=[fcfs]"),
        ("point", "block one with plugins.disabled=[alpha]"),  # disabling `point` would hit both
    ],
)
def test_a_conflict_with_a_built_in_never_advises_to_disable_all_built_ins(
    builtin_entry_point: str, remedy: str
) -> None:
    catalogue = Catalogue([entry(policy("x"), "alpha"), entry(policy("x"), "tokenyard", builtin_entry_point)])
    assert message_of(catalogue, "policy", "x").endswith(remedy)


def test_an_incompatible_component_takes_part_in_no_conflict() -> None:
    usable = entry(policy("sjf"), "alpha")
    catalogue = Catalogue([usable, entry(policy("sjf", (2, 0)), "beta")])
    assert catalogue.conflicts == ()
    assert catalogue.get("policy", "sjf") is usable


# ---- Plugins that were left out --------------------------------------------------------------------------------------


@pytest.mark.parametrize("distribution", ["tokenyard-long-job", "tokenyard_long.job", "Long_Job", "other"])
@pytest.mark.parametrize("name", ["long_job", "long-job", "tokenyard-long-job"])
def test_plg_01_a_broken_plugin_that_the_config_names_is_fatal_with_its_error(name: str, distribution: str) -> None:
    entry_point = "long_job" if distribution == "other" else "main"
    broken = Failure(provider=provider(distribution, entry_point), error="ImportError: no numpy")
    catalogue = Catalogue([entry(policy("fcfs"))], failures=[broken])
    message = message_of(catalogue, "policy", name)
    assert f"plugin '{entry_point}' of {distribution} 1.0 is installed but broken: ImportError: no numpy" in message
    assert "unknown" not in message


def test_a_broken_plugin_of_another_name_is_mentioned_beside_an_unknown_one() -> None:
    broken = Failure(provider=provider("tokenyard-extras", "extras"), error="ImportError: no numpy")
    message = message_of(Catalogue(failures=[broken]), "policy", "sjf")
    assert "unknown policy 'sjf'" in message
    assert "broken plugins: extras (tokenyard-extras)" in message


def test_a_good_plugin_wins_over_a_broken_one_whose_entry_point_bears_the_name() -> None:
    catalogue = Catalogue([entry(policy("sjf"))], failures=[Failure(provider=provider("beta", "sjf"), error="x")])
    assert catalogue.get("policy", "sjf").provider.distribution == "alpha"


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("plugins.disabled", "remove it from plugins.disabled"),
        ("plugins.allow", "add it to plugins.allow"),
        ("TOKENYARD_PLUGINS_DISABLED", "remove it from the environment variable TOKENYARD_PLUGINS_DISABLED"),
    ],
)
def test_a_blocked_plugin_that_is_chosen_says_what_blocks_it(reason: BlockReason, remedy: str) -> None:
    catalogue = Catalogue(blocked=[Blocked(provider=provider("tokenyard-sjf", "main"), reason=reason)])
    message = message_of(catalogue, "policy", "sjf")
    assert f"blocked by {reason}: {remedy}" in message


@pytest.mark.parametrize(
    ("built_for", "what_to_do"),
    [
        ((2, 0), f"upgrade Tokenyard, or install a release of alpha for API {OURS}"),
        ((1, 99), f"upgrade Tokenyard, or install a release of alpha for API {OURS}"),
        ((0, 9), "upgrade alpha"),
    ],
)
def test_a_component_for_another_api_says_which_and_what_to_do(built_for: tuple[int, int], what_to_do: str) -> None:
    catalogue = Catalogue([entry(policy("sjf", built_for))])
    assert catalogue.names("policy") == []
    assert [kept.name for kept in catalogue.incompatible] == ["sjf"]
    message = message_of(catalogue, "policy", "sjf")
    assert f"built for plugin API {format_api(built_for)} and this Tokenyard has {OURS}: {what_to_do}" in message


def test_only_older_minors_of_our_major_are_compatible() -> None:
    major, minor = PLUGIN_API
    assert is_compatible((major, minor))
    assert is_compatible((major, 0))
    assert not is_compatible((major, minor + 1))
    assert not is_compatible((major + 1, 0))
    assert not is_compatible((major - 1, minor))


# ---- Requirements ----------------------------------------------------------------------------------------------------


def test_requirements_that_raise_are_a_reason() -> None:
    def requires(platform: Platform) -> Sequence[str]:
        raise OSError("no driver")

    broken = entry(replace(policy("x"), requires=requires))
    assert broken.unavailable_reasons(CPUOnly()) == ["its requires() failed: OSError: no driver"]


def test_requirements_given_as_one_string_are_one_reason() -> None:
    mine = entry(replace(policy("x"), requires=lambda platform: "no GPU"))
    assert mine.unavailable_reasons(CPUOnly()) == ["no GPU"]


def test_requirements_that_are_none_are_a_reason_and_not_a_crash() -> None:
    mine = entry(replace(policy("x"), requires=cast("type[list[str]]", lambda platform: None)))
    assert "TypeError" in mine.unavailable_reasons(CPUOnly())[0]
