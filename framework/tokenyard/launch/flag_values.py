"""The values of flags, as overrides."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tokenyard.errors import ConfigError
from tokenyard.launch.overrides import quote_override, quote_text

_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_LENGTH = re.compile(r"(\d+(?:\.\d+)?)([kmgtKMGT]?)", re.ASCII)
_NAME = re.compile(r"[a-z0-9_-]+", re.ASCII)
_DEST_PREFIX = "engine_"  # keeps the flags apart from a command's own arguments
_KEYWORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def parse_length(text: str) -> int | None:
    """A count as vLLM's flags take it: `2048`, `2k` = 2000, `2K` = 2048, `1.5k`; None when it is none."""
    match = _LENGTH.fullmatch(text.strip())
    if match is None:
        return None
    number, factor = match[1], _SUFFIXES.get(match[2], 1)
    if "." not in number:
        return int(number) * factor
    scaled = round(float(number) * factor, 6)
    return int(scaled) if scaled.is_integer() else None


def text(key: str, value: str, flag: str) -> str:
    """Text, verbatim."""
    return quote_override(key, value)


def count(key: str, value: str, flag: str) -> str:
    """A count: see `parse_length`."""
    number = parse_length(value)
    if number is None:
        raise ConfigError(
            f"{flag} takes a whole number, or one with a suffix such as 2k (2000) or 2K (2048), got {value!r}"
        )
    return f"{key}={number}"


def count_or_auto(key: str, value: str, flag: str) -> str:
    """The same, or `auto` = -1."""
    if value in ("auto", "-1"):
        return f"{key}=-1"
    if parse_length(value) is None:
        raise ConfigError(
            f"{flag} takes a whole number, one with a suffix such as 2k (2000) or 2K (2048), or auto, got {value!r}"
        )
    return count(key, value, flag)


def integer(key: str, value: str, flag: str) -> str:
    """A whole number."""
    try:
        return f"{key}={int(value)}"
    except ValueError:
        raise ConfigError(f"{flag} takes a whole number, got {value!r}") from None


def names(key: str, value: str, flag: str) -> str:
    """Names of plugins with commas between."""
    names = [name.strip() for name in value.split(",")]
    if not all(_NAME.fullmatch(name) for name in names):
        raise ConfigError(f"{flag} takes names of plugins with commas between, such as a,b; got {value!r}")
    return f"{key}=[{','.join(names)}]"


def counts(key: str, value: str, flag: str) -> str:
    """Counts with commas between."""
    numbers = [parse_length(number) for number in value.split(",")]
    if None in numbers:
        raise ConfigError(f"{flag} takes whole numbers with commas between, such as 1,2,4,8; got {value!r}")
    return f"{key}=[{','.join(map(str, numbers))}]"


def number(key: str, value: str, flag: str) -> str:
    """A number."""
    try:
        return f"{key}={float(value)}"
    except ValueError:
        raise ConfigError(f"{flag} takes a number, got {value!r}") from None


def memory(key: str, value: str, flag: str) -> str:
    """Bytes, or text such as 512MiB."""
    return quote_override(key, value) if parse_length(value) is None else count(key, value, flag)


def item(key: str, value: str, flag: str) -> str:
    """Text, verbatim, as one item of a list."""
    return quote_text(value)


def origins(key: str, value: str, flag: str) -> str:
    """A JSON list of texts, or one text, as items of a list."""
    if not value.startswith("["):
        return quote_text(value)
    found = _json(value, flag)
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise ConfigError(f'{flag} takes a text, or a JSON list of texts such as \'["a","b"]\'; got {value!r}')
    return ",".join(map(quote_text, found))


def json_object(key: str, value: str, flag: str) -> str:
    """A JSON object, verbatim."""
    found = _json(value, flag)
    if not isinstance(found, Mapping):
        raise ConfigError(f"{flag} takes a JSON object such as '{{\"enable_thinking\": false}}'; got {value!r}")
    return f"{key}={_grammar(found, flag)}"


def _json(value: str, flag: str) -> object:
    try:
        found: object = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{flag} takes JSON, got {value!r}: {error}") from None
    return found


def _grammar(value: object, flag: str) -> str:
    """A JSON value in Hydra's override grammar."""
    match value:
        case str():
            return quote_text(value)
        case list():
            return "[" + ",".join(_grammar(one, flag) for one in value) + "]"
        case dict():
            for name in value:
                if not _KEYWORD.fullmatch(name):
                    raise ConfigError(f"{flag}: {name!r} is not a name such as enable_thinking")
            return "{" + ",".join(f"{name}:{_grammar(one, flag)}" for name, one in value.items()) + "}"
    return json.dumps(value)


@dataclass(frozen=True, slots=True)
class Flag:
    name: str
    key: str
    convert: Callable[[str, str, str], str] | None  # None: on and off, --x and --no-x unless `is_inverted`
    metavar: str
    help: str
    is_list: bool = False  # may be given several times: `convert` makes items; else the last one counts
    short: str | None = None  # another spelling
    is_inverted: bool = False  # without `convert`: the flag turns the key off, and there is no --no-x

    @property
    def dest(self) -> str:
        return _DEST_PREFIX + self.name.removeprefix("--").replace("-", "_")

    @property
    def spellings(self) -> tuple[str, ...]:
        """What may be written: the short form before the long one, the one that turns it off last."""
        if self.convert is None and not self.is_inverted:
            return self.name, "--no-" + self.name.removeprefix("--")
        return (self.name,) if self.short is None else (self.short, self.name)
