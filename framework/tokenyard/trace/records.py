"""The lines of a trace: a header, then a record for each call; docs/reference/trace.md says it in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypeAlias

import msgspec

from tokenyard.ipc.params import SamplingMessage
from tokenyard.request import Retention

FORMAT = "tokenyard-trace"
VERSION = 1
"""Grows with every change that an older reader would misread; a reader takes its own version alone."""

# What a trace may say of sizes: a replay makes room for so many. Positions and token ids are 32-bit numbers.
_NumBlocks: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=1 << 26)]
_NumHostBlocks: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 26)]
_Length: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]

Time: TypeAlias = float | str  # engine-clock seconds; "inf" and "-inf" as text, which JSON has no number for


class Line(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, tag_field="call"):
    """Any line; `call` says which one it is."""


class Component(msgspec.Struct, frozen=True, array_like=True):
    """A component that took part, and who provided it."""

    kind: str
    name: str
    distribution: str
    version: str


class GroupSpec(msgspec.Struct, frozen=True, array_like=True):
    """A K/V group: see KVCacheGroupSpec."""

    num_layers: _Count
    bytes_per_token: _Count
    sliding_window: _Count | None


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """What the start of the engine settled: a replay has no model to ask."""

    num_blocks: _NumBlocks
    num_host_blocks: _NumHostBlocks
    max_model_len: _Length
    vocab_size: _Count
    kv_cache_groups: Annotated[tuple[GroupSpec, ...], msgspec.Meta(min_length=1, max_length=256)]
    records_kv_events: bool


class Header(Line, frozen=True, kw_only=True, tag="header"):
    """The first line."""

    format: str
    version: int
    tokenyard: str
    plugin_api: tuple[int, int]
    started: float  # engine-clock seconds
    config: Mapping[str, object]  # plain data, by group
    components: tuple[Component, ...]
    sizes: Sizes


class AddedRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """See EngineCoreRequest."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingMessage
    arrival: Time
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    priority: int = 0
    client: str | None = None
    session: str | None = None
    parent: str | None = None
    deadline: Time | None = None
    service_level: tuple[float | None, float | None, float | None] | None = None  # ttft, tpot, e2e
    skip_prefix_cache: bool = False
    cache_salt: str | None = None
    lora_name: str | None = None
    extra_keys: tuple[tuple[str, int, int], ...] = ()
    metadata: Mapping[str, object] = {}
    retention: Retention = "normal"
    true_output_tokens: int | None = None


class Added(Line, frozen=True, kw_only=True, tag="add_request"):
    """A request was given to the scheduler."""

    at: float
    request: AddedRequest
    error: str | None = None  # what was raised instead


class End(msgspec.Struct, frozen=True, array_like=True):
    """A request ended."""

    id: str
    reason: str
    stop_reason: int | str | None = None


class Finished(Line, frozen=True, kw_only=True, tag="finish_requests"):
    """Requests were ended from outside."""

    at: float
    ids: tuple[str, ...]
    reason: str
    ended: tuple[str, ...] = ()  # those that were alive
    error: str | None = None


class Start(msgspec.Struct, frozen=True, array_like=True):
    """A request entered the batch."""

    id: str
    slot: int
    num_tokens: int  # known: prompt, and output of an earlier stay
    num_hit_tokens: int  # of those, found in the cache
    blocks: tuple[tuple[int, ...], ...]  # the block table of each K/V group


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """A row that does more than decode one token."""

    id: str
    num_computed: int  # before the step
    num_tokens: int


class Growth(msgspec.Struct, frozen=True, array_like=True):
    """A running request got blocks."""

    id: str
    group: int
    start: int  # the first one's place in the block table
    blocks: tuple[int, ...]


class Preempted(msgspec.Struct, frozen=True, array_like=True):
    """A request lost its turn."""

    id: str
    mode: str | None  # recompute, swap, pause; None = the scheduler tells no events
    num_lost: int
    reason: str | None


class Waiting(msgspec.Struct, frozen=True, array_like=True):
    """Why one of the first in line did not start."""

    id: str
    reason: str
    detail: str | None


