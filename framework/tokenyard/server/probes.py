"""/livez, /readyz, /startupz, /health, /version: what watches over the server, and never waits for the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from fastapi import APIRouter, Request, Response

from tokenyard.server.service import EngineState, Service, service_of

if TYPE_CHECKING:
    from collections.abc import Mapping

router = APIRouter(tags=["probes"])

PUBLIC_PATHS = frozenset({"/livez", "/readyz", "/startupz", "/health"})
"""Paths that need no API key; every other one does."""

_STATUS = {"application/json": {"schema": {"type": "object", "required": ["status"]}}}
_UNAVAILABLE: dict[int | str, dict[str, object]] = {503: {"description": "Not now: why.", "content": _STATUS}}


def unready_reason(service: Service) -> str | None:
    """Why no request should be sent here now, in one word; None = one may."""
    if service.state is not EngineState.READY:
        return str(service.state)
    if service.is_draining:
        return "draining"
    return "stalled" if service.is_stalled else None


@router.get("/livez", responses=_UNAVAILABLE, summary="Is it alive? 503: restart it")
async def livez(http: Request) -> Response:
    """Whether the server answers and its engine has not died for good."""
    is_dead = service_of(http).state is EngineState.DEAD
    return _answer("dead" if is_dead else None)


@router.get("/readyz", responses=_UNAVAILABLE, summary="May it get requests? 503: not now")
async def readyz(http: Request) -> Response:
    """Whether requests may come: the engine is up, moves on, and the server is not about to end."""
    service = service_of(http)
    reason = unready_reason(service)
    return _answer(reason, _progress(service) if reason == "starting" else {})


@router.get("/health", responses=_UNAVAILABLE, summary="The same, under vLLM's name")
async def health(http: Request) -> Response:
    """Same as /readyz."""
    return await readyz(http)


@router.get("/startupz", responses=_UNAVAILABLE, summary="Has it started? 503: it is still at it")
async def startupz(http: Request) -> Response:
    """How far the start is: a phase in words and a rough percentage."""
    service = service_of(http)
    reason = None if service.state is EngineState.READY else str(service.state)
    return _answer(reason, _progress(service))


@router.get("/version", summary="Tokenyard's version")
async def version() -> Response:
    """The version of the server."""
    from tokenyard import __version__

    return _json({"version": __version__})


def _progress(service: Service) -> dict[str, object]:
    is_ready = service.state is EngineState.READY
    return {"phase": "ready" if is_ready else service.phase, "percent": 100 if is_ready else service.percent}


def _answer(reason: str | None, more: Mapping[str, object] = {}) -> Response:
    status = {"status": "ok" if reason is None else reason, **more}
    return _json(status, 200 if reason is None else 503)


def _json(content: Mapping[str, object], status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
