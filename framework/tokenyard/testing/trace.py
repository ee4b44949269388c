"""Trace: the last calls of a harness, shown with what went wrong after them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tokenyard.testing.errors import ContractViolation

if TYPE_CHECKING:
    from tokenyard.arrays import IntArray
    from tokenyard.engine_outputs import EngineCoreOutputs
    from tokenyard.request import EngineCoreRequest

_LONGEST = 60  # calls that are kept
_MOST_ITEMS = 6  # of a list that are shown


class Trace:
    """A violation that passes through `call` gets the calls so far."""

    def __init__(self) -> None:
        self._calls: deque[str] = deque(maxlen=_LONGEST)

    @contextmanager
    def call(self, text: str) -> Iterator[None]:
        """Around one call of the harness."""
        self._calls.append(text)
        try:
            yield
        except ContractViolation as violation:
            raise self.told(violation) from None

    def explain(self, text: str) -> None:
        """What the call turned out to do."""
        self._calls[-1] = text

    def told(self, violation: ContractViolation) -> ContractViolation:
        """The violation with the calls that led there."""
        return violation.with_trace("after:\n" + "\n".join(f"  {call}" for call in self._calls))


def short(items: Sequence[object] | IntArray) -> str:
    """A list, cut after a few items."""
    shown = ", ".join(str(item) for item in items[:_MOST_ITEMS])
    return f"[{shown}]" if len(items) <= _MOST_ITEMS else f"[{shown}, ... {len(items)} in all]"


def told_step(scheduled: Mapping[str, int], sampled: Mapping[str, Sequence[int]], outputs: EngineCoreOutputs) -> str:
    """What a turn of the loop did."""
    ended = {end.request_id: end.reason.value for end in outputs.finished}
    return f"step() scheduled {scheduled}, sampled {sampled}, ended {ended}"


def told_request(request: EngineCoreRequest, sampling: Mapping[str, object]) -> str:
    """A request as it was added: its priority, and what else was not left out."""
    hints = {
        "client": request.client_id,
        "session": request.session_id,
        "deadline": request.deadline,
        "service_level": request.service_level,
        "metadata": request.metadata or None,
    }
    given = {name: hint for name, hint in hints.items() if hint is not None}
    words = keywords({"priority": request.priority, **given, **sampling})
    return f"add({short(request.prompt_token_ids)}, {request.request_id!r}{words})"


def keywords(options: Mapping[str, object]) -> str:
    """`, name=value` for each."""
    return "".join(f", {name}={value!r}" for name, value in options.items())
