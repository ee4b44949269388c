"""Flags that people know from vLLM's benchmarks, as keys of the group `bench`."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import TYPE_CHECKING, NamedTuple

from tokenyard.bench.keys import GROUP, meaning_of
from tokenyard.bench.settings import SETTINGS
from tokenyard.errors import UserError
from tokenyard.launch.convert import show
from tokenyard.launch.nodes import default_of

if TYPE_CHECKING:
    import argparse

    from tokenyard.cli.arguments import Given, Parser


class _Flag(NamedTuple):
    name: str
    kinds: tuple[str, ...]
    help: str

    @property
    def key(self) -> str:
        return self.name.removeprefix("--").replace("-", "_")


_FLAGS = (
    _Flag("--num-prompts", ("throughput",), "requests of the one shape"),
    _Flag("--batch-size", ("latency",), "requests at once"),
    _Flag("--input-len", ("throughput", "latency"), "prompt tokens of each"),
    _Flag("--output-len", ("throughput", "latency"), "tokens that each generates"),
    _Flag("--num-iters", ("latency", "startup"), "how often it is measured"),
    _Flag("--num-iters-warmup", ("latency",), "how often it runs untimed before"),
)
_OF_SHAPE = ("--num-prompts", "--input-len", "--output-len")


def add_bench_flags(parser: Parser, kind: str | None = None) -> None:
    """Flags of a kind are flags of the command: the kind is a word like any other. With `kind` those of one alone."""
    for flag in _FLAGS:
        if kind is not None and kind not in flag.kinds:
            continue
        about = flag.help if kind is not None else f"{', '.join(flag.kinds)}: {flag.help}"
        parser.add_argument(flag.name, dest=f"{GROUP}_{flag.key}", metavar="N", default=None, help=about)


def keys_text(kind: str, width: int) -> str:
    """The keys of a kind, each with its default and what it means, in lines of at most `width`."""
    written = [(f"{GROUP}.{key.name}={_default(key)}", meaning_of(key)) for key in dataclasses.fields(SETTINGS[kind])]
    lines = ["keys, with their defaults:"]
    for text, meaning in written:
        lines += [f"  {text}", *textwrap.wrap(meaning, width, initial_indent=" " * 6, subsequent_indent=" " * 6)]
    return "\n".join(lines)


def _default(key: dataclasses.Field[object]) -> str:
    """As it would be given."""
    value = default_of(key)
    return f"[{','.join(map(str, value))}]" if isinstance(value, list) else show(value).strip("'")


def with_bench_flags(given: Given, kind: str) -> Given:
    """With the flags as `bench.KEY=VALUE`. Raises UserError for one that the kind does not have."""
    values = _given(given.flags)
    for flag in _FLAGS:
        if flag.name in values and kind not in flag.kinds:
            there = [other.name for other in _FLAGS if kind in other.kinds]
            raise UserError(
                f"{flag.name} is for {' and '.join(flag.kinds)}, not for {kind}"
                + (f", which has {', '.join(there)}" if there else "")
            )
    if kind == "throughput":
        texts = [_shape(values, given)] if values else []
    else:
        texts = [f"{GROUP}.{flag.key}={values[flag.name]}" for flag in _FLAGS if flag.name in values]
    return dataclasses.replace(given, own_overrides=(*texts, *given.own_overrides))


def _given(flags: argparse.Namespace) -> dict[str, str]:
    found = {flag.name: vars(flags)[f"{GROUP}_{flag.key}"] for flag in _FLAGS}
    return {name: value for name, value in found.items() if value is not None}


def _shape(values: dict[str, str], given: Given) -> str:
    """The one shape that three flags make."""
    together = f"{', '.join(_OF_SHAPE[:-1])} and {_OF_SHAPE[-1]}"
    if missing := [name for name in _OF_SHAPE if name not in values]:
        raise UserError(f"{', '.join(missing)} is missing: {together} make one shape; or give {GROUP}.shapes=8x128+64")
    if any(text.startswith(f"{GROUP}.shapes=") for text in given.own_overrides):
        raise UserError(f"{together} make one shape, and {GROUP}.shapes names others; give one of the two")
    num_prompts, input_len, output_len = (values[name] for name in _OF_SHAPE)
    return f"{GROUP}.shapes={num_prompts}x{input_len}+{output_len}"
