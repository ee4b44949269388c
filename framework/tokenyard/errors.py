"""Every error that Tokenyard raises on purpose, and the exit code the command line gives it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path


class TokenyardError(Exception):
    """Base of all errors raised on purpose; `exit_code` is what the command line returns for it."""

    exit_code = 1


class UserError(TokenyardError, ValueError):
    """Something given by the user is wrong: the message says what was given, what is allowed, what to do."""

    exit_code = 2


class ConfigError(UserError):
    """A config key, value or override that does not hold."""


class PluginError(UserError):
    """A plugin that was chosen cannot be used: unknown, broken, blocked, of another API version, unavailable here."""


class PluginConflictError(PluginError):
    """Two distributions provide one name."""


class ModelLoadError(UserError):
    """A model that cannot be found, read or run."""


class ValidationError(UserError):
    """A request parameter out of its range; `parameter` and `value` say which."""

    def __init__(self, message: str, *, parameter: str, value: object) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.value = value


class UnsupportedError(ValidationError):
    """A known feature that this version does not have (yet); refused by name, never ignored."""


class UnknownModelError(ValidationError):
    """A request names a model that is not served here; the message lists those that are."""


class CapacityError(UserError):
    """The KV cache cannot hold what was asked for; the message has the numbers."""


class EngineDeadError(TokenyardError):
    """The engine stopped on an internal error; requests in flight are lost. `__cause__` is what it raised, if it did.

    Of an engine in a process of its own there is also how that ended: its exit code or the name of the signal, the last
    lines of its log, and where its stacks were written, if they were.
    """

    exit_code = 3
    ADVICE = "; start a new one"

    def __init__(
        self,
        message: str,
        *,
        process_exit_code: int | None = None,
        signal: str | None = None,
        last_log_lines: Sequence[str] = (),
        dump_path: Path | None = None,
    ) -> None:
        super().__init__(message)
        self.process_exit_code = process_exit_code
        self.signal = signal
        self.last_log_lines = tuple(last_log_lines)
        self.dump_path = dump_path

    @property
    def cause(self) -> str:
        """The message without the advice to those who made the engine themselves."""
        return str(self).removesuffix(self.ADVICE)

    def copied(self) -> EngineDeadError:
        """For one more who has to be told: an error that is raised twice collects the frames of both."""
        error = EngineDeadError(
            str(self),
            process_exit_code=self.process_exit_code,
            signal=self.signal,
            last_log_lines=self.last_log_lines,
            dump_path=self.dump_path,
        )
        error.__cause__ = self.__cause__
        return error


class EngineOverloadedError(TokenyardError):
    """The engine has as much to do as it may have; nothing was done for this request. Try again in `retry_after` s."""

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineError(TokenyardError):
    """A request was not done when its time was up; it was aborted, waiting or running."""


class RequestFailedError(TokenyardError):
    """The engine could not go on with one request, which ended with finish reason `error`; others are not concerned."""


class LogitsProcessorError(TokenyardError):
    """A logits processor failed for one request; the message names both, and the request ends with it."""


def nearest(name: str, allowed: Iterable[str]) -> str | None:
    """The allowed name closest to `name`, or None when nothing is close."""
    names = list(allowed)
    for same_case in (str, str.lower):  # XFORMERS means xformers, where nothing is closer as it is written
        written = {same_case(known): known for known in reversed(names)}
        if matches := difflib.get_close_matches(same_case(name), written, n=1, cutoff=0.6):
            return written[matches[0]]
    return None


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """The half sentence `; did you mean 'x'?`, or an empty string."""
    match = nearest(name, allowed)
    return f"; did you mean '{match}'?" if match else ""
