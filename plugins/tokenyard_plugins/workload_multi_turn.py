"""`workload=multi_turn`: conversations, whose next turn comes some thought after the last answer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenyard import ComponentDescriptor, hookimpl
from tokenyard.interfaces import OUTPUT, Segment, Workload, WorkloadRequest

from tokenyard_plugins._generated.arrival_options import ArrivalOptions, check_count, check_seconds
from tokenyard_plugins._generated.length_options import LengthOptions, check_lengths

if TYPE_CHECKING:
    from tokenyard.interfaces import WorkloadContext

_MOST_TURNS = 1000
_SYSTEM = 0  # content of the system prompt, which all sessions share


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiTurnOptions(ArrivalOptions):
    """Options of `workload=multi_turn`. `rate`, `burstiness` and `profile` are of the sessions' first turns."""

    num_sessions: int = 100
    turns: int | LengthOptions = 4  # of a session, at most 1000
    system_prompt: int = 0  # tokens with which every session begins
    prompt: int | LengthOptions = 128  # tokens that a turn adds to the conversation
    output: int | LengthOptions = 128  # tokens
    think_time: float = 10.0  # seconds from an answer's end to the next turn, on average
    think_time_cv: float = 1.0  # its standard deviation by its mean, Gamma distributed; 0 = always the same
    max_prompt: int | None = None  # a session ends before a prompt of more tokens; None = no limit

    def __post_init__(self) -> None:
        ArrivalOptions.__post_init__(self)  # super() does not know a class with slots
        check_count("num_sessions", self.num_sessions)
        check_lengths(turns=self.turns, prompt=self.prompt, output=self.output)
        if self.system_prompt:
            check_lengths(system_prompt=self.system_prompt)
        check_seconds("think_time", self.think_time, may_be_zero=True)
        if not 0 <= self.think_time_cv <= 30:
            raise ValueError(f"think_time_cv={self.think_time_cv} is not valid: it must be from 0 to 30")
        if self.max_prompt is not None:
            check_count("max_prompt", self.max_prompt)


@dataclass(frozen=True, slots=True)
class _Turn:
    """What a turn adds."""

    prompt: int
    output: int
    think_time: float  # before it


@dataclass(frozen=True, slots=True, kw_only=True)
class _TurnRequest(WorkloadRequest):
    """A turn knows the rest of its session, so nobody else has to keep it."""

    later: Sequence[_Turn]


class MultiTurnWorkload(Workload):
    """A turn's prompt is the whole conversation so far and some new text. A session is drawn when it begins."""

    has_content = True

    def __init__(self, options: MultiTurnOptions, context: WorkloadContext) -> None:
        self._options, self._seed = options, context.seed

    @property
    def description(self) -> str:
        from tokenyard_plugins._generated.lengths import make_lengths

        options = self._options
        return (
            f"{options.num_sessions} generated conversations, {options.rate:g} per second, of "
            f"{make_lengths(options.turns).mean:.3g} turns on average, {options.think_time:g} s apart, "
            f"seed {self._seed}"
        )

    def requests(self) -> Iterator[WorkloadRequest]:
        from tokenyard_plugins._generated.arrival_times import arrival_times  # numpy only when chosen
        from tokenyard_plugins._generated.draws import generator

        system = self._options.system_prompt
        before = (Segment(_SYSTEM, system),) if system else ()
        times = arrival_times(self._options, generator(self._seed, "arrivals"))
        sessions = zip(range(self._options.num_sessions), times, self._sessions(), strict=False)
        for number, arrival, turns in sessions:
            if turn := self._turn(str(number), before, turns, arrival):
                yield turn

    def follow_ups(self, request: WorkloadRequest, end: float) -> Sequence[WorkloadRequest]:
        if not isinstance(request, _TurnRequest) or not request.later:
            return ()
        before = (*(request.content or ()), Segment(OUTPUT, request.num_output_tokens))
        turn = self._turn(request.session or "", before, request.later, end + request.later[0].think_time)
        return (turn,) if turn else ()

    def _turn(
        self, session: str, before: Sequence[Segment], turns: Sequence[_Turn], arrival: float
    ) -> WorkloadRequest | None:
        """The next turn; None when the conversation has become too long."""
        new = Segment(1 + int(session) * _MOST_TURNS + _num_turns(before), turns[0].prompt)
        content = (*before, new)
        length, most = sum(segment.num_tokens for segment in content), self._options.max_prompt
        if most is not None and length > most:
            return None
        return _TurnRequest(
            arrival=arrival,
            num_prompt_tokens=length,
            num_output_tokens=turns[0].output,
            session=session,
            content=content,
            later=turns[1:],
        )

    def _sessions(self) -> Iterator[Sequence[_Turn]]:
        """Without end, each drawn whole, so that nothing depends on when its turns come."""
        from tokenyard_plugins._generated.draws import gamma_stream, generator
        from tokenyard_plugins._generated.lengths import length_stream

        options, seed = self._options, self._seed
        prompts = length_stream(options.prompt, generator(seed, "prompt"))
        outputs = length_stream(options.output, generator(seed, "output"))
        thoughts = gamma_stream(options.think_time, options.think_time_cv, generator(seed, "think_time"))
        turns = map(_Turn, prompts, outputs, thoughts)
        for count in length_stream(options.turns, generator(seed, "turns")):
            yield tuple(itertools.islice(turns, min(count, _MOST_TURNS)))


def _num_turns(content: Sequence[Segment]) -> int:
    return sum(segment.content == OUTPUT for segment in content)


@hookimpl
def tokenyard_components() -> Iterator[ComponentDescriptor[MultiTurnOptions]]:
    yield ComponentDescriptor(
        component_kind="workload",
        name="multi_turn",
        api_version=(1, 7),
        summary="conversations: a turn comes some thought after the last answer, with all that was said before",
        options_type=MultiTurnOptions,
        factory=MultiTurnWorkload,
    )
