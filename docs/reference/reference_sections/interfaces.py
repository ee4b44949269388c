"""The contracts of tokenyard.interfaces, and the data that crosses them."""

from __future__ import annotations

import importlib
import inspect
from enum import Enum
from types import ModuleType

from tokenyard import interfaces

from reference_sections.markdown import bullet, code, fenced, joined, table
from reference_sections.source import (
    MethodDoc,
    bases_of,
    constants_of,
    doc_of,
    fields_of,
    functions_of,
    members_of,
    methods_of,
)

_MODULES = (
    "engine_core",
    "scheduler",
    "policy",
    "outcomes",
    "columns",
    "turns",
    "alone",
    "client_counters",
    "option_checks",
    "predictor",
    "latency",
    "workload",
    "kv_cache",
    "eviction",
    "attention",
    "executor",
    "observer",
    "logits_processor",
)
_DATA = ("request", "scheduler_output", "runner_output", "engine_outputs", "kv_events", "clock", "platform")


def contracts() -> str:
    """One section for each module of tokenyard.interfaces; the abstract class first, functions last."""
    return joined(_contract(importlib.import_module(f"tokenyard.interfaces.{name}")) for name in _MODULES)


def data() -> str:
    """One section for each public module whose types stand in the signatures of the interfaces."""
    return joined(_section(importlib.import_module(f"tokenyard.{name}")) for name in _DATA)


def _contract(module: ModuleType) -> str:
    functions = [row for row in functions_of(module) if row.name in interfaces.__all__]
    constants = [row for row in constants_of(module) if row.name in interfaces.__all__]
    return joined(
        [
            _section(module),
            *(joined([f"### {row.name}", f"{code(row.signature)}: {row.doc}"]) for row in constants),
            *(joined([f"### {row.name}", method(row)]) for row in functions),
        ]
    )


def _section(module: ModuleType) -> str:
    owners = _public_classes(module)
    about = doc_of(module)
    main, colon, rest = about.partition(": ")
    if colon and main in {owner.__name__ for owner in owners}:
        owners.sort(key=lambda owner: owner.__name__ != main)
        about = rest[:1].upper() + rest[1:]
    return joined([f"## {code(module.__name__)}", about, *(class_section(owner) for owner in owners)])


def _public_classes(module: ModuleType) -> list[type]:
    """What a module defines: in tokenyard.interfaces what is listed there, elsewhere what has no underscore."""
    is_interface = module.__name__.startswith("tokenyard.interfaces.")
    found = [member for member in vars(module).values() if inspect.isclass(member)]
    return [
        owner
        for owner in found
        if owner.__module__ == module.__name__
        and (owner.__name__ in interfaces.__all__ if is_interface else not owner.__name__.startswith("_"))
    ]


def class_section(owner: type) -> str:
    """A class: its contract, its fields or members, its methods."""
    bases = ", ".join(bases_of(owner))
    title = f"### {owner.__name__}" + (f" ({bases})" if bases else "")
    return joined([title, doc_of(owner), members(owner), *(method(row) for row in methods_of(owner))])


def members(owner: type) -> str:
    """The table of a class's fields and properties, or of an enum's members."""
    if issubclass(owner, Enum):
        return table(("member", "value"), ((code(name), code(value)) for name, value in members_of(owner)))
    rows = fields_of(owner)
    if not rows:
        return ""
    return table(
        ("name", "type", "default", "meaning"),
        ((code(row.name), code(row.annotation), code(row.default or ""), row.meaning) for row in rows),
    )


def method(row: MethodDoc) -> str:
    """A method: its signature, then its docstring."""
    if "\n" in row.signature:  # source lines that end with the colon
        return bullet(f"- {code(row.name)}", joined([fenced(f"{row.signature} ..."), row.doc]))
    return bullet(f"- {code(row.signature)}", row.doc)
