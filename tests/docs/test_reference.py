"""The reference: generated regions are up to date, and what is written by hand beside them holds."""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest
import tokenyard
from tokenyard import descriptor_rules, errors, interfaces, testing
from tokenyard.cli import _COMMANDS
from tokenyard.cli.arguments import Parser
from tokenyard.config import PluginsConfig
from tokenyard.descriptors import PLUGIN_API
from tokenyard.errors import TokenyardError
from tokenyard.hookspecs import DESCRIPTOR_TYPES, HOOK_NAMES
from tokenyard.launch.flags import add_engine_flags
from tokenyard.launch.schema import find_chosen
from tokenyard.plugin_report import Status
from tokenyard.plugins import load_catalogue

ROOT = Path(__file__).resolve().parent.parent.parent
REFERENCE = ROOT / "docs" / "reference"


def page(name: str) -> str:
    return (REFERENCE / f"{name}.md").read_text(encoding="utf-8")


def headings(text: str) -> set[str]:
    return {match.strip("` ") for match in re.findall(r"^#+ ([^(\n]+)", text, re.MULTILINE)}


def rows(text: str, heading: str) -> Iterator[list[str]]:
    """The rows of the first table under a heading."""
    section = re.split(r"^#+ ", text.partition(f"# {heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    for line in lines[2:]:
        yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


# ---- Generated regions ----------------------------------------------------------------------------------------------


def test_the_generated_regions_are_up_to_date(generator: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert generator.main(["--check"]) == 0, capsys.readouterr().err


def test_a_page_that_differs_is_named_by_check_and_written_without_it(
    generator: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(REFERENCE, tmp_path, dirs_exist_ok=True)
    changed = tmp_path / "api.md"
    true_text = changed.read_text(encoding="utf-8")
    changed.write_text(true_text.replace("`temperature`", "`heat`"), encoding="utf-8")
    assert generator.main(["--check"], tmp_path) == 1
    assert "api.md" in capsys.readouterr().err
    assert "`heat`" in changed.read_text(encoding="utf-8")
    assert generator.main([], tmp_path) == 0
    assert changed.read_text(encoding="utf-8") == true_text
    assert generator.main(["--check"], tmp_path) == 0


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<!-- generated: a -->\n<!-- end -->\n", ""),
        ("<!-- generated: a -->\nno end\n", "region 'a' has no end"),
        ("<!-- generated: a -->\n<!-- end -->\n<!-- generated: b -->\n<!-- end -->\n", "region 'b' is filled by no"),
        ("nothing generated\n", "section 'a' stands on 0 pages"),
    ],
)
def test_a_region_without_a_section_or_a_section_without_a_region_is_told(
    generator: ModuleType, text: str, problem: str
) -> None:
    found = list(generator.problems({Path("page.md"): text}, {"a": lambda: "text"}))
    assert any(problem in line for line in found) if problem else not found


# ---- Complete --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", tokenyard.__all__)
def test_every_public_name_is_in_the_reference_and_in_the_changelog(name: str) -> None:
    assert f"[`{name}`]" in page("api")
    changelog = (ROOT / "docs" / "changelog.md").read_text(encoding="utf-8")
    assert re.search(rf"\b{name}\b", changelog)


@pytest.mark.parametrize("name", testing.__all__)
def test_every_name_for_tests_is_in_the_reference_and_in_the_changelog(name: str) -> None:
    assert name in headings(page("testing"))
    assert re.search(rf"\b{name}\b", (ROOT / "docs" / "changelog.md").read_text(encoding="utf-8"))


def test_the_changelog_tells_of_the_plugin_api() -> None:
    changelog = (ROOT / "docs" / "changelog.md").read_text(encoding="utf-8")
    assert f"Plugin API {PLUGIN_API[0]}.{PLUGIN_API[1]}:" in changelog


def test_every_hook_and_every_descriptor_has_a_heading() -> None:
    assert {*HOOK_NAMES, *(owner.__name__ for owner in DESCRIPTOR_TYPES.values())} <= headings(page("plugins"))


def test_every_interface_has_a_heading() -> None:
    assert set(interfaces.__all__) <= headings(page("interfaces"))


def test_every_error_is_listed() -> None:
    owners = [item for item in vars(errors).values() if isinstance(item, type) and issubclass(item, TokenyardError)]
    assert {f"`{owner.__name__}`" for owner in owners} == {row[0] for row in rows(page("api"), "Errors")}


def test_every_command_and_every_visible_flag_is_in_the_reference() -> None:
    text = page("cli")
    assert set(_COMMANDS) <= headings(text)
    for name in _COMMANDS:
        parser: Parser = importlib.import_module(f"tokenyard.cli.{name.replace('-', '_')}").command_parser()
        add_engine_flags(parser, is_server=parser.is_server)
        for action in parser._actions:
            for option in action.option_strings:
                assert re.search(rf"`{option}[` =]", text), option


def test_every_config_key_is_in_the_reference_with_a_meaning() -> None:
    text = page("config")
    chosen = find_chosen({}, load_catalogue(PluginsConfig(allow=())))
    table = [line for line in text.splitlines() if line.startswith("| `")]
    for key in set(chosen.keys()):
        (row,) = [line for line in table if line.startswith(f"| `{key}` |") and line.count(" | ") == 3]
        assert row.rpartition(" | ")[2].strip("| "), f"{key} has no meaning"


# ---- True ------------------------------------------------------------------------------------------------------------


def test_the_exit_codes_are_those_of_the_errors_and_of_the_command_line() -> None:
    owners = [item for item in vars(errors).values() if isinstance(item, type) and issubclass(item, TokenyardError)]
    assert {row[0] for row in rows(page("cli"), "Exit codes")} == {
        "0",
        "130",
        *(str(owner.exit_code) for owner in owners),
    }


def test_every_environment_variable_of_ours_is_listed_and_no_other() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "framework").rglob("*.py")]
    used = set(re.findall(r"\bTOKENYARD_[A-Z_]+\b", "\n".join(sources)))
    listed = {row[0].strip("`") for row in rows(page("cli"), "Environment variables")}
    assert {name for name in listed if name.startswith("TOKENYARD_")} == used


