"""Every error that Tokenyard raises on purpose, and the exit code the command line gives it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


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


class CapacityError(UserError):
    """The KV cache cannot hold what was asked for; the message has the numbers."""


class EngineDeadError(TokenyardError):
    """The engine stopped on an internal error; requests in flight are lost."""

    exit_code = 3


class EngineOverloadedError(TokenyardError):
    """The engine has as much to do as it may have; nothing was done for this request. Try again after `retry_after` s."""

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


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
