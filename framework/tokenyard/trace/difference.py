"""The first thing in which two records differ, in words."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from tokenyard.trace.records import Added, Closed, Idle, Record, Scheduled, Updated

if TYPE_CHECKING:
    from collections.abc import Mapping

_MOST_SHOWN = 160  # characters of a value
_MOST_NAMES = 8  # of a list of requests

KINDS = (
    "arrivals",
    "calls",
    "order",
    "hits",
    "budget",
    "preemption",
    "kv",
    "waits",
    "shadow",
    "sampled",
    "ends",
    "errors",
    "bits",
)

DECISIONS = frozenset(KINDS) - {"kv", "waits", "shadow", "bits"}
"""Kinds of differences after which the tokens of one trace belong to other rows than those of the other."""

Facet: TypeAlias = tuple[str, str, Callable[[Record], object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """`kind` is one of KINDS.

    `left` and `right` are what the first trace has, and the second one or the replay.
    """

    step: int | None  # the step in which it shows; before the first one: None
    record: int  # number of the record, from 1
    kind: str
    what: str
    left: str
    right: str

    def values(self) -> dict[str, object]:
        """For JSON."""
        return {
            "step": self.step,
            "record": self.record,
            "kind": self.kind,
            "what": self.what,
            "left": self.left,
            "right": self.right,
        }


def find_difference(
    left: Record | None, right: Record | None, *, step: int | None, record: int, kinds: Collection[str] | None = None
) -> Difference | None:
    """None where they are equal, to the last bit; with `kinds` where they differ in nothing of these kinds.

    No record = the trace ended. `step`: the last one that was scheduled before, for records that are about none.
    """
    if left == right:
        return None
    own = [one.step for one in (left, right) if isinstance(one, Scheduled | Updated) and one.step is not None]
    step = own[0] if own else step

    def differ(kind: str, what: str, ours: object, theirs: object) -> Difference:
        return Difference(step=step, record=record, kind=kind, what=what, left=_short(ours), right=_short(theirs))

    if left is None or right is None or type(left) is not type(right):
        kind = "arrivals" if isinstance(left, Added) or isinstance(right, Added) else "calls"
        return differ(kind, "what happens next", _call(left), _call(right))
    for kind, what, value in _facets(left):
        ours, theirs = value(left), value(right)
        if ours != theirs and (kinds is None or kind in kinds):
            return differ(kind, what, *_narrowed(ours, theirs))
    if kinds is not None:
        return None
    return differ("bits", "the record", left, right)


def _facets(record: Record) -> Sequence[Facet]:
    """What to look at, the most telling first: kind, name, value."""
    if isinstance(record, Scheduled):
        return _SCHEDULED
    if isinstance(record, Updated):
        return _UPDATED
    if isinstance(record, Added):
        return _ADDED
    if isinstance(record, Idle | Closed):
        return _ENDS
    return [("calls", "the call", _without_time)]


def _of(get: Callable[[Scheduled], object]) -> Callable[[Record], object]:
    return lambda record: get(record) if isinstance(record, Scheduled) else None


def _of_update(get: Callable[[Updated], object]) -> Callable[[Record], object]:
    return lambda record: get(record) if isinstance(record, Updated) else None


def _of_added(get: Callable[[Added], object]) -> Callable[[Record], object]:
    return lambda record: get(record) if isinstance(record, Added) else None


_SCHEDULED: Sequence[Facet] = (
    ("preemption", "who was preempted, and how", _of(lambda one: one.preempted)),
    ("preemption", "who goes on after a pause", _of(lambda one: one.went_on)),
    ("order", "whether a step ran", _of(lambda one: one.step)),
    ("order", "who entered", _of(lambda one: [start.id for start in (*one.new, *one.resumed)])),
    ("hits", "prefix hits, in tokens", _of(lambda one: {s.id: s.num_hit_tokens for s in (*one.new, *one.resumed)})),
    ("order", "who decodes", _of(lambda one: one.decodes)),
    ("order", "who computes a prompt", _of(lambda one: [chunk.id for chunk in one.chunks])),
    ("budget", "tokens of prompts", _of(lambda one: {chunk.id: chunk.num_tokens for chunk in one.chunks})),
    ("budget", "tokens of the step", _of(lambda one: one.num_tokens)),
    ("kv", "blocks of who entered", _of(lambda one: {s.id: s.blocks for s in (*one.new, *one.resumed)})),
    ("kv", "blocks that tables grew by", _of(lambda one: one.grown)),
    ("kv", "free blocks", _of(lambda one: one.num_free_blocks)),
    ("kv", "hash of the block tables", _of(lambda one: one.kv)),
    ("waits", "how many wait for what", _of(lambda one: dict(one.waits.by_reason))),
    ("waits", "requests that run", _of(lambda one: one.waits.num_running)),
    ("waits", "why the first in line wait", _of(lambda one: [(row.id, row.reason) for row in one.waits.line])),
    ("waits", "why the first in line wait", _of(lambda one: one.waits.line)),
    ("bits", "slots, or who computes how much", _of(lambda one: (one.new, one.resumed, one.chunks))),
    ("bits", "hash of the step", _of(lambda one: one.hash)),
    ("shadow", "what the shadow would have decided", _of(lambda one: one.shadow)),
)

_UPDATED: Sequence[Facet] = (
    ("order", "the step that came back", _of_update(lambda one: one.step)),
    ("sampled", "sampled tokens", _of_update(lambda one: one.sampled.tokens)),
    ("sampled", "what the executor returned", _of_update(lambda one: one.sampled)),
    ("ends", "who ended", _of_update(lambda one: one.ended)),
    ("ends", "tokens that requests got", _of_update(lambda one: one.num_kept)),
    ("bits", "hash of what was told", _of_update(lambda one: one.hash)),
)

_ADDED: Sequence[Facet] = (
    ("arrivals", "the request", _of_added(lambda one: one.request.id)),
    ("errors", "whether it was taken", _of_added(lambda one: one.error)),
    ("arrivals", "its prompt", _of_added(lambda one: one.request.prompt)),
    ("arrivals", "its priority", _of_added(lambda one: one.request.priority)),
    ("arrivals", "its parameters", _of_added(lambda one: _untimed(one))),
)


_ENDS: Sequence[Facet] = (
    ("kv", "what the prefix cache holds", lambda one: one.cache if isinstance(one, Idle | Closed) else None),
    ("calls", "how many steps there were", lambda one: one.num_steps if isinstance(one, Closed) else None),
)


def _untimed(record: Added) -> dict[str, object]:
    """Two live runs never agree in times."""
    request = record.request
    return {name: getattr(request, name) for name in request.__struct_fields__ if name not in ("arrival", "deadline")}


def _without_time(record: Record) -> dict[str, object]:
    names = [name for name in record.__struct_fields__ if name not in ("at", "moment")]
    return {name: getattr(record, name) for name in names}


def _narrowed(ours: object, theirs: object) -> tuple[object, object]:
    """Of two mappings or long sequences the first entries that differ."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        keys = [key for key in (*ours, *theirs) if ours.get(key) != theirs.get(key)]
        shown = list(dict.fromkeys(keys))[:_MOST_NAMES]
        return {key: ours.get(key) for key in shown}, {key: theirs.get(key) for key in shown}
    if isinstance(ours, tuple | list) and isinstance(theirs, tuple | list) and len(ours) > _MOST_NAMES:
        place = next(
            (index for index, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]),
            min(len(ours), len(theirs)),
        )
        return _from(ours, place), _from(theirs, place)
    return ours, theirs


