"""A workload on a server of OpenAI's API, seen from its client."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING

from tokenyard.client.connection import Connection
from tokenyard.client.endpoint import find_endpoint
from tokenyard.client.failures import RemoteError
from tokenyard.client.models import choose_model, list_models
from tokenyard.errors import ConfigError, TokenyardError, UserError
from tokenyard.experiments.arrivals import Arrived, WorkloadArrivals
from tokenyard.experiments.dialect import ask, find_dialect
from tokenyard.experiments.records import RequestStatus
from tokenyard.experiments.remote_log import RemoteLog
from tokenyard.experiments.remote_prompts import RemotePrompts
from tokenyard.experiments.workloads import make_workload
from tokenyard.interfaces.workload import WorkloadRequest

if TYPE_CHECKING:
    from tokenyard.catalogue import Catalogue
    from tokenyard.client.endpoint import Endpoint
    from tokenyard.config import EngineConfig
    from tokenyard.experiments.dialect import Dialect
    from tokenyard.experiments.records import RunRecord
    from tokenyard.experiments.remote_log import Heard
    from tokenyard.interfaces.workload import Workload

logger = logging.getLogger(__name__)

_MOST_OPEN = 900  # requests on their way: each holds a socket, and most systems allow 1024 files
_SILENCE_SECONDS = 300.0  # a server that sends nothing for so long has forgotten the request, or stands still
_PROBE = WorkloadRequest(arrival=0.0, num_prompt_tokens=4, num_output_tokens=2)
_WARM_UP = WorkloadRequest(arrival=0.0, num_prompt_tokens=32, num_output_tokens=8)
_NUM_WARM_UPS = 2


def run_remote(config: EngineConfig, catalogue: Catalogue) -> RunRecord:
    """Send the config's workload to `experiment.target` and hear every answer out.

    A request that fails is REJECTED, and `facts["errors"]` has the reasons. Raises RemoteError for a server that cannot
    be used, TokenyardError where no request succeeds.
    """
    if config.experiment.target is None:
        raise ConfigError("experiment.target=null: there is no server to send the workload to; give its URL")
    endpoint = find_endpoint(config.experiment.target, "experiment.target")
    return asyncio.run(_run(config, endpoint, make_workload(config, catalogue)))


async def _run(config: EngineConfig, endpoint: Endpoint, workload: Workload) -> RunRecord:
    async with Connection(endpoint, silence=_SILENCE_SECONDS) as connection:
        names = await list_models(connection)
        name = config.model.name if config.model.name in names else None
        dialect = await find_dialect(connection, choose_model(names, name, endpoint.root), _PROBE)
        _tell(dialect, endpoint)
        prompts = RemotePrompts(config.seed, sends_ids=dialect.sends_ids, has_content=workload.has_content)
        for number in range(_NUM_WARM_UPS):
            prompt = prompts.of(Arrived(-1 - number, _WARM_UP, 0.0))
            await ask(connection, dialect, dialect.body(prompt, _WARM_UP, None))
        load = _Load(config, workload, connection, dialect, prompts)
        await load.run()
    reasons = load.log.reasons()
    record = load.log.record({"target": endpoint.root, **dialect.facts, "errors": reasons})
    if reasons and not (record.requests.status == RequestStatus.FINISHED).any():
        reason, count = next(iter(reasons.items()))
        raise TokenyardError(f"none of {len(record.requests)} requests succeeded; {count} of them: {reason}")
    return record


def _tell(dialect: Dialect, endpoint: Endpoint) -> None:
    if not dialect.sends_ids:
        logger.warning("%s takes no token ids: prompts are text of about as many tokens", endpoint.root)
    if not dialect.ignores_eos:
        logger.warning("%s takes no ignore_eos: answers may be shorter than the workload says", endpoint.root)


class _Load:
    """A workload on its way to a server."""

    def __init__(
        self,
        config: EngineConfig,
        workload: Workload,
        connection: Connection,
        dialect: Dialect,
        prompts: RemotePrompts,
    ) -> None:
        self.log = RemoteLog()
        self._connection = connection
        self._dialect = dialect
        self._prompts = prompts
        self._arrivals: WorkloadArrivals[Heard] = WorkloadArrivals(workload, config.workload, self.log.arrived)
        self._sockets = asyncio.Semaphore(_MOST_OPEN)
        self._has_changed = asyncio.Event()  # an end may be what the next request waits for
        self._start = 0.0

    async def run(self) -> None:
        """Until every request has ended; when this is cancelled all end."""
        try:
            await self._run()
        except BaseExceptionGroup as group:  # what one task raised ended the others
            raise group.exceptions[0] from None

    async def _run(self) -> None:
        self._start = time.monotonic()
        async with asyncio.TaskGroup() as group:
            while True:
                for heard in self._arrivals.due(self._now()):
                    group.create_task(self._send(heard))
                if not self._arrivals.num_open and self._arrivals.is_exhausted():
                    return
                await self._wait()

    def _now(self) -> float:
        return time.monotonic() - self._start

    async def _wait(self) -> None:
        """Until the next one arrives, or one has ended."""
        moment = self._arrivals.next_time()
        self._has_changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if moment is None else max(0.0, moment - self._now())):
                await self._has_changed.wait()

    async def _send(self, heard: Heard) -> None:
        """One request to its end, whatever that is."""
        left = None if heard.deadline is None else max(0.0, heard.deadline - self._now())
        try:
            async with asyncio.timeout(left), self._sockets:
                await self._hear(heard)
            heard.end(self._now())
            heard.status = RequestStatus.FINISHED if heard.error is None else RequestStatus.REJECTED
        except TimeoutError:
            heard.status = RequestStatus.ABORTED
        except (RemoteError, UserError) as error:
            heard.status, heard.error = RequestStatus.REJECTED, str(error)
        heard.ended = self._now()
        self._arrivals.ended(heard.arrived.number, heard.ended)
        self._has_changed.set()

    async def _hear(self, heard: Heard) -> None:
        arrived = heard.arrived
        left = None if heard.deadline is None else heard.deadline - self._now()
        body = self._dialect.body(self._prompts.of(arrived), arrived.request, left)
        keeps, ids, pieces = self._prompts.keeps(arrived), list[int](), list[str]()
        async with contextlib.aclosing(self._connection.stream(self._dialect.route, body)) as chunks:
            async for chunk in chunks:
                heard.take(chunk, self._now())
                if keeps:
                    for choice in chunk.choices:
                        ids.extend(choice.token_ids or ())
                        pieces.append(choice.added)
        if keeps:
            self._prompts.answered(arrived, ids, "".join(pieces))
