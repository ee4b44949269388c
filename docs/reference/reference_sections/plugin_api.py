"""Hooks and descriptors."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable

from tokenyard import hookspecs
from tokenyard.descriptors import PLUGIN_API, Descriptor
from tokenyard.hookspecs import DESCRIPTOR_TYPES, TokenyardHooks

from reference_sections.markdown import code, fenced, joined, table
from reference_sections.source import FieldDoc, class_node, comment_lines, doc_of, fields_of

_PHASE = re.compile(r"-{4} (.+?) -{4,}")
_EXAMPLE = "@hookimpl"


def version() -> str:
    """The plugin API of this version."""
    major, minor = PLUGIN_API
    return (
        f"This version of Tokenyard serves plugin API **{major}.{minor}** ({code(f'PLUGIN_API = ({major}, {minor})')})."
    )


def hooks() -> str:
    """Every hook under its phase."""
    _, node = class_node(TokenyardHooks)
    phases = {line: match[1] for line, text in comment_lines(hookspecs).items() if (match := _PHASE.match(text))}
    blocks: list[str] = []
    shown = ""
    for item in node.body:
        if not isinstance(item, ast.FunctionDef):
            continue
        phase = phases[max(line for line in phases if line < item.lineno)]
        if phase != shown:
            blocks.append(f"### {phase}")
            shown = phase
        blocks.append(_hook(item.name, vars(TokenyardHooks)[item.name]))
    return joined(blocks)


def _hook(name: str, function: Callable[..., object]) -> str:
    lines = (inspect.getdoc(function) or "").splitlines()
    start = next(number for number, line in enumerate(lines) if line.strip() == _EXAMPLE)
    text, example = "\n".join(lines[:start]).strip(), textwrap.dedent("\n".join(lines[start:]))
    yields = DESCRIPTOR_TYPES.get(name)
    kind = f"Yields [{code(yields.__name__)}](#{yields.__name__.lower()})." if yields else "Yields strings."
    return joined([f"#### {name}", f"{text}\n\n{kind}", fenced(example)])


def descriptors() -> str:
    """The fields that all descriptors have, then each class with its own."""
    common = _field_table(fields_of(Descriptor))
    blocks = [doc_of(Descriptor), common]
    for hook, owner in DESCRIPTOR_TYPES.items():
        blocks += [
            f"### {owner.__name__}",
            f"{doc_of(owner)}\n\nYielded by [{code(hook)}](#{hook}); its kind is {code(owner.kind)}.",
            _field_table(fields_of(owner)),
        ]
    return joined(blocks)


def _field_table(rows: list[FieldDoc]) -> str:
    return table(
        ("field", "type", "default"),
        ((code(row.name), code(row.annotation), _default(row)) for row in rows),
    )


def _default(field: FieldDoc) -> str:
    return "required" if field.default is None else code(field.default)
