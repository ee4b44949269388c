"""What the listing and the explanations say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

import pytest
from plugin_makers import CPUOnly, attention, component, entry, policy, provider
from tokenyard.catalogue import Blocked, Catalogue, Failure, format_api
from tokenyard.descriptors import PLUGIN_API
from tokenyard.errors import PluginError
from tokenyard.platform import Platform
from tokenyard.plugin_report import PluginRow, describe, explain

if TYPE_CHECKING:
    pass


OURS = format_api(PLUGIN_API)


class WithGPU(Platform):
    device_type = "cuda"


def one_of_each() -> Catalogue:
    unavailable = replace(attention("flash", 1), requires=lambda platform: ["no GPU", "no nvcc"])
    entries = [
        entry(replace(policy("fcfs"), summary="First come, first served."), "tokenyard", "fcfs"),
        entry(policy("sjf"), "alpha", "sjf"),
        entry(unavailable, "alpha", "flash"),
        entry(component("eviction", "twice"), "alpha", "one"),
        entry(component("eviction", "twice"), "beta", "two"),
        entry(policy("future", (2, 0)), "beta", "future"),
    ]
    return Catalogue(
        entries,
        failures=[Failure(provider=provider("tokenyard-bad", "bad"), error="ImportError: no numpy")],
        blocked=[Blocked(provider=provider("gamma", "shut"), reason="plugins.disabled")],
    )


def row_of(rows: Sequence[PluginRow], name: str) -> PluginRow:
    (row, *_) = [row for row in rows if row.name == name]
    return row


@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        ("fcfs", "active", None),
        ("sjf", "available", None),
        ("flash", "unavailable", "no GPU; no nvcc"),
        ("twice", "conflict", "eviction 'twice' is provided by plugin 'one' of alpha 1.0 and by plugin 'two' of beta"),
        ("future", "incompatible", f"it was built for plugin API 2.0 and this Tokenyard has {OURS}"),
        ("bad", "broken", "ImportError: no numpy"),
        ("shut", "blocked", "plugins.disabled"),
    ],
)
def test_every_component_and_every_plugin_left_out_has_a_row(name: str, status: str, reason: str | None) -> None:
    rows = describe(one_of_each(), CPUOnly(), {("policy", "fcfs")})
    row = row_of(rows, name)
    assert row.status == status
    assert (row.reason is None) if reason is None else (row.reason or "").startswith(reason)
    assert len(rows) == 8  # `twice` has two


def test_a_row_tells_who_provides_it_and_survives_json() -> None:
    row = row_of(describe(one_of_each(), CPUOnly()), "fcfs")
    assert json.loads(json.dumps(row.to_json())) == {
        "name": "fcfs",
        "kind": "policy",
        "distribution": "tokenyard",
        "version": "1.0",
        "entry_point": "fcfs",
        "api_version": OURS,
        "status": "available",
        "reason": None,
        "summary": "First come, first served.",
        "tested_on": ["cpu"],
    }


def test_what_a_component_of_another_api_put_into_its_other_fields_does_not_matter() -> None:
    odd = replace(policy("future", (2, 0)), summary=cast("str", 7), tested_on=cast("frozenset[str]", None))
    (row,) = describe(Catalogue([entry(odd)]), CPUOnly())
    assert (row.status, row.summary, row.tested_on) == ("incompatible", "", ())
    assert "upgrade Tokenyard" in str(explain(Catalogue([entry(odd)]), "future", CPUOnly()))


def test_a_listing_never_asks_for_the_device() -> None:
    class NoTorch(Platform):
        @property
        def device_type(self) -> str:
            raise AssertionError("the device was asked for")

    assert describe(one_of_each(), NoTorch())


def test_an_explanation_says_which_config_line_chooses_it() -> None:
    text = str(explain(one_of_each(), "sjf", CPUOnly()))
    assert text == "policy 'sjf' of alpha 1.0: available\n  would be chosen by `scheduler=sjf`"


def test_an_explanation_of_what_is_active_says_so() -> None:
    (verdict,) = explain(one_of_each(), "fcfs", CPUOnly(), {("policy", "fcfs")}).verdicts
    assert verdict.can_be_chosen
    assert verdict.notes == ("is chosen by `scheduler=fcfs`", "First come, first served.")


def test_an_explanation_lists_the_options_with_their_defaults() -> None:
    @dataclass(frozen=True)
    class Options:
        weight: float = 1.5
        names: list[str] = field(default_factory=list)
        needed: int = field(kw_only=True)

    described = replace(policy("sjf"), options_type=Options)  # type: ignore[arg-type]
    (verdict,) = explain(Catalogue([entry(described)]), "sjf", CPUOnly()).verdicts
    assert (
        "options: scheduler.policy.weight = 1.5, scheduler.policy.names = [], scheduler.policy.needed" in verdict.notes
    )


def test_an_explanation_lists_a_policys_own_hints_with_their_types() -> None:
    @dataclass(frozen=True)
    class Ticket:
        task: str | None = None
        tiles: tuple[int, ...] = ()

    described = replace(policy("sjf"), metadata_type=Ticket)
    (verdict,) = explain(Catalogue([entry(described)]), "sjf", CPUOnly()).verdicts
    (note,) = [note for note in verdict.notes if note.startswith("hints of a request")]
    assert note.endswith("task: str | None = None, tiles: tuple[int, ...] = ()")
    (plain,) = explain(Catalogue([entry(policy("sjf"))]), "sjf", CPUOnly()).verdicts
    assert not any("hints" in note for note in plain.notes)


def test_an_explanation_says_that_code_never_ran_on_this_kind_of_device() -> None:
    text = str(explain(one_of_each(), "sjf", WithGPU()))
    assert "never ran on a cuda device: tested on cpu only" in text
    assert "never ran" not in str(explain(one_of_each(), "sjf", CPUOnly()))


@pytest.mark.parametrize("platform", [CPUOnly(), WithGPU()])
def test_an_explanation_says_that_code_never_ran_on_any_device(platform: Platform) -> None:
    untested = entry(replace(policy("new"), tested_on=frozenset()))
    assert "never ran on a device: tested without one only" in str(explain(Catalogue([untested]), "new", platform))


def test_an_explanation_of_a_backend_gives_its_reasons_and_its_rank() -> None:
    (verdict,) = explain(one_of_each(), "flash", CPUOnly()).verdicts
    assert not verdict.can_be_chosen
    assert verdict.notes == ("cannot be chosen: no GPU; no nvcc", "`attention=auto` tries it at rank 1")


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        (
            "bad",
            ("plugin 'bad' of tokenyard-bad 1.0: broken", "ImportError: no numpy", "repair or upgrade tokenyard-bad"),
        ),
        ("tokenyard_bad", ("plugin 'bad' of tokenyard-bad 1.0: broken",)),
        ("shut", ("blocked", "to unblock it, remove it from plugins.disabled")),
        ("twice", ("eviction 'twice' of alpha 1.0: conflict", "eviction 'twice' of beta 1.0: conflict")),
        ("future", ("incompatible", "upgrade Tokenyard")),
        ("alpha", ("policy 'sjf' of alpha", "attention 'flash' of alpha", "eviction 'twice' of alpha")),
    ],
)
def test_whatever_bears_a_name_is_explained(name: str, parts: tuple[str, ...]) -> None:
    explanation = explain(one_of_each(), name, CPUOnly())
    for part in parts:
        assert part in str(explanation)
    assert json.loads(json.dumps(explanation.to_json()))["name"] == name


def test_all_kinds_that_bear_a_name_are_explained() -> None:
    parts = [policy("x"), attention("x"), component("eviction", "x"), component("workload", "x")]
    catalogue = Catalogue([entry(part) for part in parts])
    verdicts = explain(catalogue, "x", CPUOnly()).verdicts
    assert [verdict.row.kind for verdict in verdicts] == ["attention", "eviction", "policy", "workload"]
    assert [verdict.selected_by for verdict in verdicts] == ["attention=x", "kv_cache.eviction=x", "scheduler=x", None]


def test_a_name_that_nothing_bears_is_refused_with_the_nearest() -> None:
    with pytest.raises(PluginError, match=r"no plugin provides 'flesh'; did you mean 'flash'\?; known: bad, fcfs, "):
        explain(one_of_each(), "flesh", CPUOnly())
