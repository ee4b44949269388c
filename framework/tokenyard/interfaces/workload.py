"""Workload: which requests come, and when."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

COMPONENT_KIND = "workload"
"""`ComponentDescriptor.component_kind` of workloads, chosen by `workload=NAME`."""

OUTPUT = -1
"""`Segment.content` of tokens that the engine itself has generated: the answer to an earlier turn."""


class Segment(NamedTuple):
    """A stretch of a prompt: prompts that begin with equal segments begin with equal tokens (since API 1.7)."""

    content: int  # what stands there, any number from 0 that fits 64 bits; or OUTPUT
    num_tokens: int  # at least 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadRequest:
    """One request (since API 1.7). Times are seconds of the workload, which begins at 0."""

    arrival: float  # at least 0; of a follow-up, not before the end that it follows
    num_prompt_tokens: int  # at least 1
    num_output_tokens: int  # at least 1: it ends when it has so many
    client: str | None = None
    session: str | None = None
    priority: int = 0  # lower = more urgent, everywhere
    deadline: float | None = None  # seconds after arrival, above 0: when it has not ended by then, it is aborted
    # What the prompt consists of, in order, `num_prompt_tokens` in all; None = nobody knows, so it is like no other.
    content: Sequence[Segment] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadContext:
    """What a workload's factory is given."""

    seed: int  # of everything that is drawn
    limit: int | None  # requests that will be taken at most; None = all


class Workload(ABC):
    """A finite stream of requests (since API 1.7), made of nothing but its options and the seed.

    It is iterated once. What it draws depends on the seed alone, never on when it is asked, so that two policies meet
    the same requests. Long workloads are generated while they are taken: nothing may grow with their length.
    """

    @abstractmethod
    def requests(self) -> Iterator[WorkloadRequest]:
        """What comes by itself, in order of arrival; requests that arrive together in a fixed order."""

    def follow_ups(self, request: WorkloadRequest, end: float) -> Sequence[WorkloadRequest]:
        """What comes because `request`, its own object, has ended at time `end`: a next turn, after some thought."""
        return ()

    @property
    def has_content(self) -> bool:
        """Whether its requests say what they consist of. Otherwise prefix caching is off: it could find nothing."""
        return False

    @property
    def description(self) -> str:
        """A line for people: where it comes from, under which licence."""
        return ""
