"""/livez, /readyz, /startupz, /health, /version: what watches over the server, and never waits for the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response

from tokenyard.server import health
from tokenyard.server.json_answer import json_answer
from tokenyard.server.service import service_of

if TYPE_CHECKING:
    from tokenyard.server.health import Answer

router = APIRouter(tags=["probes"])

PUBLIC_PATHS = frozenset(health.PROBES)
"""Paths that need no API key; every other one does."""

_STATUS = {"application/json": {"schema": {"type": "object", "required": ["status"]}}}
_UNAVAILABLE: dict[int | str, dict[str, object]] = {503: {"description": "Not now: why.", "content": _STATUS}}


@router.get("/livez", responses=_UNAVAILABLE, summary="Is it alive? 503: restart it")
async def livez(http: Request) -> Response:
    """Whether the server answers and its engine has not died for good."""
    return _answer(health.live(service_of(http)))


@router.get("/readyz", responses=_UNAVAILABLE, summary="May it get requests? 503: not now")
async def readyz(http: Request) -> Response:
    """Whether requests may come: the engine is up, moves on, and the server is not about to end."""
    return _answer(health.ready(service_of(http)))


@router.get("/health", responses=_UNAVAILABLE, summary="The same, under vLLM's name")
async def healthz(http: Request) -> Response:
    """Same as /readyz."""
    return _answer(health.ready(service_of(http)))


@router.get("/startupz", responses=_UNAVAILABLE, summary="Has it started? 503: it is still at it")
async def startupz(http: Request) -> Response:
    """How far the start is: a phase in words and a rough percentage."""
    return _answer(health.started(service_of(http)))


@router.get("/version", summary="Tokenyard's version")
async def version() -> Response:
    """The version of the server."""
    from tokenyard import __version__

    return json_answer({"version": __version__})


def _answer(answer: Answer) -> Response:
    status, body = answer
    return json_answer(body, status)
