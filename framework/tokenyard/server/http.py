"""uvicorn as this server runs it."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal

import uvicorn

from tokenyard.server.head_limits import MAX_HEAD_BYTES, with_head_limits
from tokenyard.server.transport import http_protocol

if TYPE_CHECKING:
    import socket

    from starlette.types import ASGIApp

    from tokenyard.config import ServerConfig

_CLOSING = 1  # seconds for connections that are still open at the end


class HttpServer(uvicorn.Server):
    """Leaves signals alone: whoever runs it decides what they mean."""

    on_listening: Callable[[], None] | None = None  # called once it answers

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """None."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's own."""
        await super().startup(sockets)
        if self.started and self.on_listening is not None:
            self.on_listening()


def make_http_server(
    config: ServerConfig,
    app: ASGIApp,
    on_listening: Callable[[], None] | None = None,
    *,
    lifespan: Literal["on", "off"] = "on",
) -> HttpServer:
    """A server to be given its listening socket; it ends once `should_exit` is true.

    `lifespan="off"` is for an application whose lifespan is somebody else's.
    """
    server = HttpServer(_settings(config, app, lifespan))
    server.on_listening = on_listening
    return server


def _settings(config: ServerConfig, app: ASGIApp, lifespan: Literal["on", "off"]) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=with_head_limits(http_protocol()),
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        ws="none",
        lifespan=lifespan,
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=_CLOSING,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
        ssl_ca_certs=config.ssl_ca_certs,
        ssl_cert_reqs=ssl.CERT_NONE if config.ssl_ca_certs is None else ssl.CERT_REQUIRED,
    )
