from __future__ import annotations

import msgspec
import pytest
from tokenyard.errors import PluginError
from tokenyard.ipc.handshake import check_components, check_identity, components_of, own_identity
from tokenyard.ipc.messages import ComponentMessage
from tokenyard.plugins import load_catalogue


def test_the_same_version_is_accepted() -> None:
    check_identity(own_identity(), "the engine's process")


@pytest.mark.parametrize(
    "change",
    [{"wire_version": 999}, {"tokenyard_version": "0.0.1"}, {"plugin_api": (9, 9)}],
    ids=lambda change: next(iter(change)),
)
def test_2_3_21_another_version_is_refused_with_both(change: dict[str, object]) -> None:
    other = msgspec.structs.replace(own_identity(), **change)
    with pytest.raises(PluginError, match=r"the engine's process is of another version than this process: .* not .*"):
        check_identity(other, "the engine's process")


def test_processes_that_find_the_same_plugins_agree_in_any_order() -> None:
    found = components_of(load_catalogue())
    assert any(one.kind == "policy" and one.name == "fcfs" and one.distribution == "tokenyard" for one in found)
    check_components(found[::-1], found, "the engine's process")


def test_plg_04_a_difference_of_plugins_is_one_error_that_names_each() -> None:
    ours = components_of(load_catalogue())
    theirs = [*ours[1:], ComponentMessage("policy", "odd", "third-party", "2")]
    with pytest.raises(PluginError) as raised:
        check_components(theirs, ours, "the front end")
    message = str(raised.value)
    assert "only the front end has policy 'odd' of third-party 2" in message
    assert f"the front end lacks {ours[0].kind} '{ours[0].name}' of tokenyard" in message
    assert "\n" not in message


def test_another_version_of_a_plugin_is_a_difference() -> None:
    ours = [ComponentMessage("policy", "odd", "third-party", "1")]
    with pytest.raises(PluginError, match=r"only it has policy 'odd' of third-party 2; it lacks .* third-party 1"):
        check_components([ComponentMessage("policy", "odd", "third-party", "2")], ours, "it")
