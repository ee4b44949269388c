"""A workload whose requests are checked as they come: a plugin's mistake is one clear error, never a wrong result."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tokenyard.errors import PluginError, TokenyardError
from tokenyard.interfaces.workload import OUTPUT, Segment, WorkloadRequest
from tokenyard.scheduler.limits import MAX_PRIORITY

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tokenyard.interfaces.workload import Workload

_MOST_CONTENT = 2**64


class CheckedWorkload:
    """What a `Workload` says, or PluginError: for what it raises, and for a request that breaks the interface.

    Errors that are meant for the user, such as those of a trace's rows, stay what they are.
    """

    def __init__(self, workload: Workload, name: str) -> None:
        self._workload = workload
        self._name = name

    def requests(self) -> Iterator[WorkloadRequest]:
        """In order of arrival, as the interface demands."""
        latest, number = 0.0, 0
        coming = self._coming()
        while (request := self._next(coming, number)) is not None:
            where = f"request {number}"
            self._check(request, where)
            if request.arrival < latest:
                raise self._wrong(f"{where} arrives at {request.arrival}, after one that arrives at {latest}")
            latest = request.arrival
            number += 1
            yield request

    def follow_ups(self, request: WorkloadRequest, end: float, number: int) -> Sequence[WorkloadRequest]:
        """Those of request `number`, which ended at `end`."""
        try:
            follow_ups = tuple(self._workload.follow_ups(request, end))
        except TokenyardError:
            raise
        except (Exception, SystemExit) as error:
            raise self._raised(error, f"when request {number} had ended") from error
        for follow_up in follow_ups:
            where = f"a follow-up of request {number}"
            self._check(follow_up, where)
            if follow_up.arrival < end:
                raise self._wrong(f"{where} arrives at {follow_up.arrival}, before that has ended at {end}")
        return follow_ups

    def _coming(self) -> Iterator[WorkloadRequest]:
        try:
            return iter(self._workload.requests())
        except TokenyardError:
            raise
        except (Exception, SystemExit) as error:
            raise self._raised(error, "before its first request") from error

    def _next(self, coming: Iterator[WorkloadRequest], number: int) -> WorkloadRequest | None:
        """None at the end, and nowhere else: a None among the requests is one that is refused."""
        try:
            request = next(coming)
        except StopIteration:
            return None
        except TokenyardError:
            raise
        except (Exception, SystemExit) as error:
            raise self._raised(error, f"instead of request {number}") from error
        if request is None:
            raise self._wrong(f"request {number} is None")
        return request

    def _check(self, request: WorkloadRequest, where: str) -> None:
        wrong = _what_is_wrong(request)
        if wrong is not None:
            raise self._wrong(f"{where} {wrong}")

    def _wrong(self, what: str) -> PluginError:
        return PluginError(f"workload '{self._name}' is broken: {what}; WorkloadContract tells what it must keep")

    def _raised(self, error: BaseException, when: str) -> PluginError:
        return PluginError(f"workload '{self._name}' raised {type(error).__name__} {when}: {error}")


def _what_is_wrong(request: WorkloadRequest) -> str | None:
    """What follows the name of a request, or None."""
    if not isinstance(request, WorkloadRequest):
        return f"is a {type(request).__name__}, not a WorkloadRequest"
    if not _is_number(request.arrival) or not 0 <= request.arrival < math.inf:  # also refuses NaN
        return f"has arrival={request.arrival!r}; it is a finite number of seconds, at least 0"
    for name, count in (
        ("num_prompt_tokens", request.num_prompt_tokens),
        ("num_output_tokens", request.num_output_tokens),
    ):
        if type(count) is not int or not 1 <= count < 2**31:
            return f"has {name}={count!r}; it is a whole number, at least 1"
    if type(request.priority) is not int or not -MAX_PRIORITY <= request.priority <= MAX_PRIORITY:
        return f"has priority={request.priority!r}; it is a whole number from -2**53 to 2**53"
    if request.deadline is not None and not (_is_number(request.deadline) and 0 < request.deadline < math.inf):
        return f"has deadline={request.deadline!r}; it is seconds after arrival, above 0"
    for name, text in (("client", request.client), ("session", request.session)):
        if text is not None and not (isinstance(text, str) and text):
            return f"has {name}={text!r}; it is text, or None"
    return None if request.content is None else _what_is_wrong_with(request.content, request.num_prompt_tokens)


def _what_is_wrong_with(content: Sequence[Segment], num_prompt_tokens: int) -> str | None:
    total = 0
    for segment in content:
        if not isinstance(segment, Segment) or not _is_content(segment.content) or not _is_count(segment.num_tokens):
            return f"has {segment!r} in its content; a Segment has content from 0 to 2**64 - 1, or OUTPUT, and tokens"
        total += segment.num_tokens
    return None if total == num_prompt_tokens else f"has {num_prompt_tokens} prompt tokens and segments of {total}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return type(value) is int and 1 <= value < 2**31


def _is_content(value: object) -> bool:
    return type(value) is int and OUTPUT <= value < _MOST_CONTENT
