"""The listening socket, bound before anything that takes time; mistakes are one line each."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tokenyard.errors import ConfigError

if TYPE_CHECKING:
    from tokenyard.config import ServerConfig

_BACKLOG = 2048
_SEND_BUFFER = 128 * 1024  # bytes the kernel holds for a client that does not read; left alone, it grows to megabytes
_MAX_UDS_PATH = 107  # bytes; the kernel's limit, without the zero


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """A bound socket, which does not listen yet."""

    socket: socket.socket
    address: str  # for people: a URL, or the path of a Unix socket


@contextlib.contextmanager
def open_listener(config: ServerConfig) -> Iterator[Listener]:
    """Bind to `server.uds`, or `server.host` and `server.port`; ConfigError when that cannot be. Closed at the end."""
    if config.uds is not None:
        with _unix(Path(config.uds)) as bound:
            yield Listener(socket=bound, address=f"unix:{config.uds}")
        return
    with _tcp(config.host, config.port) as bound:
        scheme = "http" if config.ssl_certfile is None else "https"
        host, port = bound.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        yield Listener(socket=bound, address=f"{scheme}://{shown}:{port}{config.root_path}")


def check_certificates(config: ServerConfig) -> None:
    """Load them once, for the error that a server would make only later."""
    if config.ssl_certfile is None:
        for key, value in (("ssl_keyfile", config.ssl_keyfile), ("ssl_ca_certs", config.ssl_ca_certs)):
            if value is not None:
                raise ConfigError(f"server.{key}={value} needs server.ssl_certfile, the server's own certificate")
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without a password callback OpenSSL would ask on the terminal for that of an encrypted key.
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password=lambda: "")
        if config.ssl_ca_certs is not None:
            context.load_verify_locations(config.ssl_ca_certs)
    except (OSError, ValueError) as error:  # SSLError is an OSError
        files = ", ".join(filter(None, (config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs)))
        raise ConfigError(
            f"the TLS certificate cannot be used ({files}): {_reason(error)}; give PEM files without a password"
        ) from error


@contextlib.contextmanager
def _tcp(host: str, port: int) -> Iterator[socket.socket]:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(f"server.host={host}: {_reason(error)}; give a name or an address of this machine") from error
    with socket.socket(family, kind, protocol) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)  # as connections inherit it
        try:
            bound.bind(address)
            bound.listen(_BACKLOG)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host} port {port}: {_reason(error)}; is another server running? choose another "
                "port (server.port, --port), 0 for one that is free"
            ) from error
        yield bound


@contextlib.contextmanager
def _unix(path: Path) -> Iterator[socket.socket]:
    if len(os.fsencode(path)) > _MAX_UDS_PATH:
        raise ConfigError(f"server.uds={path} is longer than {_MAX_UDS_PATH} bytes; give a shorter path")
    _remove_stale(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        try:
            bound.bind(str(path))
            bound.listen(_BACKLOG)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on server.uds={path}: {_reason(error)}; its folder must exist and be writable"
            ) from error
        try:
            yield bound
        finally:
            path.unlink(missing_ok=True)


def _remove_stale(path: Path) -> None:
    """A socket that nobody answers on was left behind by a server that was killed; anything else is somebody's."""
    if not os.path.lexists(path):
        return
    if not stat.S_ISSOCK(path.lstat().st_mode):
        raise ConfigError(f"server.uds={path} exists and is not a socket; give another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except OSError as error:
            raise ConfigError(f"server.uds={path} exists: {_reason(error)}; give another path") from error
    raise ConfigError(f"server.uds={path} is in use by another server; give another path")


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) and error.strerror else str(error)).lower()
