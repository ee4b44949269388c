"""Finding and loading plugins: what is installed, and what happens to a broken one."""

from __future__ import annotations

import dataclasses
import logging
import re
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest
from tokenyard.catalogue import format_api
from tokenyard.config import PluginsConfig
from tokenyard.descriptors import PLUGIN_API, PolicyDescriptor
from tokenyard.errors import PluginConflictError, PluginError
from tokenyard.interfaces import PolicyContext, RequestView, SchedulerView, SchedulingPolicy
from tokenyard.platform import Platform
from tokenyard.plugins import forget_plugins, load_catalogue

if TYPE_CHECKING:
    from tokenyard.catalogue import Catalogue

OURS = format_api(PLUGIN_API)
BROKEN = ("raises_import_error", "raises_system_exit", "broken_syntax")


class Install(Protocol):
    def __call__(self, *names: str) -> None: ...


def third_party(
    allow: tuple[str, ...] | None = None, disabled: tuple[str, ...] = (), strict: bool = False
) -> PluginsConfig:
    """Settings that leave the built-in plugins out, so that a test sees its own packages only."""
    return PluginsConfig(allow=allow, disabled=("tokenyard", *disabled), strict=strict)


def error_of(catalogue: Catalogue) -> str:
    """The error of the only plugin, which failed."""
    (failure,) = catalogue.failures
    assert catalogue.entries() == []
    assert "\n" not in failure.error
    return failure.error


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


# ---- A plugin that works ---------------------------------------------------------------------------------------------


def test_an_installed_package_provides_its_components_and_config_paths(install: Install) -> None:
    install("good")
    catalogue = load_catalogue(third_party())
    entry = catalogue.get("policy", "good_policy")
    assert isinstance(entry.descriptor, PolicyDescriptor)
    assert (entry.provider.distribution, entry.provider.version, entry.provider.entry_point) == (
        "tokenyard-good",
        "1.0",
        "good",
    )
    assert catalogue.get("eviction", "good_rule").kind == "eviction"
    assert catalogue.config_paths == [(entry.provider, "pkg://tokenyard_good.configs")]


def test_the_result_does_not_depend_on_the_order_of_the_path(install: Install) -> None:
    install("good", "same_name_a", "frozen_v1_0")
    one = load_catalogue(third_party()).entries()
    sys.path[:3] = reversed(sys.path[:3])
    forget_plugins()
    assert load_catalogue(third_party()).entries() == one
    assert [entry.name for entry in one] == ["good_rule", "contested", "frozen_shortest_prompt", "good_policy"]


def test_a_second_load_with_the_same_settings_is_the_same_object(install: Install) -> None:
    install("good")
    assert load_catalogue(third_party()) is load_catalogue(third_party())
    assert load_catalogue(third_party()) is not load_catalogue(third_party(allow=()))


