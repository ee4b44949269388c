"""The package: what importing it costs, what it says without its extra, and the fixture for pytest."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenyard.testing
from tokenyard import PolicyDescriptor
from tokenyard.config import NoOptions
from tokenyard.descriptors import Descriptor
from tokenyard.errors import ConfigError
from tokenyard.interfaces import SchedulingPolicy
from tokenyard.testing import EngineHarness, PolicyContract
from tokenyard.testing.contracts.base import Contract
from tokenyard.testing.pytest_plugin import MakeHarness

SUITES = [
    getattr(tokenyard.testing, name) for name in tokenyard.testing.__all__ if name.endswith("Contract")
]  # EngineCoreContract, ...


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_pytest_plugin_imports_nothing_heavy() -> None:
    code = """
        import sys
        import tokenyard.testing.pytest_plugin
        heavy = ("torch", "hydra", "omegaconf", "hypothesis", "numpy", "transformers")
        print([name for name in heavy if name in sys.modules])
    """
    assert python(code) == "[]"


def test_the_harness_works_without_torch_and_without_the_extra() -> None:
    code = """
        import sys
        sys.modules["hypothesis"] = sys.modules["pytest"] = None
        from tokenyard.testing import EngineHarness
        harness = EngineHarness(["scheduler=fcfs"])
        harness.add([1, 2, 3], max_tokens=2)
        harness.run()
        harness.check_idle()
        print("torch" in sys.modules)
    """
    assert python(code) == "False"


@pytest.mark.parametrize("missing", ["hypothesis", "pytest"])
def test_without_the_extra_a_suite_says_what_to_install(missing: str) -> None:
    code = f"""
        import sys
        sys.modules[{missing!r}] = None
        from tokenyard.errors import UserError
        try:
            from tokenyard.testing import PolicyContract
        except UserError as error:
            print(error)
    """
    said = python(code)
    assert said.endswith("pip install tokenyard[testing]")
    assert missing in said


def test_every_public_name_can_be_loaded_and_is_sorted() -> None:
    assert (
        sorted(tokenyard.testing.__all__, key=lambda name: (not name[0].isupper(), name)) == tokenyard.testing.__all__
    )
    assert all(getattr(tokenyard.testing, name) for name in tokenyard.testing.__all__)
    assert set(tokenyard.testing.__all__) <= set(dir(tokenyard.testing))
    with pytest.raises(AttributeError, match="no_such_name"):
        tokenyard.testing.no_such_name  # noqa: B018


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.__name__)
def test_every_rule_of_a_suite_says_its_id_and_what_holds(suite: type[Contract]) -> None:
    tests = [method for name, method in inspect.getmembers(suite, inspect.isfunction) if name.startswith("test_")]
    assert len(tests) >= 5
    for test in tests:
        assert re.match(r"`[a-z_]+\.[a-z_]+`: [a-zA-Z`].*\.$", inspect.getdoc(test) or ""), test.__name__


def test_no_check_of_a_suite_is_an_assert_that_optimisation_removes() -> None:
    folder = Path(tokenyard.testing.__file__).parent
    for path in folder.rglob("*.py"):
        assert not [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Assert)], path


def test_the_fixture_makes_harnesses(engine_harness: MakeHarness) -> None:
    harness = engine_harness(["scheduler=fcfs", "kv_cache.num_blocks=10"])
    harness.add([1, 2, 3], max_tokens=2)
    harness.step()
    assert harness.kv.num_free == 9


FIXTURE_USERS = """
made = []

def test_right(engine_harness):
    made.append(engine_harness(["scheduler=fcfs"]))
    made[0].add([1, 2, 3])
    made[0].step()

def test_it_was_shut_down():
    assert made[0].executor.num_shutdowns == 1

def test_left_wrong(engine_harness):
    harness = engine_harness(["scheduler=fcfs"])
    harness.add([1, 2, 3], "a")
    harness.step()
    harness.kv_cache_manager.free(harness.request("a"))
"""


def test_the_fixture_checks_and_shuts_down_what_it_made(tmp_path: Path) -> None:
    said = run_pytest(tmp_path, FIXTURE_USERS)
    assert "3 passed, 1 error" in said
    assert "ContractViolation: table.covers_computed" in said


def run_pytest(folder: Path, code: str) -> str:
    file = folder / "test_theirs.py"
    file.write_text(code, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder).stdout


TYPED = """
from collections.abc import Sequence
from typing import TypeVar
from tokenyard import PolicyDescriptor
from tokenyard.config import NoOptions
from tokenyard.descriptors import Descriptor
from tokenyard.interfaces import PolicyContext, SchedulingPolicy
from tokenyard.testing import EngineHarness, PolicyContract, catalogue_with
from tokenyard.testing.pytest_plugin import MakeHarness

