"""The keys of the group `bench`: they belong to one command, so they are no part of the engine's config."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from tokenyard.errors import ConfigError, did_you_mean
from tokenyard.launch.convert import to_dataclass, wrong
from tokenyard.launch.schema import field_names

SettingsT = TypeVar("SettingsT")

GROUP = "bench"
MAX_REQUESTS = 16384  # admission allows twice as many at once, and 65536 is what a scheduler may be given
MAX_STEPS = 3000  # a decoding request of the benchmark ends after 4000 tokens, and prefill takes some of them
MAX_PROMPT = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerBench:
    """`tokenyard bench scheduler`. Raises ConfigError on a value out of its range."""

    mode: Literal["decode", "admit"] = "decode"  # steady decoding, or adding and first scheduling waiting requests
    num_requests: int | tuple[int, ...] | None = None  # one size or several; None = 256, or 1000 with mode=admit
    num_steps: int | None = None  # decode: timed steps; None = 320
    prompt_len: int | None = None  # tokens; None = 512 and up to 15 more, or 1000 with mode=admit

    def __post_init__(self) -> None:
        for size in self.sizes:
            _in_range("num_requests", size, "requests", MAX_REQUESTS)
        if not self.sizes:
            raise wrong(f"{GROUP}.num_requests", [], "a whole number of requests, or a list of at least one")
        if self.mode == "admit" and self.num_steps is not None:
            raise ConfigError(
                f"{GROUP}.num_steps={self.num_steps} has no effect with {GROUP}.mode=admit: it is one step; remove it"
            )
        _in_range("num_steps", self.steps, "steps", MAX_STEPS)
        _in_range("prompt_len", self.prompt, "tokens", MAX_PROMPT)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of requests to measure."""
        if self.num_requests is None:
            return (256 if self.mode == "decode" else 1000,)
        return self.num_requests if isinstance(self.num_requests, tuple) else (self.num_requests,)

    @property
    def steps(self) -> int:
        return 320 if self.num_steps is None else self.num_steps

    @property
    def prompt(self) -> int:
        """Tokens of the shortest prompt."""
        if self.prompt_len is not None:
            return self.prompt_len
        return 512 if self.mode == "decode" else 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class OverheadBench:
    """`tokenyard bench overhead`. Raises ConfigError on a value out of its range."""

    num_requests: int = 8  # decoding together
    num_steps: int = 64  # timed
    prompt_len: int = 64  # tokens

    def __post_init__(self) -> None:
        _in_range("num_requests", self.num_requests, "requests", MAX_REQUESTS)
        _in_range("num_steps", self.num_steps, "steps", MAX_STEPS)
        _in_range("prompt_len", self.prompt_len, "tokens", MAX_PROMPT)


def read_settings(settings_type: type[SettingsT], overrides: Sequence[str]) -> SettingsT:
    """`bench.KEY=VALUE` texts as a checked dataclass; of two values the later one holds. Raises ConfigError."""
    names = field_names(settings_type)
    data: dict[str, object] = {}
    for text in overrides:
        key, _, value = text.partition("=")
        name = key.removeprefix(f"{GROUP}.")
        if name not in names:
            hint = did_you_mean(key, [f"{GROUP}.{known}" for known in names])
            raise ConfigError(f"unknown key '{key}'{hint}; keys of this benchmark: {', '.join(names)}")
        data[name] = _plain(value)
    return to_dataclass(settings_type, data, GROUP)


def _plain(text: str) -> object:
    """A number, a list, true, false or null; anything else is text."""
    try:
        value: object = json.loads(text)
    except ValueError:
        return text
    return value


def _in_range(name: str, value: int, unit: str, most: int) -> None:
    if not 1 <= value <= most:
        raise wrong(f"{GROUP}.{name}", value, f"a whole number of {unit}, 1 to {most}")
