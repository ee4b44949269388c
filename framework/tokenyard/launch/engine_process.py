"""The process of an engine with `engine.process=own`: its `main`, and the message that tells it what to be."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from dataclasses import replace
from typing import TYPE_CHECKING

import zmq

from tokenyard.clock import MonotonicClock
from tokenyard.engine.process_io import EngineIO, RestoreMetadata
from tokenyard.engine.process_server import EngineServer
from tokenyard.ipc.child import begin_child, end_now, settle
from tokenyard.ipc.config_values import config_to_values
from tokenyard.ipc.failures import error_to_message
from tokenyard.ipc.handshake import check_components, check_identity, components_of, own_identity
from tokenyard.ipc.log_format import own_log_format
from tokenyard.ipc.messages import Died, Ended, FromEngine, Hello, Launch, Ready, StartPhase
from tokenyard.ipc.progress import EnginePhase, Progress, inherited_progress
from tokenyard.ipc.reports import report_to_message
from tokenyard.ipc.sockets import Channel

if TYPE_CHECKING:
    from tokenyard.catalogue import Catalogue
    from tokenyard.config import EngineConfig
    from tokenyard.launch.assemble import RunningEngine
    from tokenyard.request import EngineCoreRequest

MODULE = "tokenyard.launch.engine_process"
_GRACE = 2.0  # seconds in which the process ends once its parent has gone
_STARTING_GRACE = 0.5  # the same while it starts: its ranks then clean up what it has just made for them


def launch_message(config: EngineConfig, catalogue: Catalogue) -> Launch:
    """What the engine's process is told: all that was settled here, which it takes over instead of settling it anew."""
    return Launch(
        identity=own_identity(),
        config=config_to_values(config),
        components=components_of(catalogue),
        root_log_level=logging.getLogger().getEffectiveLevel(),
        log_level=logging.getLogger("tokenyard").getEffectiveLevel(),
        log_format=own_log_format(),
    )


def main() -> None:
    """Start an engine and run it until the front end stops it or goes; see `tokenyard.ipc.child` for how it starts."""
    was_stopped = _EngineProcess().run()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    end_now(0 if was_stopped else 1)  # to take torch apart, piece by piece, costs seconds on a busy machine


class _EngineProcess:
    def __init__(self) -> None:
        self._io: EngineIO | None = None
        self._is_ready = False
        incoming, outgoing, progress = begin_child(self._parent_left).arguments
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._clock = MonotonicClock()
        self._progress = inherited_progress(progress)
        self._io = EngineIO(
            Channel(self._context, incoming, binds=True), Channel(self._context, outgoing, binds=False), self._clock
        )

    def run(self) -> bool:
        """Whether it ended because it was stopped."""
        io = self._io
        if io is None:
            return False
        io.send(Hello(own_identity()))
        last: FromEngine
        try:
            launch = io.launched.result()
            engine = _start(launch, io, self._clock)
            settle()
            self._is_ready = True
        except BaseException as error:
            last = Died(error_to_message(error))
        else:
            last = _serve(engine, io, self._progress)
        self._progress.enter(EnginePhase.ENDED)
        io.send(last)
        io.close()
        self._context.term()
        return isinstance(last, Ended)

    def _parent_left(self) -> None:
        """Nobody is left to tell; a step that runs may take long, and is of use to nobody."""
        io = self._io
        if io is None or not io.launched.done():
            end_now()
        timer = threading.Timer(_GRACE if self._is_ready else _STARTING_GRACE, end_now)
        timer.daemon = True
        timer.start()
        io.stop()


def _start(launch: Launch, io: EngineIO, clock: MonotonicClock) -> RunningEngine:
    check_identity(launch.identity, "the front end")
    logging.basicConfig(format=launch.log_format, level=launch.root_log_level, stream=sys.stderr)
    logging.getLogger("tokenyard").setLevel(launch.log_level)
    config, catalogue = _read_config(launch)
    io.send(StartPhase("importing the engine"))
    from tokenyard.launch.assemble import build_engine  # only once it is known that there is something to build

    io.send(StartPhase(f"loading {config.model.name}"))
    engine = build_engine(config, catalogue, clock=clock, on_progress=lambda text: io.send(StartPhase(text)))
    io.accept_requests(_metadata_restorer(engine.metadata_type))
    io.send(
        Ready(
            report=report_to_message(engine.report),
            max_model_len=engine.max_model_len,
            num_blocks=engine.num_blocks,
            commit=engine.files.commit,
        )
    )
    return engine


def _read_config(launch: Launch) -> tuple[EngineConfig, Catalogue]:
    """With the plugins that this process finds for itself, which have to be the front end's."""
    from tokenyard.launch.build import build_engine_config, build_plugins_config
    from tokenyard.launch.schema import group_values
    from tokenyard.plugins import load_catalogue

    catalogue = load_catalogue(build_plugins_config(group_values(launch.config, "plugins")))
    check_components(components_of(catalogue), launch.components, "the engine's process")
    return build_engine_config(launch.config, catalogue), catalogue


def _serve(engine: RunningEngine, io: EngineIO, progress: Progress) -> FromEngine:
    """Run it to its end; returns what there is to tell of that."""
    last: FromEngine = Ended()
    try:
        EngineServer(io, engine.core, engine.clock, progress).serve()
    except BaseException as error:
        traceback.print_exc()
        last = Died(error_to_message(error))
        io.send(last)  # at once: a shutdown may take its time
    try:
        engine.core.shutdown()
    except Exception:
        traceback.print_exc()
    return last


def _metadata_restorer(metadata_type: type) -> RestoreMetadata:
    """Hints are checked again as a front end does, whoever sent them."""
    from tokenyard.scheduling_hints import SchedulingHints, read_hints

    def restore(request: EngineCoreRequest) -> EngineCoreRequest:
        read = read_hints(request.metadata, metadata_type) if request.metadata else None
        given = SchedulingHints(
            client_id=request.client_id,
            session_id=request.session_id,
            service_level=request.service_level,
            retention=request.retention,
        )
        read_hints(given, metadata_type)
        return request if read is None else replace(request, metadata=read.metadata_values())

    return restore
