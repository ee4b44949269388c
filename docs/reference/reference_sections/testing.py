"""The public names of tokenyard.testing: the harness, and the rules of the contract suites."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator

from tokenyard import testing
from tokenyard.testing import EngineHarness, RequestRecord, ScriptedExecutor, attention
from tokenyard.testing.contracts.base import Contract
from tokenyard.testing.errors import ContractViolation, MissingExtraError
from tokenyard.testing.parts import catalogue_with
from tokenyard.testing.views import KVView

from reference_sections.interfaces import members, method
from reference_sections.markdown import bullet, code, joined, table
from reference_sections.source import constructor_of, doc_of, methods_of

_RULE = re.compile(r"`(?P<id>[\w.]+)`: (?P<text>.+)", re.DOTALL)


def names() -> str:
    """Every public name with the place where it is described."""
    rows = ((f"[{code(name)}](#{name.lower()})", _first_line(name)) for name in testing.__all__)
    return table(("name", "what it is"), rows)


def _first_line(name: str) -> str:
    owner = testing.__getattr__(name)
    if isinstance(owner, type) and issubclass(owner, Contract):
        return doc_of(importlib.import_module(owner.__module__)).partition(": ")[2].rstrip(".")
    return doc_of(owner).partition("\n")[0]


def harness() -> str:
    """EngineHarness with its arguments, what it shows and what it does; then what it hands out."""
    arguments = [
        (code(field.name), code(field.annotation), code(field.default or "")) for field in constructor_of(EngineHarness)
    ]
    blocks = ["### EngineHarness", doc_of(EngineHarness), table(("argument", "type", "default"), arguments)]
    blocks += [members(EngineHarness), *(method(row) for row in methods_of(EngineHarness))]
    for owner in (RequestRecord, KVView):
        blocks += [f"### {owner.__name__}", doc_of(owner), members(owner)]
    return joined([*blocks, "### ScriptedExecutor", doc_of(ScriptedExecutor), _catalogue_with()])


def _catalogue_with() -> str:
    signature = f"{catalogue_with.__name__}{inspect.signature(catalogue_with)}".replace("'", "")
    return joined([f"### {catalogue_with.__name__}", bullet(f"- {code(signature)}", doc_of(catalogue_with))])


def attention_steps() -> str:
    """The public functions of tokenyard.testing.attention; its data classes are told in the prose beside them."""
    functions = (
        attention.make_case,
        attention.expect_attention,
        attention.reference,
        attention.make_batch,
        attention.alone,
        attention.random_tables,
        attention.tables_of,
        attention.padded_table,
        attention.slot_mapping,
        attention.fused_rows,
    )
    return joined(
        bullet(f"- {code(f'{one.__name__}{inspect.signature(one)}'.replace(chr(39), ''))}", doc_of(one))
        for one in functions
    )


def contracts() -> str:
    """How a suite is used, then each suite with its rules."""
    suites = [testing.__getattr__(name) for name in testing.__all__ if name.endswith("Contract")]
    sections = (
        joined([f"### {suite.__name__}", doc_of(suite), table(("rule", "what must hold"), _rules(suite))])
        for suite in suites
        if isinstance(suite, type)
    )
    return joined([doc_of(Contract), *sections])


def _rules(suite: type) -> Iterator[tuple[str, str]]:
    """The rule that each test's docstring states; two tests may look at one rule from two sides."""
    for row in methods_of(suite):
        if row.name.startswith("test_"):
            match = _RULE.fullmatch(row.doc)
            if match is None:
                raise LookupError(f"{suite.__name__}.{row.name} does not state its rule as `id`: text")
            yield code(match["id"]), match["text"]


def errors() -> str:
    """What is raised in tests."""
    return joined(joined([f"### {owner.__name__}", doc_of(owner)]) for owner in (ContractViolation, MissingExtraError))
