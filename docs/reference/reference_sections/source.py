"""Classes and functions as their source shows them: fields with their inline comments, signatures as written."""

from __future__ import annotations

import ast
import inspect
import io
import itertools
import textwrap
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import ModuleType

_MAX_LENGTH = 140  # of a signature on one line
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, slots=True)
class FieldDoc:
    """A field of a dataclass, or a property: types and defaults as written, `default` None where there is none."""

    name: str
    annotation: str
    default: str | None
    meaning: str


@dataclass(frozen=True, slots=True)
class MethodDoc:
    """A public method: its signature as written, without `self`."""

    name: str
    signature: str
    doc: str


@dataclass(frozen=True, slots=True)
class _Module:
    text: str
    tree: ast.Module
    comments: Mapping[int, str]  # by line


@cache
def _read(module: ModuleType) -> _Module:
    text = inspect.getsource(module)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = {
        token.start[0]: token.string.removeprefix("#").strip() for token in tokens if token.type == tokenize.COMMENT
    }
    return _Module(text, ast.parse(text), comments)


def comment_lines(module: ModuleType) -> Mapping[int, str]:
    """The comments of a module by line, without their marks."""
    return _read(module).comments


def class_node(owner: type) -> tuple[_Module, ast.ClassDef]:
    """A class's place in its module."""
    module = _read(_module_of(owner))
    for node in module.tree.body:
        if isinstance(node, ast.ClassDef) and node.name == owner.__name__:
            return module, node
    raise LookupError(f"{owner.__module__} defines no class {owner.__name__} at its top level")


def _module_of(owner: type) -> ModuleType:
    module = inspect.getmodule(owner)
    if module is None:
        raise LookupError(f"{owner.__qualname__} belongs to no module")
    return module


def doc_of(owner: object) -> str:
    """A docstring, dedented; empty where there is none of its own."""
    return inspect.getdoc(owner) or ""


def bases_of(owner: type) -> list[str]:
    """The base classes as written."""
    module, node = class_node(owner)
    return [_segment(module, base) for base in node.bases]


def fields_of(owner: type) -> list[FieldDoc]:
    """The public annotated fields that the class itself defines, class variables with a default too; its properties."""
    module, node = class_node(owner)
    found = [_field(module, item) for item in node.body if isinstance(item, ast.AnnAssign)]
    return [*(field for field in found if _is_told(field)), *_properties(module, node)]


def _is_told(field: FieldDoc) -> bool:
    """A class variable without a default is for the framework's own classes."""
    return not field.annotation.startswith("ClassVar") or (field.default is not None and not field.name.startswith("_"))


def _field(module: _Module, node: ast.AnnAssign) -> FieldDoc:
    default = None if node.value is None else _default(module, node.value)
    comment = module.comments.get(node.end_lineno or node.lineno, "")
    return FieldDoc(_segment(module, node.target), _segment(module, node.annotation), default, comment)


def _default(module: _Module, node: ast.expr) -> str:
    """What a caller would write: the default inside `field(...)`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "field":
        for keyword in node.keywords:
            if keyword.arg == "default":
                return _segment(module, keyword.value)
            if keyword.arg == "default_factory":
                made = _segment(module, keyword.value)
                return {"list": "[]", "dict": "{}"}.get(made, f"{made}()")
    return _segment(module, node)


def _properties(module: _Module, node: ast.ClassDef) -> Iterator[FieldDoc]:
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and _is_property(item) and item.returns is not None:
            yield FieldDoc(item.name, _segment(module, item.returns), None, ast.get_docstring(item) or "")


def _is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    names = {decorator.id for decorator in node.decorator_list if isinstance(decorator, ast.Name)}
    return bool(names & {"property", "cached_property"})


def members_of(owner: type) -> list[tuple[str, str]]:
    """Names and values of an enum's members, as written."""
    module, node = class_node(owner)
    return [
        (_segment(module, item.targets[0]), _segment(module, item.value))
        for item in node.body
        if isinstance(item, ast.Assign)
    ]


def methods_of(owner: type, user: type | None = None) -> list[MethodDoc]:
    """The public methods that the class itself defines; class methods are called on `user`, a class made of it."""
    module, node = class_node(owner)
    return [
        MethodDoc(item.name, _called_on(user or owner, item) + _signature(module, item), ast.get_docstring(item) or "")
        for item in node.body
        if isinstance(item, _FUNCTIONS) and not item.name.startswith("_") and not _is_property(item)
    ]


def constants_of(module: ModuleType) -> list[MethodDoc]:
    """The names of a module with a docstring behind their value."""
    read, found = _read(module), []
    for node, after in itertools.pairwise(read.tree.body):
        if isinstance(node, ast.Assign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            name, text = _segment(read, node.targets[0]), inspect.cleandoc(str(after.value.value))
            found.append(MethodDoc(name, _segment(read, node), text))
    return found


def functions_of(module: ModuleType) -> list[MethodDoc]:
    """The public functions that a module defines."""
    read = _read(module)
    return [
        MethodDoc(node.name, _signature(read, node), ast.get_docstring(node) or "")
        for node in read.tree.body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    ]


def _called_on(owner: type, node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """A class method is written with its class in front, one that is awaited with `await`."""
    decorators = {decorator.id for decorator in node.decorator_list if isinstance(decorator, ast.Name)}
    is_awaited = isinstance(node, ast.AsyncFunctionDef)
    return ("await " if is_awaited else "") + (f"{owner.__name__}." if "classmethod" in decorators else "")


def constructor_of(owner: type) -> list[FieldDoc]:
    """The named arguments of a class's constructor."""
    module, node = class_node(owner)
    (init,) = [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"]
    arguments = init.args
    defaults = [*arguments.defaults, *arguments.kw_defaults]
    named = [*arguments.args[1:], *arguments.kwonlyargs]
    return [
        FieldDoc(argument.arg, _annotation(module, argument), _segment(module, default) if default else None, "")
        for argument, default in zip(named, defaults, strict=True)
    ]


def _annotation(module: _Module, argument: ast.arg) -> str:
    return _segment(module, argument.annotation) if argument.annotation else ""


def _signature(module: _Module, node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """`name(arguments) -> type`; as a `def` on several lines where it is long or has comments in it."""
    lines = module.text.splitlines()[node.lineno - 1 : node.body[0].lineno - 1]
    written = textwrap.dedent("\n".join(lines))
    first, last = written.find("def "), written.rstrip().rfind(":")
    flat = " ".join(written[first + len("def ") : last].split()).replace("( ", "(").replace(" )", ")")
    if "#" in written or len(flat) > _MAX_LENGTH:
        return _without_self(written[first:].rstrip())
    return _without_self(flat.replace(",)", ")"))


def _without_self(signature: str) -> str:
    for first in ("self", "cls"):
        for written in (f"({first}, ", f"({first}\n", f"(\n    {first},\n", f"({first})"):
            if written in signature:
                kept = {f"({first})": "()", f"(\n    {first},\n": "(\n"}.get(written, "(")
                return signature.replace(written, kept, 1)
    return signature


def _segment(module: _Module, node: ast.AST) -> str:
    segment = ast.get_source_segment(module.text, node)
    if segment is None:
        raise LookupError(f"no source for {ast.dump(node)}")
    return " ".join(segment.split())
