"""uvicorn as this server runs it."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import uvicorn

from tokenyard.server.app import create_app
from tokenyard.server.head_limits import MAX_HEAD_BYTES, with_head_limits
from tokenyard.server.transport import http_protocol

if TYPE_CHECKING:
    from tokenyard.server.service import Service

_CLOSING = 1  # seconds for connections that are still open at the end


class HttpServer(uvicorn.Server):
    """Leaves signals alone: whoever runs it decides what they mean."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """None."""
        yield


def make_http_server(service: Service, api_keys: Sequence[str] = ()) -> HttpServer:
    """A server of this service, to be given its listening socket; it ends once `should_exit` is true."""
    config = service.config.server
    settings = uvicorn.Config(
        create_app(service, api_keys),
        http=with_head_limits(http_protocol()),
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        ws="none",
        lifespan="on",
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
    return HttpServer(settings)