def test_of_two_copies_of_one_distribution_only_the_first_on_the_path_counts(
    install: Install, packages_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PLG-03: two copies of a distribution are one provider, not a conflict."""
    install("good")
    shutil.copytree(packages_dir / "good", tmp_path / "copy", ignore=shutil.ignore_patterns("__pycache__"))
    info = tmp_path / "copy" / "tokenyard_good-1.0.dist-info" / "METADATA"
    info.write_text(info.read_text().replace("Version: 1.0", "Version: 2.0"))
    monkeypatch.syspath_prepend(tmp_path / "copy")
    catalogue = load_catalogue(third_party())
    assert catalogue.conflicts == ()
    assert catalogue.get("policy", "good_policy").provider.version == "2.0"


# ---- The plugin API's versions ---------------------------------------------------------------------------------------


def frozen_policy(catalogue: Catalogue, long_prompts_last: bool) -> SchedulingPolicy:
    descriptor = catalogue.get_scheduler_or_policy("frozen_shortest_prompt").descriptor
    if not isinstance(descriptor, PolicyDescriptor):
        raise TypeError(type(descriptor))
    options = descriptor.options_type(long_prompts_last=long_prompts_last)
    context = PolicyContext(seed=0, max_num_seqs=4, max_num_batched_tokens=64)
    policy: SchedulingPolicy = descriptor.factory(options, context)
    return policy


@dataclasses.dataclass(frozen=True)
class FakeRequest:
    """As much of a RequestView as the frozen package reads."""

    num_prompt_tokens: int
    arrival_time: float


def test_a_frozen_package_for_api_1_0_loads_and_decides(install: Install) -> None:
    install("frozen_v1_0")
    catalogue = load_catalogue(third_party(strict=True))
    descriptor = catalogue.get("policy", "frozen_shortest_prompt").descriptor
    assert descriptor.api_version == (1, 0)
    assert descriptor.tested_on == {"cpu"}  # a field of 1.1, which the package does not know
    assert catalogue.get("policy", "frozen_shortest_prompt").unavailable_reasons(Platform()) == []
    policy = frozen_policy(catalogue, long_prompts_last=True)
    view: SchedulerView = object()  # type: ignore[assignment]
    requests: list[RequestView] = [FakeRequest(9, 0.5), FakeRequest(40, 0.0), FakeRequest(3000, -99.0)]  # type: ignore[list-item]
    keys = [policy.waiting_key(request, view) for request in requests]
    assert keys == [(0, 59.0), (0, 40.0), (1, 3000 - 9900.0)]
    assert policy.victim(requests, 1, view).num_prompt_tokens == 3000


def test_a_component_for_another_major_is_kept_and_refused_while_its_neighbour_loads(install: Install) -> None:
    install("other_major")
    catalogue = load_catalogue(third_party())
    assert catalogue.names("policy") == ["from_api_1"]
    assert catalogue.failures == ()
    with pytest.raises(PluginError, match=r"'from_api_2' of plugin 'other_major' .* was built for plugin API 2\.0"):
        catalogue.get("policy", "from_api_2")


def test_a_component_for_a_newer_minor_is_kept_and_refused(install: Install) -> None:
    install("newer_minor")
    catalogue = load_catalogue(third_party())
    assert [entry.name for entry in catalogue.incompatible] == ["from_api_1_99"]
    with pytest.raises(
        PluginError, match=rf"built for plugin API 1\.99 and this Tokenyard has {re.escape(OURS)}: upgrade"
    ):
        catalogue.get("policy", "from_api_1_99")


# ---- Broken plugins --------------------------------------------------------------------------------------------------


def test_plg_01_broken_plugins_leave_the_good_one_working(install: Install, caplog: pytest.LogCaptureFixture) -> None:
    """PLG-01: ImportError, SystemExit and a syntax error; one warning each with distribution, entry point and error."""
    install("good", *BROKEN)
    catalogue = load_catalogue(third_party())
    assert catalogue.names("policy") == ["good_policy"]
    errors = {failure.provider.entry_point: failure.error for failure in catalogue.failures}
    assert errors["raises_import_error"] == "ModuleNotFoundError: No module named 'a_package_that_nobody_has'"
    assert errors["raises_system_exit"] == "SystemExit: this plugin wants the process to end"
    assert errors["broken_syntax"].startswith("SyntaxError: ")
    assert "tokenyard_broken_syntax.py, line 3" in errors["broken_syntax"]
    for name in BROKEN:
        warned = [text for text in warnings_in(caplog) if name in text]
        assert len(warned) == 1
        assert f"plugin '{name}' of tokenyard-{name.replace('_', '-')} 1.0" in warned[0]
        assert errors[name] in warned[0]


def test_plg_01_a_broken_plugin_is_run_and_warned_about_once_in_a_process(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install("good", "raises_system_exit")
    for config in (third_party(), third_party(disabled=("good",)), third_party(allow=("raises_system_exit",))):
        assert len(load_catalogue(config).failures) == 1
    assert len(warnings_in(caplog)) == 1


@pytest.mark.parametrize("broken", BROKEN)
def test_plg_01_strict_raises_for_a_broken_plugin(install: Install, broken: str) -> None:
    install("good", broken)
    with pytest.raises(
        PluginError, match=rf"plugins\.strict=true, and plugin '{broken}' of .* is installed but broken"
    ):
        load_catalogue(third_party(strict=True))


def test_strict_names_every_problem_at_once(install: Install) -> None:
    install("raises_import_error", "same_name_a", "same_name_b", "newer_minor")
    with pytest.raises(PluginError) as caught:
        load_catalogue(third_party(strict=True))
    for part in ("raises_import_error", "'contested' is provided by", "'from_api_1_99'"):
        assert part in str(caught.value)


def test_plg_01_a_plugin_that_raises_half_way_is_rolled_back_whole(install: Install) -> None:
    install("raises_halfway")
    catalogue = load_catalogue(third_party())
    error = error_of(catalogue)
    assert error == "RuntimeError: the second half is missing (caused by KeyError: 'the root of it')"
    assert catalogue.config_paths == []


def test_plg_01_a_broken_plugin_that_the_config_names_is_fatal(install: Install) -> None:
    install("raises_import_error")
    with pytest.raises(PluginError, match="is installed but broken: ModuleNotFoundError"):
        load_catalogue(third_party()).get_scheduler_or_policy("raises-import-error")


def test_an_interrupt_while_plugins_load_is_not_swallowed(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("good")

    def interrupt(entry_point: metadata.EntryPoint) -> object:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(metadata.EntryPoint, "load", interrupt)
        with pytest.raises(KeyboardInterrupt):
            load_catalogue(third_party())
    assert load_catalogue(third_party()).names("policy") == ["good_policy"]


def test_a_misspelt_hook_names_the_nearest_hook(install: Install) -> None:
    install("misspelt_hook")
    assert error_of(load_catalogue(third_party())) == (
        "unknown hook 'tokenyard_policys'; did you mean 'tokenyard_policies'?"
    )


def test_a_hook_without_its_decorator_is_not_passed_over(install: Install) -> None:
    install("unmarked_hook")
    expected = "function 'tokenyard_policies' lacks the decorator @tokenyard.hookimpl"
    assert error_of(load_catalogue(third_party())) == expected


def test_a_descriptor_from_the_wrong_hook_names_the_rule(install: Install) -> None:
    install("wrong_descriptor")
    assert error_of(load_catalogue(third_party())) == (
        "tokenyard_schedulers yielded a value of type PolicyDescriptor; it takes SchedulerDescriptor only"
    )


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("", "it has no hook; an entry point names a module with functions marked @tokenyard.hookimpl"),
        ("@hookimpl\ndef tokenyard_policies(): return None", "tokenyard_policies returned None; return a list"),
        ("@hookimpl\ndef tokenyard_policies(): return 7", "tokenyard_policies returned one int"),
        ("@hookimpl\ndef tokenyard_config_paths(): return 'pkg://a'", "tokenyard_config_paths returned one str"),
        (
            "@hookimpl\ndef tokenyard_policies():\n"
            "    return tokenyard.PolicyDescriptor(name='x', api_version=(1, 1), factory=print)",
            "tokenyard_policies returned one PolicyDescriptor",
        ),
        (
            "@hookimpl\ndef tokenyard_policies():\n"
            "    yield tokenyard.PolicyDescriptor(name='x', api_version=(1, 9), factory=print, colour='red')",
            f"unexpected keyword argument 'colour' (this Tokenyard has plugin API {OURS}; a newer one may know it)",
        ),
        ("@hookimpl\ndef tokenyard_policies(context): return []", "PluginValidationError: "),
        ("@hookimpl(wrapper=True)\ndef tokenyard_policies(): return (yield)", "is a wrapper"),
        ("@hookimpl(hookwrapper=True)\ndef tokenyard_policies(): yield", "is a wrapper"),
        ("import tokenyard.plugins\ntokenyard.plugins.load_catalogue()", "asked for the catalogue while it was being"),
    ],
)
def test_a_plugin_that_does_not_keep_the_contract_is_told_how(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, error: str
) -> None:
    write_package(tmp_path, "made_up", f"import tokenyard\nfrom tokenyard import hookimpl\n{source}\n")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert error in error_of(load_catalogue(third_party()))
    finally:
        sys.modules.pop("made_up", None)


def test_a_hook_of_a_later_api_may_be_marked_optional(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (
        "from tokenyard import hookimpl\n"
        "@hookimpl\ndef tokenyard_config_paths(): return ['pkg://made_up.configs']\n"
        "@hookimpl(optionalhook=True)\ndef tokenyard_of_the_future(): return []\n"
    )
    write_package(tmp_path, "made_up", source)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        catalogue = load_catalogue(third_party(strict=True))
    finally:
        sys.modules.pop("made_up", None)
    assert [path for _, path in catalogue.config_paths] == ["pkg://made_up.configs"]


def test_an_entry_point_that_is_no_object_reference_is_that_plugin_s_failure(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("good")
    write_package(tmp_path, "made_up", "", reference="not a module!")
    monkeypatch.syspath_prepend(tmp_path)
    catalogue = load_catalogue(third_party())
    assert [failure.provider.entry_point for failure in catalogue.failures] == ["made_up"]
    assert catalogue.names("policy") == ["good_policy"]


def test_a_half_removed_distribution_does_not_hide_the_others(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("good")
    write_package(tmp_path, "made_up", "raise ImportError('gone')")
    (tmp_path / "made_up-1.0.dist-info" / "METADATA").unlink()
    monkeypatch.syspath_prepend(tmp_path)
    catalogue = load_catalogue(third_party())
    assert catalogue.names("policy") == ["good_policy"]
    assert "(unknown distribution)" in str(catalogue.failures[0])


def write_package(folder: Path, name: str, source: str, reference: str | None = None) -> None:
    """A distribution and a module of one name, with one entry point of that name."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[tokenyard]\n{name} = {reference or name}\n")
    (folder / f"{name}.py").write_text(source)


