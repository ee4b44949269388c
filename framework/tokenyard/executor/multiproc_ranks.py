"""RankProcesses: the workers of MultiprocExecutor, one process a rank, and the messages to and from them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import zmq

from tokenyard.errors import EngineDeadError
from tokenyard.ipc.processes import ChildProcess, has_ended
from tokenyard.ipc.sockets import Channel, SocketFolder
from tokenyard.ipc.worker_messages import from_worker_codec, to_worker_codec

if TYPE_CHECKING:
    from tokenyard.ipc.worker_messages import FromWorker, ToWorker

_MODULE = "tokenyard.launch.multiproc_main"  # by name: it builds the config, which is launch's
_GRACE = 5.0  # seconds in which a worker has to end
_OFFLINE = {"HF_HUB_OFFLINE": "1"}  # the engine has fetched what there is to fetch


@dataclass(frozen=True, slots=True)
class _Rank:
    process: ChildProcess
    channel: Channel


class RankProcesses:
    """Started at once; used from one thread at a time, but for `check` and `ask_to_end`."""

    def __init__(self, count: int) -> None:
        """Nothing is left running when it raises."""
        self._to_worker = to_worker_codec()
        self._from_worker = from_worker_codec()
        self._folder = SocketFolder()
        self._zmq = zmq.Context()
        self._poller = zmq.Poller()
        self._ranks: list[_Rank] = []
        try:
            (self._folder.path / "arrivals").write_bytes(bytes(8 * count))
            for rank in range(count):
                self._ranks.append(self._start(rank))
        except BaseException:
            self.stop()
            raise

    @property
    def folder(self) -> str:
        """Where the ranks meet."""
        return str(self._folder.path)

    @property
    def pids(self) -> list[int]:
        """In rank order."""
        return [rank.process.pid for rank in self._ranks]

    def __len__(self) -> int:
        return len(self._ranks)

    def send(self, rank: int, message: ToWorker) -> None:
        """To one of them."""
        self._ranks[rank].channel.send(self._to_worker.encode(message))

    def send_all(self, message: ToWorker) -> None:
        """The same to each, encoded once."""
        frame = self._to_worker.encode(message)
        for rank in self._ranks:
            rank.channel.send(frame)

    def receive(self, seconds: float | None = None) -> list[tuple[int, FromWorker]]:
        """What has come, with the ranks it comes from, once there is something or the time is up (None = never).

        Raises EngineDeadError when one has ended and has nothing more to say.
        """
        self._poller.poll(None if seconds is None else max(0, round(seconds * 1000)))
        found = [(number, message) for number, rank in enumerate(self._ranks) for message in self._take(rank)]
        if not found:
            self.check()
        return found

    def check(self) -> None:
        """Raise EngineDeadError when one has ended; says which, and how."""
        if (ended := self.ended()) is not None:
            raise ended

    def ended(self, seconds: float = 0.0) -> EngineDeadError | None:
        """The end of the first one that has ended, waiting so long for one; None when all live."""
        sentinels = [rank.process.sentinel for rank in self._ranks]
        found = has_ended(sentinels, seconds)
        return _death(self._ranks, sentinels.index(found[0])) if found else None

    def forget_folder(self) -> None:
        """Remove the folder: everybody has met, and connections stay."""
        self._folder.remove()

    def ask_to_end(self) -> None:
        """All of them; returns at once."""
        for rank in self._ranks:
            rank.process.ask_to_end()

    def stop(self) -> None:
        """End all, kill those that do not end in time, and leave nothing behind."""
        self.ask_to_end()
        deadline = time.monotonic() + _GRACE
        for rank in self._ranks:
            rank.process.stop(max(0.0, deadline - time.monotonic()))
        for rank in self._ranks:
            rank.channel.close()
            rank.process.close()
        self._zmq.destroy(linger=0)
        self._folder.remove()

    def _start(self, rank: int) -> _Rank:
        address = self._folder.address(f"rank{rank}")
        channel = Channel(self._zmq, address, binds=False)
        try:
            process = ChildProcess(
                _MODULE, f"rank {rank}", arguments=[address], environment=_OFFLINE, folder=self._folder.path
            )
        except BaseException:
            channel.close()
            raise
        self._poller.register(channel.socket, zmq.POLLIN)
        self._poller.register(process.sentinel, zmq.POLLIN)
        return _Rank(process, channel)

    def _take(self, rank: _Rank) -> list[FromWorker]:
        found = []
        while (frame := rank.channel.receive()) is not None:
            if (message := self._from_worker.decode(frame)) is not None:
                found.append(message)
        return found


def _death(ranks: Sequence[_Rank], rank: int) -> EngineDeadError:
    process = ranks[rank].process
    end = process.wait(1.0)
    who = f"the worker process of rank {rank}" if len(ranks) > 1 else "the worker process"
    if end is None:
        return EngineDeadError(f"{who} has ended")
    return EngineDeadError(
        f"{who} {end}", process_exit_code=end.exit_code, signal=end.signal, last_log_lines=end.last_log_lines
    )
