"""Random traces: requests that come, steps, aborts, resets, time - and what an engine makes of them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, overload

from hypothesis import strategies as st

from tokenyard.errors import CapacityError
from tokenyard.request import FinishReason, ServiceLevel
from tokenyard.testing.contracts.base import Result, Shape, seeded

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from tokenyard.scheduler_output import SchedulerOutput
    from tokenyard.testing.harness import EngineHarness

EOS = 50256
MAX_PROMPT, MAX_OUTPUT = 18, 24  # together they fit the smallest pool of `shapes`


@dataclass(frozen=True, slots=True)
class Add:
    """A request: a beginning that others share, and tokens of its own."""

    family: int
    num_shared: int
    num_own: int
    max_tokens: int
    eos_at: int  # index of the output token that is EOS, if it gets that far
    priority: int
    salt: str | None = None
    client: int | None = None
    session: int | None = None
    service_level: ServiceLevel | None = None
    deadline: float | None = None  # seconds from now; only in traces in which anything may happen

    @property
    def num_outputs(self) -> int:
        """How long its output is, when nothing else ends it."""
        return min(self.max_tokens, self.eos_at + 1)

    def __str__(self) -> str:
        ends = f", EOS at {self.eos_at}" if self.eos_at < self.max_tokens else ""
        names = ("priority", "salt", "client", "session", "service_level", "deadline")
        hints = "".join(f", {name}={getattr(self, name)}" for name in names if getattr(self, name) not in (None, 0))
        prompt = f"{self.num_shared} tokens of family {self.family} and {self.num_own} of its own"
        return f"add({prompt}, max_tokens={self.max_tokens}{ends}{hints})"

    def prompt(self, number: int) -> list[int]:
        shared = [1000 * self.family + position for position in range(self.num_shared)]
        return [*shared, *(100_000 + 100 * number + position for position in range(self.num_own))]


@dataclass(frozen=True, slots=True)
class Steps:
    """So many turns of the loop."""

    count: int


@dataclass(frozen=True, slots=True)
class Finish:
    """End one of the requests so far, dead or alive."""

    which: int
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Reset:
    """Forget the prefix cache, if nothing holds blocks."""


@dataclass(frozen=True, slots=True)
class Advance:
    """Let time pass."""

    seconds: float


Operation: TypeAlias = Add | Steps | Finish | Reset | Advance

_LENGTHS = [1, 2, 3, 5, 8, 12, 20, 20, 30, 30, 40]
_SEEDS = st.integers(0, 2**32 - 1)
_LEVELS = [None, None, ServiceLevel(ttft=0.5), ServiceLevel(ttft=5.0, tpot=0.5), ServiceLevel(e2e=30.0)]


def arrivals() -> st.SearchStrategy[list[Operation]]:
    """Traces in which every request runs to its own end, so that its tokens do not depend on schedules."""
    return st.builds(_arrivals, _SEEDS, st.sampled_from(_LENGTHS))


def traces() -> st.SearchStrategy[list[Operation]]:
    """Traces in which anything may happen at any moment."""
    return st.builds(_trace, _SEEDS, st.sampled_from(_LENGTHS))


def shapes(preempt_mode: str | None = None) -> st.SearchStrategy[Shape]:
    """Small engines: a few blocks, a few requests, a small budget; None = preemption as the config says."""
    return st.builds(_shape, _SEEDS, st.just(preempt_mode))


# Drawn from a seed rather than element by element: Hypothesis prefers short lists of small numbers, in which nothing is
# ever crowded, and tries many that are nearly alike. A trace that fails is shortened afterwards (`Shrinking`).


def _arrivals(seed: int, length: int) -> list[Operation]:
    draw = seeded(seed)
    kinds = draw.choices(["add", "steps", "time"], [6, 3, 1], k=length)
    return [_operation(kind, draw, anything=False) for kind in kinds]


def _trace(seed: int, length: int) -> list[Operation]:
    draw = seeded(seed)
    kinds = draw.choices(["add", "steps", "time", "finish", "reset"], [10, 7, 1, 3, 2], k=length)
    return [_operation(kind, draw, anything=True) for kind in kinds]


def _operation(kind: str, draw: Random, *, anything: bool) -> Operation:
    match kind:
        case "add":
            return Add(
                family=draw.randint(0, 1),
                num_shared=draw.choice([0, 5, MAX_PROMPT - 6]),
                num_own=draw.randint(1, 6),
                max_tokens=draw.choice([1, 5, MAX_OUTPUT]),
                eos_at=draw.randint(0, 3 * MAX_OUTPUT),
                priority=draw.randint(0, 2),
                salt=draw.choice([None, None, None, "tenant"]),
                client=draw.choice([None, 0, 1, 2]),
                session=draw.choice([None, None, 0, 1]),
                service_level=draw.choice(_LEVELS),
                deadline=draw.choice([None] * 7 + [8.0]) if anything else None,
            )
        case "steps":
            return Steps(draw.randint(1, 6))
        case "time":
            return Advance(draw.choice([0.0, 0.5, 10.0]))
        case "finish":
            return Finish(draw.randint(0, 20), draw.choice([FinishReason.ABORT, FinishReason.STOP]))
    return Reset()


def _shape(seed: int, preempt_mode: str | None) -> Shape:
    draw = seeded(seed)
    block_size = draw.choice([1, 2, 4, 16])
    num_tokens = MAX_PROMPT + MAX_OUTPUT + draw.choice([0, 5, 30])  # the longest request fits the empty pool
    return Shape(
        max_num_seqs=draw.choice([1, 3, 5, 8]),
        max_num_batched_tokens=draw.choice([8, 13, 64]),
        num_blocks=-(-num_tokens // block_size),
        block_size=block_size,
        enable_prefix_caching=draw.random() < 0.7,
        long_prefill_token_threshold=draw.choice([0, 0, 3]),
        preempt_mode=preempt_mode,
        num_host_blocks=draw.choice([1, 4, 40]) if preempt_mode == "swap" else 0,
        step_seconds=draw.choice([None, 0.2, 3.0]),
    )


class Player:
    """Plays a trace on an engine and keeps its schedule; with `asks_logprobs` most requests ask for some.

    `salt` ends every id, of requests, clients and sessions: their order stays, their hashes are others. `tells` is what
    an oracle is told of a request; None = how long its output is.
    """

    def __init__(
        self,
        harness: EngineHarness,
        *,
        asks_logprobs: bool = False,
        salt: str = "",
        tells: Callable[[Add], int] | None = None,
    ) -> None:
        self.harness = harness
        self._asks_logprobs = asks_logprobs
        self._salt = salt
        self._tells = tells or (lambda add: add.num_outputs)
        self.schedule: list[dict[str, int]] = []  # of each step: id without salt -> tokens
        self._num_added = 0
        self._eos_at: dict[str, int] = {}
        self._gave_none: set[tuple[str, int]] = set()
        self._on_execute = harness.executor.on_execute
        harness.executor.on_execute = self._note

    def play(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            self.apply(operation)

    def apply(self, operation: Operation) -> None:
        match operation:
            case Add():
                self._add(operation)
            case Steps(count):
                for _ in range(count):
                    self.step()
            case Finish(which, reason):
                self.harness.finish([self._id("r", which), "unknown"], reason)
            case Reset():
                self.harness.reset_prefix_cache()
            case Advance(seconds):
                self.harness.advance(seconds)

    def step(self) -> None:
        self.harness.step(self._sample)

    def finish(self) -> Mapping[str, Result]:
        """Run until everything has ended; how each request ended."""
        harness = self.harness
        # A step computes a token of somebody; what is preempted is computed again, at worst once for each other one.
        num_tokens = sum(record.num_tokens + MAX_OUTPUT for record in harness.requests.values())
        harness.run(50 + 2 * num_tokens * (1 + len(harness.requests)), self._sample)
        harness.check_idle()
        return self.results()

    def results(self) -> Mapping[str, Result]:
        return {
            self._unsalted(name): (tuple(record.output_token_ids), record.finish_reason)
            for name, record in self.harness.requests.items()
        }

    def _note(self, output: SchedulerOutput) -> None:
        self._on_execute(output)
        self.schedule.append({self._unsalted(name): count for name, count in self.harness.scheduled.items()})

    def _add(self, operation: Add) -> None:
        number, self._num_added = self._num_added, self._num_added + 1
        request_id = self._id("r", number)
        self._eos_at[request_id] = operation.eos_at
        deadline = operation.deadline
        try:
            self.harness.add(
                operation.prompt(number),
                request_id,
                priority=operation.priority,
                max_tokens=operation.max_tokens,
                cache_salt=operation.salt,
                client=self._id("c", operation.client),
                session=self._id("s", operation.session),
                service_level=operation.service_level,
                deadline=None if deadline is None else self.harness.clock.now() + deadline,
                true_output_tokens=self._tells(operation),
                logprobs=number % 3 if self._asks_logprobs and number % 4 else None,
                prompt_logprobs=number % 2 if self._asks_logprobs and number % 3 else None,
            )
        except CapacityError:  # refused as it may be; it leaves no trace
            return

    def _sample(self, request_id: str) -> list[int]:
        """The token of this position, by id; now and then a row samples two, as under speculation, or none at first."""
        index = len(self.harness.request(request_id).output_token_ids)
        kind = _number(self._unsalted(request_id), index) % 16
        if kind == 0 and (request_id, index) not in self._gave_none:
            self._gave_none.add((request_id, index))
            return []
        return [self._token(request_id, one) for one in range(index, index + (2 if kind == 1 else 1))]

    def _token(self, request_id: str, index: int) -> int:
        if index == self._eos_at.get(request_id):
            return EOS
        return 1 + _number(self._unsalted(request_id), index) % 1000

    @overload
    def _id(self, kind: str, number: int) -> str: ...
    @overload
    def _id(self, kind: str, number: int | None) -> str | None: ...
    def _id(self, kind: str, number: int | None) -> str | None:
        """Ids in the order of their numbers."""
        return None if number is None else f"{kind}{number:03}{self._salt}"

    def _unsalted(self, request_id: str) -> str:
        return request_id.removesuffix(self._salt)


def _number(request_id: str, index: int) -> int:
    return zlib.crc32(f"{request_id}/{index}".encode())


def play(
    harness: EngineHarness, operations: Sequence[Operation], *, asks_logprobs: bool = False
) -> Mapping[str, Result]:
    """Play a trace to the end of every request."""
    player = Player(harness, asks_logprobs=asks_logprobs)
    player.play(operations)
    return player.finish()
