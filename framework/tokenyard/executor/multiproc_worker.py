"""What a worker process of MultiprocExecutor runs: messages in, one after the other, and answers out."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from tokenyard.ipc.child import begin_child, end_now, settle
from tokenyard.ipc.failures import error_to_message
from tokenyard.ipc.handshake import check_components, check_identity, components_of
from tokenyard.ipc.reports import PlanMessage, plan_from_message, report_to_message
from tokenyard.ipc.sockets import Channel
from tokenyard.ipc.steps import StepMessage, result_to_message, step_from_message
from tokenyard.ipc.worker_messages import (
    CallMessage,
    FailureMessage,
    JoinMessage,
    ProgressMessage,
    RefusalMessage,
    ReturnMessage,
    from_worker_codec,
    to_worker_codec,
)

if TYPE_CHECKING:
    from tokenyard.catalogue import Catalogue
    from tokenyard.config import EngineConfig
    from tokenyard.ipc.worker_messages import FromWorker, ToWorker
    from tokenyard.model.ranks import RankGroup
    from tokenyard.worker.worker import Worker

logger = logging.getLogger(__name__)


MakeConfig = Callable[[Mapping[str, object]], "tuple[EngineConfig, Catalogue]"]


def run_rank(make_config: MakeConfig) -> None:
    """Until the executor closes stdin, or has gone: nothing of a worker needs to be saved."""
    child = begin_child(end_now)
    settle()  # it has neither processes nor folders of its own
    (address,) = child.arguments
    Rank(Channel(zmq.Context(), address, binds=True), make_config).run()


class Rank:
    """One worker and its end of the connection. After a failure it waits for its end: its state is unknown."""

    def __init__(self, channel: Channel, make_config: MakeConfig) -> None:
        self._channel = channel
        self._make_config = make_config
        self._to_worker = to_worker_codec()
        self._from_worker = from_worker_codec()
        self._worker: Worker | None = None
        self._is_leader = False

    def run(self) -> None:
        """Never returns."""
        has_failed = False
        while True:
            message = self._next()
            if message is None or has_failed:
                continue
            try:
                self._handle(message)
            except BaseException as error:
                has_failed = True
                self._fail(error)

    def _next(self) -> ToWorker | None:
        self._channel.wait(None)
        frame = self._channel.receive()
        return None if frame is None else self._to_worker.decode(frame)

    def _handle(self, message: ToWorker) -> None:
        if isinstance(message, StepMessage):
            self._step(self._joined(), message)
        elif isinstance(message, JoinMessage):
            self._join(message)
        elif isinstance(message, PlanMessage):
            self._joined().allocate_kv_cache(plan_from_message(message))
            self._send(ReturnMessage())
        else:
            self._call(self._joined(), message)

    def _step(self, worker: Worker, message: StepMessage) -> None:
        worker.execute(step_from_message(message))
        sampled = worker.sample()
        if self._is_leader:
            self._send(result_to_message(sampled.result()))

    def _join(self, message: JoinMessage) -> None:
        _begin_logging(message)
        check_identity(message.identity, "the engine's process")
        config, catalogue = self._make_config(message.config)
        check_components(message.components, components_of(catalogue), "the engine's process")
        from tokenyard.worker.worker import Worker  # imports torch

        self._is_leader = message.rank == 0
        self._worker = Worker(config, self._tell if self._is_leader else None, _meet(message, config))
        self._send(report_to_message(self._worker.load()))

    def _call(self, worker: Worker, message: CallMessage) -> None:
        try:
            value = worker.call(message.name, message.arguments)
        except Exception as error:
            self._send(RefusalMessage(error_to_message(error)))
        else:
            self._send(ReturnMessage(value))

    def _tell(self, text: str) -> None:
        self._send(ProgressMessage(text))

    def _fail(self, error: BaseException) -> None:
        from tokenyard.errors import UserError
        from tokenyard.worker.torch_ranks import LostRankError

        if not isinstance(error, UserError | LostRankError):
            logger.error("the worker cannot go on", exc_info=error)
        self._send(FailureMessage(error_to_message(error), isinstance(error, LostRankError)))

    def _joined(self) -> Worker:
        if self._worker is None:
            raise RuntimeError("a message came before the one to join")
        return self._worker

    def _send(self, message: FromWorker) -> None:
        self._channel.send(self._from_worker.encode(message))


def _begin_logging(message: JoinMessage) -> None:
    """As the engine's process logs; what all ranks would say alike is said by rank 0."""
    who = f"rank {message.rank}: " if message.num_ranks > 1 else ""
    log_format = message.log_format.replace("%(message)s", f"{who}%(message)s")
    logging.basicConfig(format=log_format, level=message.root_log_level, stream=sys.stderr)
    level = message.log_level if message.rank == 0 else max(message.log_level, logging.WARNING)
    logging.getLogger("tokenyard").setLevel(level)


def _meet(message: JoinMessage, config: EngineConfig) -> RankGroup:
    from tokenyard.model.ranks import ONE_RANK
    from tokenyard.worker.device import choose_device
    from tokenyard.worker.torch_ranks import TorchRanks

    if message.num_ranks == 1:
        return ONE_RANK
    return TorchRanks(
        Path(message.folder),
        rank=message.rank,
        size=message.num_ranks,
        timeout=message.collective_timeout,
        device_type=choose_device(config.executor.device).type,
    )