def make(options: NoOptions, context: PolicyContext) -> SchedulingPolicy:
    return SchedulingPolicy()

def descriptor() -> PolicyDescriptor[NoOptions]:
    return PolicyDescriptor(name="mine", api_version=(1, 2), factory=make)

class TestMine(PolicyContract):
    overrides = ["scheduler=mine"]
    max_examples = 5

    def descriptors(self) -> Sequence[Descriptor[NoOptions]]:
        return [descriptor()]

PartT = TypeVar("PartT")

def as_it_is(part: PartT, /) -> PartT:
    return part

def test_what_else_there_is(engine_harness: MakeHarness) -> None:
    first = engine_harness(None, vocab_size=100, eos_token_id=None, group_windows=(None, 4), step_seconds=0.5)
    second = engine_harness(config=first.config, decorate=as_it_is, clock=first.clock, checks=False)
    assert second.config == first.config

def test_order(engine_harness: MakeHarness) -> None:
    harness: EngineHarness = engine_harness(["scheduler=mine"], catalogue=catalogue_with(descriptor()))
    name: str = harness.add([1, 2], max_tokens=3)
    harness.step({name: [4]})
    tokens: list[int] = harness.request(name).output_token_ids
    assert tokens == [4]
"""


def test_the_fixture_takes_what_a_harness_takes() -> None:
    taken = inspect.signature(MakeHarness.__call__).parameters
    made_with = inspect.signature(EngineHarness).parameters
    assert [(name, row.kind, row.annotation) for name, row in taken.items() if name != "self"] == [
        (name, row.kind, row.annotation) for name, row in made_with.items()
    ]


NAMELESS = """
from tokenyard import PolicyDescriptor
from tokenyard.interfaces import SchedulingPolicy
from tokenyard.testing import *

def policy(name):
    return PolicyDescriptor(name=name, api_version=(1, 2), factory=lambda options, context: SchedulingPolicy())

class TestIt({suite}):
    max_examples = 1
    {body}
"""


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.__name__)
def test_a_suite_that_does_not_say_what_it_tests_is_refused(suite: type[Contract]) -> None:
    made = type("TestNothing", (suite,), {})()
    with pytest.raises(
        ConfigError, match=r"^TestNothing does not say which \w+ it tests: set overrides = \['[\w.]+=.*'\]$"
    ):
        made.load()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("override = ['scheduler=priority']", "(it has 'override'; is that meant?)"),
        ("overrides = ['scheduler.max_num_seqs=3']", "set overrides = ['scheduler=NAME']"),
        ("overrides = ['scheduler=batch']", "set overrides = ['scheduler=NAME']"),
        ("overrides = 'scheduler=priority'", "overrides are a list of strings such as"),
        ("descriptors = lambda self: [policy('one'), policy('two')]", "descriptors() gives one, two"),
    ],
)
def test_a_suite_that_would_test_the_default_says_what_to_set(body: str, words: str, tmp_path: Path) -> None:
    said = run_pytest(tmp_path, NAMELESS.format(suite="PolicyContract", body=body))
    assert words in said
    assert " passed" not in said


def test_the_only_part_of_descriptors_is_what_is_tested() -> None:
    class TestMine(PolicyContract):
        def descriptors(self) -> Sequence[Descriptor[NoOptions]]:
            return [descriptor]

    descriptor: PolicyDescriptor[NoOptions] = PolicyDescriptor(
        name="only", api_version=(1, 2), factory=lambda options, context: SchedulingPolicy()
    )
    policy = TestMine().load("kv_cache.num_blocks=9").config.scheduler.policy
    assert policy is not None
    assert policy.name == "only"


@pytest.mark.slow
@pytest.mark.parametrize(
    "checker", [["mypy", "--strict"], ["pyright", "--pythonpath", sys.executable]], ids=["mypy", "pyright"]
)
def test_what_a_third_party_writes_is_typed(checker: list[str], tmp_path: Path) -> None:
    pytest.importorskip(checker[0])
    file = tmp_path / "test_theirs.py"
    file.write_text(TYPED, encoding="utf-8")
    command = [sys.executable, "-m", *checker, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_a_third_party_writes_runs(tmp_path: Path) -> None:
    assert re.search(r"\b37 passed\b", run_pytest(tmp_path, TYPED))
