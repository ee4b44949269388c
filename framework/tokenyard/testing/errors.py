"""What goes wrong in tests: a rule that does not hold, and an extra that is not installed."""

from __future__ import annotations

from tokenyard.errors import UserError


class ContractViolation(AssertionError):  # noqa: N818 - it says what happened to the contract
    """A rule does not hold. `rule` is its id; the message has it in front, and the steps that led there below."""

    def __init__(self, rule: str, what: str, trace: str = "") -> None:
        super().__init__(f"{rule}: {what}" + (f"\n{trace}" if trace else ""))
        self.rule = rule
        self.what = what
        self.trace = trace

    def with_trace(self, trace: str) -> ContractViolation:
        """The same, with the steps that led there."""
        return self if self.trace else ContractViolation(self.rule, self.what, trace)


class MissingExtraError(UserError, ImportError):
    """The suites need packages that only the extra `testing` brings."""
