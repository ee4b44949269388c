"""HttpCounts: what the server answered, by route, method and class of status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tokenyard.server.histogram import HTTP_BOUNDS, Histogram

_METHODS = frozenset({"GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"})
_NO_ROUTE = "none"
_CLIENT_LEFT = 499  # what is answered then, to nobody


class HttpKey(NamedTuple):
    """Few values each, whatever clients send."""

    handler: str  # the route's path, with its parameters' names; `none` where no route was found
    method: str  # `other` for one that HTTP does not have
    status: str  # 2xx, 4xx, ...


class HttpCounts:
    """Counts answers. In one event loop; copies are for any thread."""

    def __init__(self) -> None:
        self._answers: dict[HttpKey, int] = {}
        self._seconds: dict[tuple[str, str], Histogram] = {}  # by handler and method

    def count(self, scope: Mapping[str, object], status: int | None, seconds: float) -> None:
        """An answer has ended, or its client left before it began (`status` None or 499)."""
        handler = _handler(scope)
        method = str(scope.get("method"))
        method = method if method in _METHODS else "other"
        key = HttpKey(handler, method, "499" if status in (None, _CLIENT_LEFT) else f"{status // 100}xx")
        self._answers[key] = self._answers.get(key, 0) + 1
        if (histogram := self._seconds.get((handler, method))) is None:
            histogram = self._seconds[handler, method] = Histogram(HTTP_BOUNDS)
        histogram.observe(seconds)

    def answers(self) -> dict[HttpKey, int]:
        """How many, since the start."""
        return dict(self._answers)

    def seconds(self) -> dict[tuple[str, str], Histogram]:
        """From a request's first bytes to its answer's last, by handler and method."""
        return {key: histogram.copy() for key, histogram in list(self._seconds.items())}


def _handler(scope: Mapping[str, object]) -> str:
    """What the router found."""
    path = getattr(scope.get("route"), "path", None)  # Starlette's own; the class of a route is its router's business
    return path if isinstance(path, str) else _NO_ROUTE