# ---- Conflicts -------------------------------------------------------------------------------------------------------


def test_two_distributions_of_one_name_warn_once_and_are_fatal_when_chosen(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install("same_name_a", "same_name_b", "good")
    catalogue = load_catalogue(third_party())
    load_catalogue(third_party(disabled=("good",)))
    (warning,) = warnings_in(caplog)
    assert "tokenyard-same-name-a" in warning
    assert catalogue.get("policy", "good_policy").name == "good_policy"
    with pytest.raises(PluginConflictError, match=r"tokenyard-same-name-a 1\.0 and by .* tokenyard-same-name-b 1\.0"):
        catalogue.get("policy", "contested")


def test_the_remedy_that_a_conflict_names_works(install: Install) -> None:
    install("same_name_a", "same_name_b")
    with pytest.raises(PluginConflictError, match=r"plugins\.disabled=\[tokenyard-same-name-b\]"):
        load_catalogue(third_party()).get("policy", "contested")
    catalogue = load_catalogue(third_party(disabled=("tokenyard-same-name-b",)))
    assert catalogue.get("policy", "contested").provider.distribution == "tokenyard-same-name-a"


# ---- Discovery ------------------------------------------------------------------------------------------------------


def test_plg_07_a_failed_discovery_is_an_error_and_the_next_call_works(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PLG-07: entry_points() raises once; the second call loads the plugins."""
    install("good")

    def fail(**params: str) -> metadata.EntryPoints:
        raise OSError("the disk is busy")

    with monkeypatch.context() as patch:
        patch.setattr(metadata, "entry_points", fail)
        with pytest.raises(PluginError, match="the installed plugins cannot be listed: OSError: the disk is busy"):
            load_catalogue(third_party())
    assert load_catalogue(third_party()).names("policy") == ["good_policy"]
