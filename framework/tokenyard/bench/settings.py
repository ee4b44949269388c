"""The keys of the group `bench`: they belong to one command, so they are no part of the engine's config.

What a key means is said here once: `tokenyard bench KIND --help` and the reference show it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from tokenyard.bench.attention_shapes import MAX_TOKENS, AttentionShape, parse_attention_shape
from tokenyard.bench.keys import GROUP, MAX_ITERS, MAX_PROMPT, MAX_SEED, about, in_range
from tokenyard.bench.serve_settings import ServeBench
from tokenyard.bench.workload import Shape, parse_shape
from tokenyard.errors import ConfigError, nearest
from tokenyard.launch.convert import to_dataclass, wrong
from tokenyard.launch.schema import field_names

SettingsT = TypeVar("SettingsT")

MAX_REQUESTS = 16384  # admission allows twice as many at once, and 65536 is what a scheduler may be given
MAX_STEPS = 3000  # a decoding request of the benchmark ends after 4000 tokens, and prefill takes some of them
MAX_HEADS = 1024
MAX_HEAD_DIM = 1024
MAX_SECONDS = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerBench:
    """`tokenyard bench scheduler`. Raises ConfigError on a value out of its range."""

    mode: Literal["decode", "churn", "admit"] = field(
        default="decode",
        metadata=about(
            "steady decoding; steps in which one request ends and one enters; or taking in many waiting requests"
        ),
    )
    num_requests: int | tuple[int, ...] | None = field(
        default=None, metadata=about("one size or several; null = 256, or 1000 with admit")
    )
    num_waiting: int | None = field(
        default=None, metadata=about("decode, churn: requests in line behind the batch; null = 0, or 1000 with churn")
    )
    num_steps: int | None = field(default=None, metadata=about("decode, churn: timed steps; null = 320"))
    prompt_len: int | None = field(
        default=None, metadata=about("tokens; null = 512 and up to 15 more, or 1000 with admit")
    )

    def __post_init__(self) -> None:
        for size in self.sizes:
            in_range("num_requests", size, "requests", MAX_REQUESTS)
        if not self.sizes:
            raise wrong(f"{GROUP}.num_requests", [], "a whole number of requests, or a list of at least one")
        self._refuse_unused()
        in_range("num_waiting", self.waiting, "requests", MAX_REQUESTS, least=0)
        in_range("num_steps", self.steps, "steps", MAX_STEPS)
        in_range("prompt_len", self.prompt, "tokens", MAX_PROMPT)

    def _refuse_unused(self) -> None:
        for name, value in (("num_steps", self.num_steps), ("num_waiting", self.num_waiting)):
            if self.mode == "admit" and value is not None:
                raise ConfigError(
                    f"{GROUP}.{name}={value} has no effect with {GROUP}.mode=admit: one step takes in all; remove it"
                )

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of requests to measure."""
        if self.num_requests is None:
            return (1000 if self.mode == "admit" else 256,)
        return self.num_requests if isinstance(self.num_requests, tuple) else (self.num_requests,)

    @property
    def waiting(self) -> int:
        """Requests in line."""
        if self.num_waiting is not None:
            return self.num_waiting
        return 1000 if self.mode == "churn" else 0

    @property
    def steps(self) -> int:
        return 320 if self.num_steps is None else self.num_steps

    @property
    def prompt(self) -> int:
        """Tokens of the shortest prompt."""
        if self.prompt_len is not None:
            return self.prompt_len
        return 1000 if self.mode == "admit" else 512


