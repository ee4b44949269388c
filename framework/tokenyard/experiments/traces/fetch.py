"""Fetching a public trace: one file, with a size cap and a checksum, put in place whole or not at all."""

from __future__ import annotations

import hashlib
import http.client
import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from tokenyard.errors import TokenyardError, UserError

if TYPE_CHECKING:
    from tokenyard.experiments.traces.sources import Source

_TIMEOUT = 60.0  # seconds without a byte
_CHUNK_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class FetchedTrace:
    """A file in its place."""

    path: Path
    sha256: str
    was_there: bool
    is_verified: bool  # against a checksum that ships with Tokenyard, or that an earlier fetch has recorded


def fetch_trace(source: Source, folder: Path, on_bytes: Callable[[int], None] = lambda count: None) -> FetchedTrace:
    """The trace in `folder`, fetched unless it is there already; `on_bytes` hears of each chunk.

    A file whose checksum we do not ship is trusted the first time: its sha256 is written beside it, and must be the
    same ever after. An interrupted fetch leaves nothing and begins anew. Raises UserError for a folder that cannot be
    written and a file there that is another one, and TokenyardError when the fetch fails.
    """
    target = folder / source.file
    record = folder / f"{source.file}.sha256"
    with _folder_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        expected = source.sha256 or _recorded(record)
        if target.is_file():
            found = _digest(target)
            if expected is not None and found != expected:
                raise UserError(f"{target} has sha256 {found}, not {expected}; remove it and fetch it again")
            if expected is None:
                record.write_text(f"{found}\n")
            return FetchedTrace(target, found, was_there=True, is_verified=expected is not None)
        with _part_file(folder) as (part, stream):
            found = _download(source, stream, on_bytes)
            if expected is not None and found != expected:
                raise TokenyardError(_changed(source, found, expected, record))
            if source.sha256 is None:
                record.write_text(f"{found}\n")
            stream.close()
            os.replace(part, target)
    return FetchedTrace(target, found, was_there=False, is_verified=expected is not None)


def _changed(source: Source, found: str, expected: str, record: Path) -> str:
    where = "the one that Tokenyard knows" if source.sha256 else f"the one of the first fetch, in {record}"
    return f"{source.url} has sha256 {found}, not {expected}, {where}: it was changed or damaged; nothing was kept"


@contextmanager
def _folder_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{folder}: the trace cannot be stored ({error.strerror or error}); name another folder with --to"
        ) from error


@contextmanager
def _part_file(folder: Path) -> Iterator[tuple[Path, IO[bytes]]]:
    """A file of our own beside the target, which is gone afterwards unless it was renamed."""
    handle, name = tempfile.mkstemp(prefix=".fetch-", dir=folder)
    try:
        with os.fdopen(handle, "wb") as stream:
            yield Path(name), stream
    finally:
        with suppress(FileNotFoundError):
            os.unlink(name)


def _download(source: Source, target: IO[bytes], on_bytes: Callable[[int], None]) -> str:
    """Returns the sha256 of what was written."""
    if not source.url.startswith(("https://", "http://")):
        raise UserError(f"{source.url}: only http and https can be fetched")
    try:
        with urllib.request.urlopen(source.url, timeout=_TIMEOUT) as response:  # noqa: S310  # checked above
            return _copy(response, source, target, on_bytes)
    except http.client.IncompleteRead as error:
        raise TokenyardError(f"{source.url}: the connection ended early; run the command again") from error
    except urllib.error.HTTPError as error:
        raise TokenyardError(f"{source.url}: the server answered {error.code} {error.reason}") from error
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise TokenyardError(f"{source.url}: cannot be fetched ({reason}); is there a network?") from error


def _copy(
    response: http.client.HTTPResponse, source: Source, target: IO[bytes], on_bytes: Callable[[int], None]
) -> str:
    digest = hashlib.sha256()
    size = 0
    while chunk := response.read(_CHUNK_BYTES):
        size += len(chunk)
        if size > source.max_bytes:
            raise TokenyardError(f"{source.url}: larger than the {source.max_bytes} bytes that it may have; not kept")
        digest.update(chunk)
        target.write(chunk)
        on_bytes(len(chunk))
    told = response.headers.get("Content-Length")
    if told is not None and told.isdigit() and int(told) != size:
        raise TokenyardError(f"{source.url}: {size} of {told} bytes came; run the command again")
    return digest.hexdigest()


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _recorded(record: Path) -> str | None:
    try:
        return record.read_text().strip() or None
    except FileNotFoundError:
        return None
