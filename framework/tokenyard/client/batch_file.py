"""OpenAI's batch format: lines of requests, and the rows that answer them."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import msgspec

if TYPE_CHECKING:
    from tokenyard.client.connection import Answer

ROUTES = ("/v1/chat/completions", "/v1/completions")
_ENVELOPE_BYTES = 64 * 1024  # of a line, around the body
_DIGEST_BYTES = 16
_MAX_ID = 512  # characters of a custom_id


class BatchRequest(NamedTuple):
    """A line of the input. One with an `error` is not sent anywhere."""

    number: int  # of the line, from 1
    custom_id: str | None
    route: str = ""
    body: bytes = b""
    error: str | None = None


class _Line(msgspec.Struct):
    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _Body(msgspec.Struct):
    stream: object = None


class _Name(msgspec.Struct):
    custom_id: object = None


class _Response(msgspec.Struct):
    status_code: int
    request_id: str | None
    body: object


class _Error(msgspec.Struct):
    code: str
    message: str


class _Row(msgspec.Struct):
    id: str
    custom_id: str | None
    response: _Response | None = None
    error: _Error | None = None


class BatchReader:
    """Reads requests one at a time: memory does not grow with the file but for a digest of each custom_id."""

    def __init__(self, file: BinaryIO, max_body_bytes: int) -> None:
        self._file = file
        self._max_bytes = max_body_bytes + _ENVELOPE_BYTES
        self._seen: set[bytes] = set()

    def __iter__(self) -> Iterator[BatchRequest]:
        number = 0
        while line := self._file.readline(self._max_bytes + 1):
            number += 1
            if len(line) > self._max_bytes and not line.endswith(b"\n"):
                self._skip_line()
                yield BatchRequest(number, None, error=f"the line is longer than {self._max_bytes} bytes")
            elif text := line.removeprefix(b"\xef\xbb\xbf").strip():
                yield self._read(number, text)

    def _skip_line(self) -> None:
        while (rest := self._file.readline(self._max_bytes)) and not rest.endswith(b"\n"):
            pass

    def _read(self, number: int, text: bytes) -> BatchRequest:
        try:
            line = msgspec.json.decode(text, type=_Line)
            problem = self._problem(line)
        except RecursionError:
            return BatchRequest(number, None, error="the line is nested too deeply")
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return BatchRequest(number, _custom_id(text), error=f"the line is no request: {error}")
        if problem is not None:
            return BatchRequest(number, line.custom_id[:_MAX_ID], error=problem)
        return BatchRequest(number, line.custom_id, line.url, bytes(line.body))

    def _problem(self, line: _Line) -> str | None:
        if not 0 < len(line.custom_id) <= _MAX_ID:
            return f"custom_id must have 1 to {_MAX_ID} characters"
        digest = hashlib.blake2b(line.custom_id.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).digest()
        if digest in self._seen:
            return "an earlier line has the same custom_id; each must be its own"
        self._seen.add(digest)
        if line.method != "POST":
            return f"method must be POST, got {line.method[:100]!r}"
        if line.url not in ROUTES:
            return f"url must be one of {', '.join(ROUTES)}, got {line.url[:100]!r}"
        if msgspec.json.decode(line.body, type=_Body).stream not in (None, False):
            return "stream must be false or absent: a batch has whole answers"
        return None


def _custom_id(text: bytes) -> str | None:
    """The name of a line that is no request, if it has one."""
    try:
        name = msgspec.json.decode(text, type=_Name).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return name[:_MAX_ID] if isinstance(name, str) else None


def answer_row(request: BatchRequest, answer: Answer) -> bytes:
    """A line of the output. Whatever the status is: an error's body says what was wrong."""
    try:
        body: object = msgspec.json.decode(answer.body)
    except (ValueError, RecursionError):
        return error_row(request, "invalid_answer", f"the answer of status {answer.status} is not JSON")
    response = _Response(answer.status, answer.headers.get("x-request-id"), body)
    return _line(_Row(_row_id(), request.custom_id, response))


def error_row(request: BatchRequest, code: str, message: str) -> bytes:
    """A line of the output for a request that has no answer."""
    return _line(_Row(_row_id(), request.custom_id, error=_Error(code, f"line {request.number}: {message}")))


def _line(row: _Row) -> bytes:
    return msgspec.json.encode(row) + b"\n"


def _row_id() -> str:
    return f"batch_req_{uuid.uuid4().hex}"