def _from(values: Sequence[object], place: int) -> str:
    if place >= len(values):
        return f"{len(values)} in all"
    return f"{values[place]} at place {place}"


def _call(record: Record | None) -> str:
    if record is None:
        return "the end of the trace"
    name = record.__struct_config__.tag
    if isinstance(record, Added):
        return f"{name} {record.request.id}"
    if isinstance(record, Scheduled | Updated):
        return f"{name} step {record.step}"
    return f"{name}"


def _short(value: object) -> str:
    text = value if isinstance(value, str) else _plain(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _plain(value: object) -> str:
    if value is None or value == () or value == [] or value == {}:
        return "none"
    if isinstance(value, tuple | list):
        return ", ".join(_plain(item) for item in value)
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_plain(item)}" for name, item in value.items())
    return str(value) if isinstance(value, str | int | float | bool) else _fields(value)


def _fields(value: object) -> str:
    return repr(value).partition("(")[2].removesuffix(")") or repr(value)


def config_differences(
    left: Mapping[str, object], right: Mapping[str, object], prefix: str = ""
) -> Iterator[tuple[str, object, object]]:
    """Key, value here, value there, of two configs as plain data."""
    for name in dict.fromkeys((*left, *right)):
        ours, theirs, key = left.get(name), right.get(name), f"{prefix}{name}"
        if isinstance(ours, dict) and isinstance(theirs, dict):
            yield from config_differences(ours, theirs, f"{key}.")
        elif ours != theirs:
            yield key, ours, theirs
