"""What a server has while nobody asks it for anything: its processes' memory and files, and its K/V blocks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client.parser import text_string_to_metric_families
from tokenyard.client.connection import Connection
from tokenyard.client.endpoint import Endpoint

if TYPE_CHECKING:
    from server_process import ServerProcess, Use

_IDLE_SECONDS = 30.0  # liveness only: by then what was left has been cleaned up
_LOOKS, _TRIES = 3, 100  # at a lone request, which may have ended before it is looked at


class IdlePoint(NamedTuple):
    """What a server has between two loads."""

    seconds: float  # since the watch began
    num_requests: int  # that had ended
    use: Mapping[str, Use]  # by process
    num_blocks: int | None  # that a lone short request holds, the fewest of several looks


@dataclass(slots=True)
class Watch:
    """Looks at one server between loads, and finds what is left over of them."""

    server: ServerProcess
    model: str
    points: list[IdlePoint] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    async def look(self, num_requests: int) -> IdlePoint:
        """The server once it is idle. The first point is of a fresh one; what the second has, all later ones must."""
        await self._until(lambda: self._num_open() == 0, lambda: f"{self._num_open()} requests are left")
        if len(self.points) > 1:
            base = _files(self.points[1].use)
            await self._until(lambda: self._files() == base, lambda: f"open files: {base} became {self._files()}")
        point = IdlePoint(time.monotonic() - self.began, num_requests, self.server.use(), await self._num_blocks())
        self._compare(point)
        self.points.append(point)
        return point

    def metrics(self) -> dict[str, float]:
        """Each sample of /metrics by name, added up over its labels; `num_gpu_blocks` is one of them."""
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(self.server.get("/metrics")[1]):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
                if "num_gpu_blocks" in sample.labels:
                    found["num_gpu_blocks"] = float(sample.labels["num_gpu_blocks"])
        return found

    def _compare(self, point: IdlePoint) -> None:
        if self.points and point.num_blocks != self.points[0].num_blocks:
            self.leaks.append(f"a lone request held {self.points[0].num_blocks} blocks, now {point.num_blocks}")

    async def _until(self, holds: Callable[[], bool], what: Callable[[], str]) -> None:
        end = time.monotonic() + _IDLE_SECONDS
        while not await asyncio.to_thread(holds):
            if time.monotonic() > end:
                self.leaks.append(what())
                return
            await asyncio.sleep(0.05)

    def _num_open(self) -> int:
        found = self.metrics()
        return int(found["tokenyard:num_requests_running"] + found["tokenyard:num_requests_waiting"])

    def _files(self) -> dict[str, int]:
        return _files(self.server.use())

    async def _num_blocks(self) -> int | None:
        """The engine tells its blocks with its steps, so one has to run."""
        looks: list[int] = []
        async with Connection(Endpoint(self.server.url)) as connection:
            for _ in range(_TRIES):
                async with _lone_request(connection, self.model):
                    found = await asyncio.to_thread(self.metrics)
                if share := found["tokenyard:kv_cache_usage_perc"]:
                    looks.append(round(share * found["num_gpu_blocks"]))
                if len(looks) == _LOOKS:
                    break
        return min(looks, default=None)


def _files(use: Mapping[str, Use]) -> dict[str, int]:
    return {name: one.num_files for name, one in use.items()}


@contextlib.asynccontextmanager
async def _lone_request(connection: Connection, model: str) -> AsyncGenerator[None, None]:
    """A stream that has begun; it is left at the end."""
    body = {"model": model, "prompt": [5], "max_tokens": 100, "temperature": 0, "ignore_eos": True, "stream": True}
    async with contextlib.aclosing(connection.stream("/v1/completions", json.dumps(body).encode())) as chunks:
        async for _ in chunks:
            break
        yield
