"""OutcomeMaker: what a step did for its requests, as policies are told it."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar, cast, overload

import numpy as np

from tokenyard.interfaces.outcomes import StepOutcomes
from tokenyard.interfaces.policy import StepOutcome
from tokenyard.scheduler.stays import Stays

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from tokenyard.arrays import BoolArray, IntArray, LongArray
    from tokenyard.interfaces.policy import RequestView
    from tokenyard.scheduler.request_state import Request
    from tokenyard.scheduler.running import Landed
    from tokenyard.scheduler.sampled import Taken
    from tokenyard.scheduler.slots import SlotTable
    from tokenyard.scheduler_output import SchedulerOutput

KeyT = TypeVar("KeyT")
ArrayT = TypeVar("ArrayT", bound="np.ndarray")

_MOST_UNUSED = 1024  # groups that are remembered beyond two for each slot


class OutcomeMaker:
    """Called once a step, if the policy wants to be told. A batch that did not change is looked at once."""

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._rows: _Rows | None = None
        self._clients = _Groups[str | None](lambda request: request.client_id)
        self._sessions = _Groups["tuple[str | None, str] | None"](_session)

    def outcomes(self, output: SchedulerOutput, taken: Taken, landed: Landed, ended: Collection[str]) -> StepOutcomes:
        """What `on_step` is given, of a step whose tokens were `taken` in. It stays as it is, whoever keeps it."""
        rows = self._rows
        if landed.alive is not None or rows is None or rows.slots is not output.slots:
            rows = self._rows_of(output, landed)
        if rows.kept is None:  # all of them, and another step with these slots has the same
            self._rows = rows
        known = self._table.num_tokens[rows.slots]
        if landed.preempted:  # the tokens of these have left the table
            known = np.array([request.num_tokens for request in rows.requests], dtype=np.int32)
        return _Outcomes(rows, _column(output.num_scheduled_tokens, rows), _new(output, taken, rows), known, ended)

    def _rows_of(self, output: SchedulerOutput, landed: Landed) -> _Rows:
        """Those of requests that are still there; one that was preempted meanwhile is told of as well."""
        found = [self._table.requests[slot] for slot in output.slots.tolist()]
        for row, request in landed.preempted:
            found[row] = request
        kept, slots, generations = None, output.slots, output.generations
        if landed.alive is not None:
            kept = np.flatnonzero([request is not None for request in found])
            slots, generations = slots[kept], generations[kept]
        requests = tuple(request for request in found if request is not None)
        return _Rows(slots, generations, requests, kept, self._clients, self._sessions)


class _Rows:
    """Whose rows a step has. R = rows."""

    def __init__(
        self,
        slots: LongArray,
        generations: IntArray,
        requests: tuple[Request, ...],
        kept: LongArray | None,
        clients: _Groups[str | None],
        sessions: _Groups[tuple[str | None, str] | None],
    ) -> None:
        self.slots = slots
        self.generations = generations
        self.requests = requests
        self.kept = kept  # which of the step's rows these are; None = all
        self._clients = clients
        self._sessions = sessions

    @cached_property
    def clients(self) -> _Grouping[str | None]:
        return self._clients.of(self)

    @cached_property
    def sessions(self) -> _Grouping[tuple[str | None, str] | None]:
        return self._sessions.of(self)

    @cached_property
    def num_prompt_tokens(self) -> LongArray:
        return np.array([request.num_prompt_tokens for request in self.requests], dtype=np.int64)


class _Grouping(NamedTuple, Generic[KeyT]):
    """Which group each row is in."""

    numbers: LongArray  # [R]
    present: Sequence[int]  # numbers that there are
    keys: Sequence[KeyT]  # by number

    def sums(self, values: IntArray | LongArray) -> Iterator[tuple[KeyT, int]]:
        if len(values) != len(self.numbers):
            raise ValueError(f"{len(values)} values for the {len(self.numbers)} rows of a step")
        sums = np.bincount(self.numbers, weights=values)  # exact below 2**53
        return ((self.keys[number], int(sums[number])) for number in self.present)


class _Groups(Generic[KeyT]):
    """A number for each group of requests; which group the request of a slot is in is looked up once a stay."""

    def __init__(self, key: Callable[[Request], KeyT]) -> None:
        self._key = key
        self._stays = Stays()
        self._numbers: dict[KeyT, int] = {}
        self._keys: list[KeyT] = []  # by number
        self._of_slots = np.zeros(0, dtype=np.int64)

    def of(self, rows: _Rows) -> _Grouping[KeyT]:
        """The groups of these rows."""
        if len(self._keys) > 2 * len(self._stays) + _MOST_UNUSED:
            self._numbers, self._keys = {}, []  # the old list is what earlier groupings name theirs by
            self._stays.forget()
        missing = self._stays.look(rows.slots, rows.generations)
        self._of_slots = np.pad(self._of_slots, (0, len(self._stays) - len(self._of_slots)))
        for row in missing:
            self._of_slots[rows.slots[row]] = self._number(self._key(rows.requests[row]))
        numbers = self._of_slots[rows.slots]
        return _Grouping(numbers, np.flatnonzero(np.bincount(numbers)).tolist(), self._keys)

    def _number(self, key: KeyT) -> int:
        number = self._numbers.setdefault(key, len(self._keys))
        if number == len(self._keys):
            self._keys.append(key)
        return number


class _Outcomes(StepOutcomes):
    """Columns at hand; the others, and rows, when somebody reads them."""

    def __init__(self, rows: _Rows, computed: IntArray, new: IntArray, known: IntArray, ended: Collection[str]) -> None:
        self._rows = rows
        self._computed = computed
        self._new = new
        self._known = known  # [R] tokens of the requests, the new ones included
        self._ended = ended

    @property
    def requests(self) -> Sequence[RequestView]:
        return cast("tuple[RequestView, ...]", self._rows.requests)

    @property
    def num_computed_tokens(self) -> IntArray:
        return self._computed

    @property
    def num_new_tokens(self) -> IntArray:
        return self._new

    @cached_property
    def is_first_token(self) -> BoolArray:
        return _frozen((self._new > 0) & (self._known - self._rows.num_prompt_tokens == self._new))

    @cached_property
    def is_finished(self) -> BoolArray:
        if not self._ended:
            return _frozen(np.zeros(len(self), dtype=np.bool_))
        return _frozen(np.array([one.request_id in self._ended for one in self._rows.requests], dtype=np.bool_))

    def sum_by_client(self, values: IntArray | LongArray) -> Mapping[str | None, int]:
        return dict(self._rows.clients.sums(values))

    def sum_by_session(self, values: IntArray | LongArray) -> Mapping[tuple[str | None, str], int]:
        return {key: value for key, value in self._rows.sessions.sums(values) if key is not None}

    @cached_property
    def _all(self) -> list[StepOutcome]:
        columns = (self._computed, self._new, self.is_first_token, self.is_finished)
        return list(map(StepOutcome, self.requests, *(column.tolist() for column in columns)))

    def __len__(self) -> int:
        return len(self._rows.requests)

    def __iter__(self) -> Iterator[StepOutcome]:
        return iter(self._all)

    @overload
    def __getitem__(self, index: int) -> StepOutcome: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[StepOutcome]: ...
    def __getitem__(self, index: int | slice) -> StepOutcome | Sequence[StepOutcome]:
        return self._all[index]


def _session(request: Request) -> tuple[str | None, str] | None:
    return None if request.session_id is None else (request.client_id, request.session_id)


def _column(values: ArrayT, rows: _Rows) -> ArrayT:
    """A column of the step, of these rows."""
    chosen = values if rows.kept is None else cast("ArrayT", values[rows.kept])
    return _frozen(chosen.view())


def _new(output: SchedulerOutput, taken: Taken, rows: _Rows) -> IntArray:
    """[R] tokens that the step delivered. `taken` has no rows of requests that got none."""
    if len(taken.num_tokens) == len(rows.requests):
        return _frozen(taken.num_tokens.view())
    new = np.zeros(len(rows.requests), dtype=np.int32)
    samples = np.flatnonzero(_column(output.samples, rows))
    if len(samples) == len(taken.num_tokens):
        new[samples] = taken.num_tokens
    else:  # rows that were to sample and did not
        counts = dict(zip(taken.request_ids, taken.num_tokens.tolist(), strict=True))
        new[:] = [counts.get(request.request_id, 0) for request in rows.requests]
    return _frozen(new)


def _frozen(array: ArrayT) -> ArrayT:
    """Read-only: a policy that wrote into it would change what others read."""
    array.flags.writeable = False
    return array
