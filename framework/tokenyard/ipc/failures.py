"""Errors as messages: by the name of their class, which has to be one of ours or of Python's usual ones."""

from __future__ import annotations

import inspect

import msgspec

from tokenyard import errors
from tokenyard.errors import (
    EngineOverloadedError,
    TokenyardError,
    ValidationError,
)

_MAX_TEXT = 20_000  # characters of a message
_BUILTINS = (TypeError, ValueError, RuntimeError, MemoryError, OverflowError, ArithmeticError, NotImplementedError)
_PLAIN: dict[str, type[Exception]] = {
    **{kind.__name__: kind for kind in _BUILTINS},
    **{
        name: kind
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, TokenyardError) and not issubclass(kind, ValidationError | EngineOverloadedError)
    },
}
_OF_PARAMETERS: dict[str, type[ValidationError]] = {
    name: kind for name, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, ValidationError)
}


class ErrorMessage(msgspec.Struct, frozen=True):
    """What was raised in another process."""

    kind: str  # the class's name
    message: str
    parameter: str | None = None
    value: str | int | float | bool | None = None  # as it was given, or as text
    retry_after: float | None = None  # seconds
    cause: str | None = None  # the error it came from, in one line


def error_to_message(error: BaseException) -> ErrorMessage:
    """What can be told of an error; of one of a class that the other process may not know, that it is of that class."""
    kind = next((base for base in type(error).__mro__ if base.__name__ in _known()), None)
    message, cause = str(error)[:_MAX_TEXT], _cause(error)
    if kind is None or (kind is not type(error) and not issubclass(kind, TokenyardError)):
        return ErrorMessage("RuntimeError", f"{type(error).__name__}: {message}", cause=cause)
    if isinstance(error, ValidationError):
        return ErrorMessage(kind.__name__, message, error.parameter, _value(error.value), cause=cause)
    if isinstance(error, EngineOverloadedError):
        return ErrorMessage(kind.__name__, message, retry_after=error.retry_after, cause=cause)
    return ErrorMessage(kind.__name__, message, cause=cause)


def error_from_message(message: ErrorMessage) -> Exception:
    """The error itself; one of an unknown class is a RuntimeError that says so."""
    error = _error(message)
    if message.cause is not None:
        error.__cause__ = RuntimeError(message.cause)
    return error


def _error(message: ErrorMessage) -> Exception:
    if (with_parameter := _OF_PARAMETERS.get(message.kind)) is not None:
        return with_parameter(message.message, parameter=message.parameter or "", value=message.value)
    if message.kind == EngineOverloadedError.__name__:
        return EngineOverloadedError(message.message, retry_after=message.retry_after or 1.0)
    if (plain := _PLAIN.get(message.kind)) is not None:
        return plain(message.message)
    return RuntimeError(f"{message.kind}: {message.message}")


def _known() -> frozenset[str]:
    return frozenset({*_PLAIN, *_OF_PARAMETERS, EngineOverloadedError.__name__})


def _value(value: object) -> str | int | float | bool | None:
    if value is None or isinstance(value, str | float | bool):
        return value[:_MAX_TEXT] if isinstance(value, str) else value
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return value
    try:
        return repr(value)[:_MAX_TEXT]
    except Exception:  # of a class of somebody else's
        return f"<{type(value).__name__}>"


def _cause(error: BaseException) -> str | None:
    cause = error.__cause__
    return None if cause is None else f"{type(cause).__name__}: {cause}"[:_MAX_TEXT]