def test_the_statuses_are_those_of_the_listing() -> None:
    guide = (ROOT / "docs" / "how-to" / "choose-a-plugin.md").read_text(encoding="utf-8")
    assert {row[0] for row in rows(guide, "What a status means")} == set(get_args(Status))
    assert all(f"`{status}`" in page("plugins").partition("## Statuses")[2] for status in get_args(Status))


def test_the_naming_rule_is_the_one_that_is_checked() -> None:
    assert f"`{descriptor_rules._NAME.pattern}`" in page("plugins")


def test_no_path_of_a_machine_stands_in_a_page(generator: ModuleType) -> None:
    for path, text in generator.read_pages(REFERENCE).items():
        for part in (str(ROOT), str(Path.home()), "/site-packages/", " object at 0x"):
            assert part not in text, f"{path.name}: {part}"


# ---- Stability -------------------------------------------------------------------------------------------------------


def tier(name: str) -> set[str]:
    (names,) = [row[1] for row in rows(page("plugins"), "What is public") if row[0] == name]
    return set(re.findall(r"`([\w.]+)`", names))


def test_every_module_of_a_tier_exists_and_stands_in_one_tier() -> None:
    assert not tier("public") & tier("provisional")
    for name in tier("public") | tier("provisional"):
        assert importlib.util.find_spec(name) is not None, name


def test_built_in_plugins_and_backends_use_what_is_public_or_provisional() -> None:
    allowed = tier("public") | tier("provisional")
    for folder in ("plugins", "backends"):
        for path in (ROOT / folder).rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
            used = {name for name in imported if name.partition(".")[0] == "tokenyard"}
            assert all(is_within(name, allowed) for name in used), f"{path.name}: {used}"


def is_within(name: str, allowed: set[str]) -> bool:
    """A package of a tier covers its modules; the top package covers itself only."""
    return name in allowed or any(name.startswith(f"{package}.") for package in allowed - {"tokenyard"})
