"""plugins.allow, plugins.disabled and TOKENYARD_PLUGINS_DISABLED: what may be imported at all."""

from __future__ import annotations

import logging
import sys
from typing import Protocol

import pytest
from tokenyard.catalogue import DISABLED_VARIABLE
from tokenyard.config import PluginsConfig
from tokenyard.errors import PluginError
from tokenyard.plugins import forget_plugins, load_catalogue


class Install(Protocol):
    def __call__(self, *names: str) -> None: ...


def third_party(
    allow: tuple[str, ...] | None = None, disabled: tuple[str, ...] = (), strict: bool = False
) -> PluginsConfig:
    """Settings that leave the built-in plugins out, so that a test sees its own packages only."""
    return PluginsConfig(allow=allow, disabled=("tokenyard", *disabled), strict=strict)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_plg_03_allow_null_loads_all_and_an_empty_list_imports_no_third_party(install: Install) -> None:
    install("good", "frozen_v1_0")
    assert load_catalogue(third_party(allow=None)).names("policy") == ["frozen_shortest_prompt", "good_policy"]
    for module in ("tokenyard_good", "tokenyard_frozen.plugin"):
        del sys.modules[module]
    forget_plugins()
    catalogue = load_catalogue(third_party(allow=()))
    assert catalogue.entries() == []
    assert "tokenyard_good" not in sys.modules
    assert "tokenyard_frozen.plugin" not in sys.modules
    blocked = {entry.provider.distribution: entry.reason for entry in catalogue.blocked}
    assert blocked["tokenyard-good"] == "plugins.allow"


def test_the_built_in_plugins_need_no_allowing(install: Install) -> None:
    install("good")
    catalogue = load_catalogue(PluginsConfig(allow=()))
    assert [blocked.provider.distribution for blocked in catalogue.blocked] == ["tokenyard-good"]


@pytest.mark.parametrize("name", ["good", "GOOD", "tokenyard-good", "tokenyard_good", "Tokenyard.Good"])
def test_a_plugin_is_allowed_and_disabled_by_entry_point_or_distribution_in_any_spelling(
    install: Install, name: str
) -> None:
    install("good", "frozen_v1_0")
    assert load_catalogue(third_party(allow=(name,))).names("policy") == ["good_policy"]
    assert load_catalogue(third_party(disabled=(name,))).names("policy") == ["frozen_shortest_prompt"]


def test_being_disabled_wins_over_being_allowed(install: Install) -> None:
    install("good")
    catalogue = load_catalogue(third_party(allow=("good",), disabled=("good",)))
    assert catalogue.entries() == []


@pytest.mark.parametrize("key", ["allow", "disabled"])
def test_plg_03_a_name_that_is_not_installed_is_an_error_with_the_known_ones(install: Install, key: str) -> None:
    install("good")
    with pytest.raises(PluginError) as caught:
        load_catalogue(PluginsConfig(allow=("god",)) if key == "allow" else PluginsConfig(disabled=("god",)))
    message = str(caught.value)
    assert message.startswith(
        f"plugins.{key} names 'god', which is no installed plugin or distribution; did you mean 'good'?; installed: "
    )
    assert "good" in message.split("installed: ")[1]
    assert "tokenyard-good" in message
    assert "fcfs" in message


def test_a_chosen_plugin_that_is_not_allowed_says_so(install: Install) -> None:
    install("good")
    with pytest.raises(PluginError, match=r"blocked by plugins\.allow: add it to plugins\.allow"):
        load_catalogue(third_party(allow=())).get("policy", "good")


def test_the_environment_variable_blocks_and_is_part_of_what_is_cached(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("good", "frozen_v1_0")
    assert "good_policy" in load_catalogue(third_party()).names("policy")
    monkeypatch.setenv(DISABLED_VARIABLE, " tokenyard-good , ")
    catalogue = load_catalogue(third_party())
    assert catalogue.names("policy") == ["frozen_shortest_prompt"]
    reasons = {blocked.provider.entry_point: blocked.reason for blocked in catalogue.blocked}
    assert reasons["good"] == DISABLED_VARIABLE


def test_an_unknown_name_in_the_environment_variable_only_warns(
    install: Install, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install("good")
    monkeypatch.setenv(DISABLED_VARIABLE, "goood")
    assert load_catalogue(third_party()).names("policy") == ["good_policy"]
    (warning,) = warnings_in(caplog)
    assert warning.startswith(f"{DISABLED_VARIABLE} names 'goood'")