class Disagreement(msgspec.Struct, frozen=True, array_like=True):
    """Where the shadow policy would have decided otherwise."""

    point: str
    id: str | None  # the request that it is about, if it is about one
    actual: str
    shadow: str


class Waits(msgspec.Struct, frozen=True, omit_defaults=True):
    """Who waits after a `schedule`."""

    num_running: int
    by_reason: Mapping[str, int] = {}
    line: tuple[Waiting, ...] = ()  # of the first in line, those that are new there or wait for something else


class Scheduled(Line, frozen=True, kw_only=True, tag="schedule"):
    """A step was scheduled, or nothing could run: then `step` is None."""

    at: float
    waits: Waits
    num_free_blocks: int
    step: int | None = None
    num_tokens: int = 0
    new: tuple[Start, ...] = ()
    resumed: tuple[Start, ...] = ()
    decodes: tuple[str, ...] | None = None  # ids of rows that decode one token, in order; None = as in the step before
    chunks: tuple[Chunk, ...] = ()
    grown: tuple[Growth, ...] = ()
    preempted: tuple[Preempted, ...] = ()
    went_on: tuple[str, ...] = ()  # paused before, and not any more
    kv: str = ""  # hash of all block tables and transfers so far, and of what is free
    hash: str = ""  # of the step's arrays
    shadow: tuple[Disagreement, ...] = ()


class Raised(Line, frozen=True, kw_only=True, tag="error"):
    """A call raised: the last record of most engines that die."""

    at: float
    method: str
    error: str
    step: int | None = None  # of `update_from_output`
    sampled: Sampled | None = None


class PromptChunk(msgspec.Struct, frozen=True, array_like=True):
    """Prompt logprobs came, of the tokens at start .. start + num_tokens."""

    id: str
    start: int
    num_tokens: int


class Sampled(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What the executor made of a step, as far as a scheduler looks at it."""

    tokens: tuple[int, ...]  # rows one after another
    counts: tuple[int, ...] | None = None  # a row; None = one for each row that samples
    errors: Mapping[str, str] = {}
    prompt_logprobs: tuple[PromptChunk, ...] = ()
    drafts: tuple[tuple[int, ...], ...] | None = None
    kv_transfers: tuple[str, ...] = ()


class Updated(Line, frozen=True, kw_only=True, tag="update_from_output"):
    """A step was taken in."""

    at: float
    step: int
    sampled: Sampled
    num_kept: int  # tokens that requests got
    ended: tuple[End, ...] = ()
    hash: str = ""  # of what the front end was told


class Told(Line, frozen=True, kw_only=True, tag="take_finished"):
    """Ends that no step brought about; calls that returned none are no records."""

    at: float
    ended: tuple[End, ...]


class AdmissionPaused(Line, frozen=True, kw_only=True, tag="pause_admission"):
    """Whether requests may start."""

    at: float
    is_paused: bool
    error: str | None = None


class CacheReset(Line, frozen=True, kw_only=True, tag="reset_prefix_cache"):
    """The prefix cache was to be forgotten."""

    at: float
    is_reset: bool
    error: str | None = None


class Wake(Line, frozen=True, kw_only=True, tag="wake_at"):
    """The scheduler named a time; calls that named none are no records."""

    at: float
    moment: Time


class Idle(Line, frozen=True, kw_only=True, tag="idle"):
    """No request is left."""

    at: float
    cache: str | None = None  # hash of what the prefix cache holds; None = it cannot be inspected, or is large


class Closed(Line, frozen=True, kw_only=True, tag="end"):
    """The last line of a trace whose engine was shut down."""

    at: float
    num_steps: int
    cache: str | None = None  # as in `idle`, whatever the size of the pool


Record: TypeAlias = (
    Added | Finished | Scheduled | Raised | Updated | Told | AdmissionPaused | CacheReset | Wake | Idle | Closed
)

AnyLine: TypeAlias = Header | Record


def time_value(seconds: float) -> Time:
    """A time as JSON can hold it."""
    return seconds if -_MOST < seconds < _MOST else str(float(seconds))


def seconds_of(value: Time) -> float:
    """The time again; raises ValueError for text that is none."""
    return float(value)


_MOST = float("inf")
