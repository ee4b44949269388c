"""Two traces side by side: in what their configs differ, and the first thing that does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from tokenyard.trace.difference import KINDS, config_differences, find_difference
from tokenyard.trace.reader import TraceReader
from tokenyard.trace.records import Added, Closed, Record, Scheduled, Wake

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tokenyard.trace.difference import Difference
    from tokenyard.trace.records import Header

_OWN_GROUPS = ("trace", "server")
"""Groups of the config that decide nothing about a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffResult:
    """What two traces have in common, and where that ends."""

    config: Sequence[tuple[str, object, object]]  # key, value in the first, value in the second
    num_steps: int  # of the first trace that were compared, the one that differs included
    difference: Difference | None
    notes: Sequence[str]


def diff(first: Path, second: Path) -> DiffResult:
    """Compare call by call; times are left out, and ids count by order of arrival. Raises UserError."""
    with TraceReader(first) as left, TraceReader(second) as right:
        names = _Names()
        num_steps = number = 0
        difference, step = None, None
        ours, theirs = _calls(left), _calls(right)
        while difference is None:
            number += 1
            one, other = next(ours, None), names.matched(next(theirs, None))
            if one is None and other is None:
                break
            names.pair(one, other)
            other = names.matched(other)
            if isinstance(one, Scheduled) and one.step is not None:
                num_steps, step = num_steps + 1, one.step
            difference = find_difference(one, other, step=step, record=number, kinds=KINDS)
        notes = [] if difference else [*left.notes(), *right.notes()]
        return DiffResult(
            config=list(_config_differences(left.header, right.header)),
            num_steps=num_steps,
            difference=difference,
            notes=[*names.notes(), *notes],
        )


class _Names:
    """Ids of the second trace by those of the first: the n-th request that was added is the same one."""

    def __init__(self) -> None:
        self._first: dict[str, str] = {}

    def pair(self, one: Record | None, other: Record | None) -> None:
        """Two records that stand in the same place."""
        if isinstance(one, Added) and isinstance(other, Added) and one.request.id != other.request.id:
            self._first[other.request.id] = one.request.id

    def matched(self, record: Record | None) -> Record | None:
        """With the first trace's ids."""
        if record is None or not self._first:
            return record
        renamed: Record = msgspec.convert(self._renamed(msgspec.to_builtins(record)), Record, str_keys=True)
        return renamed

    def notes(self) -> list[str]:
        """That ids were translated, if they were."""
        return ["the ids of the two traces differ: requests are matched in order of arrival"] if self._first else []

    def _renamed(self, value: object) -> object:
        if isinstance(value, str):
            return self._first.get(value, value)
        if isinstance(value, Mapping):
            return {self._renamed(name): self._renamed(item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._renamed(item) for item in value]
        return value


def _calls(reader: TraceReader) -> Iterator[Record]:
    """What was asked and decided; when a driver looked at the clock is no matter."""
    return (record for record in reader.records() if not isinstance(record, Wake | Closed))


def _config_differences(left: Header, right: Header) -> Iterator[tuple[str, object, object]]:
    sides = []
    for header in (left, right):
        config = {group: values for group, values in header.config.items() if group not in _OWN_GROUPS}
        components = {f"{one.kind} {one.name}": f"{one.distribution} {one.version}" for one in header.components}
        sides.append(
            {
                **config,
                "tokenyard": header.tokenyard,
                "sizes": msgspec.to_builtins(header.sizes),
                "components": components,
            }
        )
    return config_differences(sides[0], sides[1])
