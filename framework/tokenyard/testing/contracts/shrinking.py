"""From an example that breaks a rule to the shortest that breaks it: what does not matter is left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tokenyard.testing.errors import ContractViolation

_MOST_TRIES = 600


class Shrinking:
    """Hypothesis draws a whole trace from one seed, so that it is crowded; so it cannot shorten one item by item."""

    def __init__(self, check: Callable[..., None], violation: ContractViolation) -> None:
        self._check = check
        self._rule = violation.rule
        self._num_tries = 0
        self.violation = violation  # of the shortest example so far

    def shorten(self, examples: Mapping[str, object]) -> Mapping[str, object]:
        """The examples, with items left out of those that are lists for as long as the same rule is broken."""
        for name, example in examples.items():
            if isinstance(example, list):
                examples = {**examples, name: self._without(example, name, examples)}
        return examples

    def _without(self, items: Sequence[object], name: str, examples: Mapping[str, object]) -> Sequence[object]:
        """Large pieces first, then smaller ones, until no single item can be left out."""
        size = max(1, len(items) // 2)
        while self._num_tries < _MOST_TRIES:
            before, start = len(items), 0
            while start < len(items):
                fewer = [*items[:start], *items[start + size :]]
                if self._breaks({**examples, name: fewer}):
                    items = fewer
                else:
                    start += size
            if size == 1 and len(items) == before:
                break
            size = max(1, size // 2)
        return items

    def _breaks(self, examples: Mapping[str, object]) -> bool:
        self._num_tries += 1
        if self._num_tries > _MOST_TRIES:
            return False
        try:
            self._check(**examples)
        except ContractViolation as violation:
            if violation.rule == self._rule:
                self.violation = violation
                return True
        return False
