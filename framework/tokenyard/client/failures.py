"""RemoteError: what went wrong between here and a server, in one line."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from tokenyard.client.endpoint import KEY_VARIABLES
from tokenyard.errors import TokenyardError, UserError

if TYPE_CHECKING:
    from tokenyard.client.endpoint import Endpoint

_MAX_MESSAGE = 500  # characters of what a server says


class RemoteError(TokenyardError):
    """A server that cannot be reached, or that refused; `status` is its HTTP status, None where there was none."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        if status is not None and 400 <= status < 500:
            self.exit_code = UserError.exit_code  # what was asked is wrong; else the server is


@contextmanager
def told_as_remote_errors(endpoint: Endpoint) -> Iterator[None]:
    """What aiohttp and the system raise inside becomes a RemoteError."""
    import aiohttp  # only commands that talk to a server have loaded it

    try:
        yield
    except aiohttp.ClientConnectorCertificateError as error:
        raise RemoteError(
            f"the certificate of {endpoint.root} is not trusted ({_certificate_problem(error.certificate_error)}); set "
            "SSL_CERT_FILE to a file with the certificate that signed it, or give --insecure to take any"
        ) from error
    except aiohttp.ClientSSLError as error:
        reason = _short(str(error.os_error))
        raise RemoteError(f"cannot speak TLS with {endpoint.root}: {reason}; is it a server of https?") from error
    except aiohttp.ClientConnectorError as error:
        reason = os.strerror(error.errno) if error.errno else str(error.os_error) or type(error).__name__
        raise RemoteError(f"cannot connect to {endpoint.root}: {reason}; does the server run there?") from error
    except (aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError, ConnectionError) as error:
        raise RemoteError(f"{endpoint.root} broke off in the middle of an answer ({type(error).__name__})") from error
    except TimeoutError as error:
        raise RemoteError(f"{endpoint.root} did not answer in time") from error
    except (aiohttp.ClientError, asyncio.LimitOverrunError, OSError, ValueError) as error:
        raise RemoteError(f"no answer of {endpoint.root} can be used: {_short(str(error))}") from error


def _certificate_problem(error: Exception) -> str:
    return _short(error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else str(error)).lower()


def refusal(endpoint: Endpoint, status: int, body: bytes) -> RemoteError:
    """The error for an answer with an error's status."""
    said = message_of(body)
    if status in (401, 403):
        advice = f"set {' or '.join(KEY_VARIABLES)} to a key of this server"
        return RemoteError(f"{endpoint.root} refused the API key ({status}: {said}); {advice}", status=status)
    return RemoteError(f"{endpoint.root} answered {status}: {said}", status=status)


def message_of(body: bytes) -> str:
    """What a body says of an error, in a line: OpenAI's form, other servers' forms, or its beginning."""
    try:
        found: object = msgspec.json.decode(body)
    except (ValueError, RecursionError):
        return _short(body.decode(errors="replace")) or "no message"
    while isinstance(found, Mapping):
        found = found.get("error") or found.get("message") or found.get("detail") or "no message"
    return _short(str(found))


def _short(text: str) -> str:
    line = " ".join("".join(one if one.isprintable() else " " for one in text).split())
    return line if len(line) <= _MAX_MESSAGE else f"{line[: _MAX_MESSAGE - 3]}..."