@dataclass(frozen=True, slots=True, kw_only=True)
class OverheadBench:
    """`tokenyard bench overhead`. Raises ConfigError on a value out of its range."""

    num_requests: int = field(default=8, metadata=about("decoding together"))
    num_steps: int = field(default=64, metadata=about("timed"))
    prompt_len: int = field(default=64, metadata=about("tokens"))

    def __post_init__(self) -> None:
        in_range("num_requests", self.num_requests, "requests", MAX_REQUESTS)
        in_range("num_steps", self.num_steps, "steps", MAX_STEPS)
        in_range("prompt_len", self.prompt_len, "tokens", MAX_PROMPT)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputBench:
    """`tokenyard bench throughput`. Raises ConfigError on a value out of its range."""

    shapes: str | tuple[str, ...] = field(
        default=("1x128+64", "8x128+64", "32x128+128", "64x256+64"), metadata=about("REQUESTSxINPUT+OUTPUT")
    )
    num_rounds: int = field(default=1, metadata=about("each runs every shape once; figures are medians"))
    seed: int = field(default=0, metadata=about("of the prompts"))

    def __post_init__(self) -> None:
        if not self.parsed:
            raise wrong(f"{GROUP}.shapes", [], "a shape such as 8x128+64, or a list of at least one")
        in_range("num_rounds", self.num_rounds, "rounds", MAX_ITERS)
        in_range("seed", self.seed, "", MAX_SEED, least=0)

    @property
    def parsed(self) -> tuple[Shape, ...]:
        """The shapes, each once."""
        texts = (self.shapes,) if isinstance(self.shapes, str) else self.shapes
        return tuple(dict.fromkeys(parse_shape(text) for text in texts))


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyBench:
    """`tokenyard bench latency`. Raises ConfigError on a value out of its range."""

    batch_size: int = field(default=8, metadata=about("requests at once"))
    input_len: int = field(default=32, metadata=about("prompt tokens"))
    output_len: int = field(default=128, metadata=about("generated tokens"))
    num_iters_warmup: int = field(default=2, metadata=about("untimed batches"))
    num_iters: int = field(default=10, metadata=about("timed batches"))
    seed: int = field(default=0, metadata=about("of the prompts"))

    def __post_init__(self) -> None:
        in_range("batch_size", self.batch_size, "requests", MAX_REQUESTS)
        in_range("input_len", self.input_len, "tokens", MAX_PROMPT)
        in_range("output_len", self.output_len, "tokens", MAX_PROMPT)
        in_range("num_iters", self.num_iters, "batches", MAX_ITERS)
        in_range("num_iters_warmup", self.num_iters_warmup, "batches", MAX_ITERS, least=0)
        in_range("seed", self.seed, "", MAX_SEED, least=0)

    @property
    def shape(self) -> Shape:
        return Shape(self.batch_size, self.input_len, self.output_len)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupBench:
    """`tokenyard bench startup`. Raises ConfigError on a value out of its range."""

    num_iters: int = field(default=3, metadata=about("pairs of starts, a cold and a warm one"))

    def __post_init__(self) -> None:
        in_range("num_iters", self.num_iters, "pairs of starts", MAX_ITERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBench:
    """`tokenyard bench attention`. Raises ConfigError on a value out of its range."""

    shapes: str | tuple[str, ...] = field(
        default=("32x512", "1x16384", "256+256"), metadata=about("SEQUENCESxCONTEXT, or [SEQUENCESx]QUERY+CACHED")
    )
    backends: str | tuple[str, ...] | None = field(
        default=None, metadata=about("names; null = attention=NAME where given, else all that run here")
    )
    num_heads: int = field(default=9, metadata=about("of queries"))
    num_kv_heads: int = field(default=3, metadata=about("of keys and values"))
    head_dim: int = field(default=64, metadata=about("numbers of a head's row"))
    sliding_window: int | None = field(
        default=None, metadata=about("tokens that a token sees, itself included; null = all before it")
    )
    seconds: float = field(default=20.0, metadata=about("about how long all is measured"))

    def __post_init__(self) -> None:
        if not self.parsed:
            raise wrong(f"{GROUP}.shapes", [], "a shape such as 32x512, or a list of at least one")
        if self.names is not None and not self.names:
            raise wrong(f"{GROUP}.backends", [], "the name of an attention backend, or a list of at least one")
        in_range("num_heads", self.num_heads, "heads", MAX_HEADS)
        in_range("num_kv_heads", self.num_kv_heads, "heads", MAX_HEADS)
        if self.num_heads % self.num_kv_heads:
            raise wrong(f"{GROUP}.num_heads", self.num_heads, f"a multiple of {GROUP}.num_kv_heads={self.num_kv_heads}")
        in_range("head_dim", self.head_dim, "", MAX_HEAD_DIM)
        if self.sliding_window is not None:
            in_range("sliding_window", self.sliding_window, "tokens", MAX_TOKENS)
        if not 0 < self.seconds <= MAX_SECONDS:
            raise wrong(f"{GROUP}.seconds", self.seconds, f"a number of seconds above 0, up to {MAX_SECONDS}")

    @property
    def parsed(self) -> tuple[AttentionShape, ...]:
        """The shapes, each once."""
        texts = (self.shapes,) if isinstance(self.shapes, str) else self.shapes
        return tuple(dict.fromkeys(parse_attention_shape(text) for text in texts))

    @property
    def names(self) -> tuple[str, ...] | None:
        """The backends, each once."""
        if self.backends is None:
            return None
        return tuple(dict.fromkeys((self.backends,) if isinstance(self.backends, str) else self.backends))


SETTINGS: Mapping[str, type] = {
    "throughput": ThroughputBench,
    "latency": LatencyBench,
    "startup": StartupBench,
    "scheduler": SchedulerBench,
    "overhead": OverheadBench,
    "attention": AttentionBench,
    "serve": ServeBench,
}
"""By the kind's name."""


def read_settings(settings_type: type[SettingsT], overrides: Sequence[str]) -> SettingsT:
    """`bench.KEY=VALUE` texts as a checked dataclass; of two values the later one holds. Raises ConfigError."""
    names = field_names(settings_type)
    data: dict[str, object] = {}
    for text in overrides:
        key, _, value = text.partition("=")
        name = key.removeprefix(f"{GROUP}.")
        if name not in names:
            match = nearest(name, names)  # without the group, which all have in common
            hint = f"; did you mean '{GROUP}.{match}'?" if match else ""
            raise ConfigError(f"unknown key '{key}'{hint}; keys of this benchmark: {', '.join(names)}")
        data[name] = _plain(value)
    return to_dataclass(settings_type, data, GROUP)


def _plain(text: str) -> object:
    """A number, a list, true, false or null; anything else is text, or in brackets a list of texts."""
    try:
        value: object = json.loads(text)
    except ValueError:
        is_list = text.startswith("[") and text.endswith("]")
        return [part.strip() for part in text[1:-1].split(",")] if is_list else text
    return value
