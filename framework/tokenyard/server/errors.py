"""Errors as HTTP: one place that decides what a client is told."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from tokenyard.errors import (
    DeadlineError,
    EngineDeadError,
    EngineOverloadedError,
    TokenyardError,
    UnknownModelError,
    UserError,
    ValidationError,
)
from tokenyard.sampling_checks import short
from tokenyard.server.missing_endpoints import feature_of
from tokenyard.server.service import request_id_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastapi import FastAPI
    from starlette.requests import Request

logger = logging.getLogger(__name__)

TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}
RETRY_AFTER = 1  # seconds, where nobody knows better
_MAX_MESSAGE = 2000  # characters
_MAX_PROBLEMS = 5  # that one message lists


_NEEDED = {
    "messages": "a list of messages, each with a role and a content",
    "prompt": "text, a list of texts, or token ids",
    "tokens": "a list of token ids",
    "the body": "a JSON object",
}
_ALLOWED = {
    "model_attributes_type": "a JSON object",
    "model_type": "a JSON object",
    "dict_type": "a JSON object",
    "list_type": "a list",
    "string_type": "text",
    "bool_type": "true or false",
    "int_type": "an integer",
    "int_parsing": "an integer",
    "int_parsing_size": "an integer of fewer digits",
    "float_type": "a number",
    "finite_number": "a finite number",
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
    "string_too_short": "text of at least {min_length} characters",
    "string_too_long": "text of at most {max_length} characters",
    "literal_error": "one of {expected}",
}
"""By pydantic's kinds of errors, of which these can come; and what fields are that requests cannot do without."""


class ErrorObject(msgspec.Struct, frozen=True, kw_only=True):
    """What OpenAI's clients find under `error`; `code` is the HTTP status."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every answer with a status from 400 on; also an event of a stream that broke."""

    error: ErrorObject


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReply:
    """A status with what a client is told."""

    status: int
    message: str
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> bytes:
        """JSON."""
        kind = TYPES.get(self.status, "InternalServerError" if self.status >= 500 else "BadRequestError")
        message = _without_innards(self.message[:_MAX_MESSAGE])
        return msgspec.json.encode(
            ErrorBody(error=ErrorObject(message=message, type=kind, param=self.param, code=self.status))
        )

    def response(self) -> Response:
        """As a whole answer."""
        return Response(self.body(), self.status, dict(self.headers), "application/json")


def describe_error(error: BaseException, request_id: str) -> ErrorReply:
    """What a client is told of an error. What it may not be told is logged here, under the request's id."""
    match error:
        case HTTPException():
            return _of_http(error)
        case RequestValidationError():
            return _of_body(error)
        case UnknownModelError():
            return ErrorReply(status=404, message=str(error), param=error.parameter)
        case ValidationError():
            return ErrorReply(status=400, message=str(error), param=error.parameter)
        case UserError():
            return ErrorReply(status=400, message=str(error))
        case DeadlineError():
            return ErrorReply(status=504, message=str(error))
        case EngineOverloadedError():
            return ErrorReply(status=503, message=str(error), headers=_retry_after(error.retry_after))
        case EngineDeadError():
            logger.debug("request %s: %s", request_id, error)  # the server has told it once for all
            return ErrorReply(
                status=503, message="the engine is not running; try again later", headers=_retry_after(RETRY_AFTER)
            )
    logger.error("request %s failed", request_id, exc_info=error)
    return ErrorReply(status=500, message=f"internal error; the server's log has it under request {request_id}")


def add_error_handlers(app: FastAPI) -> None:
    """Every error that a route raises becomes an ErrorBody."""

    async def handle(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException) and error.status_code == 404:
            error = _of_path(request.scope["path"], error)
        return describe_error(error, request_id_of(request)).response()

    for kind in (HTTPException, RequestValidationError, TokenyardError):
        app.add_exception_handler(kind, handle)


def _of_path(path: str, error: HTTPException) -> HTTPException:
    feature = feature_of(path)
    return error if feature is None else HTTPException(404, f"{feature} not available in this version")


def _retry_after(seconds: float) -> dict[str, str]:
    return {"Retry-After": str(max(1, round(seconds)))}


def _of_http(error: HTTPException) -> ErrorReply:
    message = error.detail
    if error.status_code == 404 and message == "Not Found":
        message = "there is no such endpoint; /openapi.json lists all of them"
    elif error.status_code == 405:
        message = "this endpoint does not take this method; /openapi.json lists what each takes"
    return ErrorReply(status=error.status_code, message=message, headers=error.headers or {})


def _of_body(error: RequestValidationError) -> ErrorReply:
    problems = error.errors()
    told = [_problem(problem) for problem in problems[:_MAX_PROBLEMS]]
    more = len(problems) - len(told)
    message = "; ".join(told) + (f"; and {more} more" if more > 0 else "")
    return ErrorReply(status=400, message=message, param=_path(problems[0]) if problems else None)


def _problem(problem: Mapping[str, object]) -> str:
    path = _path(problem) or "the body"
    kind = str(problem.get("type"))
    if kind == "missing":
        what = _NEEDED.get(path)
        return f"{path} is missing" + (f"; give {what}" if what else "; it has to be given")
    context = problem.get("ctx")
    limits = context if isinstance(context, dict) else {}
    allowed = _ALLOWED[kind].format(**limits) if kind in _ALLOWED else "of the kind that /openapi.json says"
    return f"{path}={short(problem.get('input'))} is not valid: it must be {allowed}"


def _path(problem: Mapping[str, object]) -> str | None:
    """Where in the body, as `messages.0.content`; None for the body itself."""
    location = problem.get("loc")
    parts = list(location) if isinstance(location, tuple | list) else []
    if parts[:1] in (["body"], ["query"], ["path"], ["header"]):
        parts = parts[1:]
    return ".".join(str(part) for part in parts)[:200] or None


_INNARDS = re.compile(
    r"<[^<>]{1,200} at 0x[0-9a-fA-F]+>"  # an object's repr
    r"|\b0x[0-9a-fA-F]{6,}\b"
    r"|(?<![\w./:])/(?!v1/|tokenize|detokenize|openapi)(?:[\w.+-]+/)+[\w.+-]+"  # a file's path
    r"|Traceback \(most recent call last\).*",
    re.DOTALL,
)


def _without_innards(message: str) -> str:
    """Messages of libraries may hold what is nobody's business; our own never should."""
    return _INNARDS.sub("...", message)
