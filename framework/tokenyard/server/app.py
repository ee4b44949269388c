"""create_app: the routes and middlewares of one server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from tokenyard import __version__
from tokenyard.server import chat, completions, debug, metrics, models, probes, tokens
from tokenyard.server.auth import ApiKeys, Authentication
from tokenyard.server.body import JsonBodies
from tokenyard.server.errors import add_error_handlers
from tokenyard.server.head_requests import HeadRequests
from tokenyard.server.hosts import AllowedHosts
from tokenyard.server.observation import lifespan_of
from tokenyard.server.openapi import describe_api
from tokenyard.server.probes import PUBLIC_PATHS
from tokenyard.server.request_ids import RequestIds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from starlette.types import ASGIApp, Receive, Scope, Send

    from tokenyard.config import ServerConfig
    from tokenyard.server.service import Service

_ROUTED = (probes, models, chat, completions, tokens, metrics, debug)
_PREFLIGHT_AGE = 600  # seconds for which a browser remembers what it may do


def create_app(service: Service, api_keys: Sequence[str] = ()) -> FastAPI:
    """The ASGI application of a server. With `api_keys`, all but the probes need one of them."""
    app = FastAPI(
        title="Tokenyard",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        middleware=list(_middlewares(service, api_keys)),
        lifespan=lifespan_of(service),
    )
    app.state.service = service
    for module in _ROUTED:
        app.include_router(module.router)
    add_error_handlers(app)
    describe_api(app, needs_key=bool(api_keys), checks_hosts=bool(service.config.server.allowed_hosts))
    return app


class RootPath:
    """Tells the router which prefix a proxy has; paths are found with it and without it."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, "root_path": self._prefix}, receive, send)


def _middlewares(service: Service, api_keys: Sequence[str]) -> Iterator[Middleware]:
    """From the outermost to the innermost; all of them plain ASGI: a chunk of a stream costs a few calls."""
    config = service.config.server
    if config.root_path:
        yield Middleware(RootPath, prefix=config.root_path)
    yield Middleware(RequestIds, service=service)
    yield Middleware(AllowedHosts, names=config.allowed_hosts, free_paths=PUBLIC_PATHS)
    if config.allowed_origins:  # before the keys: a browser asks without one whether it may ask
        yield Middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("X-Request-Id", "Retry-After"),
            max_age=_PREFLIGHT_AGE,
        )
    if api_keys:
        yield Middleware(Authentication, keys=ApiKeys(api_keys), public_paths=_public_paths(config))
    yield Middleware(JsonBodies, max_bytes=config.max_body_bytes)
    yield Middleware(HeadRequests)


def _public_paths(config: ServerConfig) -> frozenset[str]:
    return PUBLIC_PATHS if config.protect_metrics else PUBLIC_PATHS | {"/metrics"}
