"""What the probes say, without a web framework: a server answers them before it has one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenyard.server.service import EngineState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tokenyard.server.service import Service

Answer = tuple[int, dict[str, object]]  # HTTP status and body


def unready_reason(service: Service) -> str | None:
    """Why no request should be sent here now, in one word; None = one may."""
    if service.state is not EngineState.READY:
        return str(service.state)
    if service.is_draining:
        return "draining"
    return "stalled" if service.is_stalled else None


def live(service: Service) -> Answer:
    """Whether the server answers and its engine has not died for good."""
    return _answer("dead" if service.state is EngineState.DEAD else None)


def ready(service: Service) -> Answer:
    """Whether requests may come: the engine is up, moves on, and the server is not about to end."""
    reason = unready_reason(service)
    return _answer(reason, _progress(service) if reason == "starting" else {})


def started(service: Service) -> Answer:
    """How far the start is: a phase in words and a rough percentage."""
    return _answer(None if service.state is EngineState.READY else str(service.state), _progress(service))


PROBES: Mapping[str, Callable[[Service], Answer]] = {
    "/livez": live,
    "/readyz": ready,
    "/startupz": started,
    "/health": ready,
}
"""By their paths, which need no API key; every other one does."""


def _progress(service: Service) -> dict[str, object]:
    is_ready = service.state is EngineState.READY
    return {"phase": "ready" if is_ready else service.phase, "percent": 100 if is_ready else service.percent}


def _answer(reason: str | None, more: Mapping[str, object] = {}) -> Answer:
    return 200 if reason is None else 503, {"status": "ok" if reason is None else reason, **more}
