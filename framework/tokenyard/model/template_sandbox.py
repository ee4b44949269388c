"""The Jinja environment that chat templates run in: sandboxed, immutable, and metered.

A template comes with a model, so it is somebody else's program. What holds: no access to Python internals or to
anything mutable; every loop turn and every call counts against a step limit and a deadline; text made by operators,
calls, loops and as output has a size limit. What does not: a single built-in filter may be slow on a long input, or
make much of it; that is why this runs in a process of its own (`template_process`).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from types import BuiltinMethodType, CodeType
from typing import TYPE_CHECKING

from jinja2 import Template, meta, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context

if TYPE_CHECKING:
    from jinja2.parser import Parser
    from jinja2.runtime import Context

MAX_STEPS = 1_000_000  # loop turns and calls of one rendering
MAX_TEXT = 8 * 2**20  # characters of the output, and of any text made on the way
_MAX_NUMBER = 1_000_000  # as an argument: widths and counts
_CHECK_EVERY = 256  # steps between looks at the clock
_LOOP, _TEXT = "metered loop", "limited text"  # filters whose names no template can spell
_UNMETERED_FILTERS = ("batch", "center", "format", "slice", "wordwrap")
_LONG_NUMBER = re.compile(r"\d{6}")


class _Meter:
    """Steps and time of one rendering."""

    def __init__(self, seconds: float) -> None:
        self._steps = 0
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds

    def tick(self) -> None:
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise SecurityError(f"the template takes more than {MAX_STEPS} steps")
        if self._steps % _CHECK_EVERY == 0 and time.monotonic() > self._deadline:
            raise SecurityError(f"the template takes longer than {self._seconds:g} s")


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Use `compile_template` and `render`; whitespace and helper functions are those that chat templates expect."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _GenerationExtension])
        self._meter: ContextVar[_Meter] = ContextVar("meter")
        for name in _UNMETERED_FILTERS:
            del self.filters[name]
        self.filters.update({_LOOP: self._metered_loop, _TEXT: _limited_filter, "tojson": _tojson})
        self.filters["indent"] = _checked_numbers(self.filters["indent"])
        self.globals.update(
            raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_Names, dict=_Dictionaries()
        )

    def compile_template(self, source: str) -> Template:
        """Compile with every loop metered and every joined text limited; raises jinja2's TemplateError."""
        tree = self.parse(source)
        _instrument(tree)
        code = self.compile(tree)
        if not isinstance(code, CodeType):
            raise TemplateError("the template does not compile")
        return Template.from_code(self, code, self.make_globals(None))

    def undeclared_names(self, source: str) -> set[str]:
        """The variables that a template reads and neither sets itself nor finds here."""
        return meta.find_undeclared_variables(self.parse(source)) - self.globals.keys()

    def render(self, template: Template, variables: Mapping[str, object], seconds: float) -> str:
        """Run a compiled template under a fresh meter; raises whatever the template does wrong."""
        with self._metered(seconds):
            pieces, length = [], 0
            for piece in template.generate(variables):
                length += len(piece)
                _check_length(length)
                pieces.append(piece)
        return "".join(pieces)

    def call(self, context: Context, obj: object, /, *args: object, **kwargs: object) -> object:
        """Every call of a template: counted, and its numbers and text limited."""
        self._meter.get().tick()
        _check_numbers(args, kwargs)
        return _limited(super().call(context, obj, *args, **kwargs))

    def wrap_str_format(self, value: object) -> Callable[..., str] | None:
        """Jinja asks this for every method that a template reaches: text.format cannot ask for a huge width."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and isinstance(value, BuiltinMethodType):
            _check_pattern(value.__self__)
        return wrapped

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        """Operators that can make much of little."""
        if operator == "*":
            _check_product(left, right)
        elif operator == "**":
            raise SecurityError("the operator ** is not allowed in templates")
        elif operator == "%" and isinstance(left, str):
            _check_pattern(left)
            _check_numbers(right if isinstance(right, tuple) else (right,), {})
        return _limited(super().call_binop(context, operator, left, right))

    @contextmanager
    def _metered(self, seconds: float) -> Iterator[None]:
        token = self._meter.set(_Meter(seconds))
        try:
            yield
        finally:
            self._meter.reset(token)

    @property
    def _metered_loop(self) -> Callable[[Context, Iterable[object]], Iterator[object]]:
        @pass_context
        def metered(context: Context, items: Iterable[object]) -> Iterator[object]:
            meter = self._meter.get()
            for item in items:
                meter.tick()
                yield item

        return metered


class _GenerationExtension(Extension):
    """`{% generation %}` marks the assistant's text for training; here its body is rendered and nothing more."""

    tags: set[str] = {"generation"}  # noqa: RUF012 - Jinja reads a class attribute

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Dictionaries:
    """`dict` as templates call it, and not the type with all that hangs on it."""

    def __call__(self, *args: object, **kwargs: object) -> dict[object, object]:
        made: dict[object, object] = {}
        made.update(*args, **kwargs)
        return made

    def fromkeys(self, keys: Iterable[object], value: object = None) -> dict[object, object]:
        return dict.fromkeys(keys, value)


class _Names(Namespace):
    """Jinja's namespace without underscored names."""

    def __init__(self, /, *args: object, **kwargs: object) -> None:
        values = _Dictionaries()(*args, **kwargs)
        for name in values:
            _check_name(name)
        super().__init__(values)

    def __setitem__(self, name: str, value: object) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold the name {name!r}")


def _instrument(tree: nodes.Template) -> None:
    for loop in tree.find_all(nodes.For):
        loop.iter = nodes.Filter(loop.iter, _LOOP, [], [], None, None, lineno=loop.lineno)
    for block in tree.find_all(nodes.AssignBlock):
        block.filter = nodes.Filter(block.filter, _TEXT, [], [], None, None, lineno=block.lineno)
    for parent in list(tree.find_all(nodes.Node)):
        for field, value in list(parent.iter_fields()):
            setattr(parent, field, _limit_concat(value))


def _limit_concat(value: object) -> object:
    if isinstance(value, nodes.Concat):
        return nodes.Filter(value, _TEXT, [], [], None, None, lineno=value.lineno)
    if isinstance(value, list):
        return [_limit_concat(item) for item in value]
    return value


@pass_context
def _limited_filter(context: Context, value: object) -> object:
    return _limited(value)


def _limited(value: object) -> object:
    if isinstance(value, str | list | tuple):
        _check_length(len(value))
    return value


def _check_length(length: int) -> None:
    if length > MAX_TEXT:
        raise SecurityError(f"the template makes more than {MAX_TEXT} characters")


def _check_product(left: object, right: object) -> None:
    for sequence, times in ((left, right), (right, left)):
        if isinstance(sequence, str | list | tuple) and isinstance(times, int):
            _check_length(len(sequence) * times)


def _check_pattern(pattern: object) -> None:
    if isinstance(pattern, str) and _LONG_NUMBER.search(pattern):
        raise SecurityError("a format string with so large a width is not allowed in templates")


def _check_numbers(args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
    if any(isinstance(value, int) and abs(value) > _MAX_NUMBER for value in (*args, *kwargs.values())):
        raise SecurityError(f"a number above {_MAX_NUMBER} is not allowed as an argument in templates")


def _checked_numbers(function: Callable[..., object]) -> Callable[..., object]:
    def checked(*args: object, **kwargs: object) -> object:
        _check_numbers(args, kwargs)
        return function(*args, **kwargs)

    return checked


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As model authors have it: no HTML escapes, and text as it is."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> str:
    raise TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
