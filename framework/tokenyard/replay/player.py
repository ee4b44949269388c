"""Player: a scheduler as a trace describes it, and the recorded calls made of it again."""

from __future__ import annotations

import contextlib
from collections import deque
from typing import TYPE_CHECKING

from tokenyard.errors import UserError, ValidationError
from tokenyard.interfaces.executor import KVCacheGroupSpec
from tokenyard.launch.assemble import as_it_is, metadata_type
from tokenyard.launch.cache_size import CacheSize
from tokenyard.launch.scheduler_parts import SchedulerFacts, assemble_scheduler
from tokenyard.launch.steering import make_steering
from tokenyard.request import EngineCoreRequest, FinishReason
from tokenyard.scheduling_hints import read_hints
from tokenyard.trace.clock import CallClock, RecordedClock
from tokenyard.trace.recorder import Recorder
from tokenyard.trace.records import (
    Added,
    AdmissionPaused,
    CacheReset,
    Closed,
    Finished,
    Header,
    Raised,
    Sampled,
    Scheduled,
    Told,
    Updated,
    Wake,
)
from tokenyard.trace.requests import request_from_record
from tokenyard.trace.sampled import result_from_record
from tokenyard.trace.scheduler import TracingScheduler
from tokenyard.trace.sinks import Sinks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tokenyard.catalogue import Catalogue
    from tokenyard.config import EngineConfig
    from tokenyard.engine_outputs import SchedulerStats
    from tokenyard.scheduler_output import SchedulerOutput
    from tokenyard.trace.records import AddedRequest, AnyLine, Record


class _Made:
    """The sink of a replay: keeps what was recorded this time until it is compared."""

    name = "of the replay"

    def __init__(self) -> None:
        self.records: deque[Record] = deque()

    def take(self, record: AnyLine) -> None:
        if not isinstance(record, Header):
            self.records.append(record)

    def flush(self) -> None:
        """Nothing is buffered."""

    def close(self) -> None:
        """Nothing is open."""

    def abandon(self) -> None:
        """Nothing is left behind."""


class Player:
    """Makes calls, in the order of the trace and at its times. Raises ConfigError, PluginError when it is made."""

    def __init__(self, config: EngineConfig, catalogue: Catalogue, header: Header) -> None:
        self._time = RecordedClock()
        self._time.time = header.started
        clock = CallClock(self._time)
        parts = assemble_scheduler(
            config,
            catalogue,
            _facts(config, header),
            steering=make_steering(config, catalogue),
            clock=clock,
            decorate=as_it_is,
            times=None,
        )
        self._metadata_type = metadata_type(config, catalogue)
        self._made = _Made()
        sinks = Sinks([self._made])
        recorder = Recorder(parts.scheduler, parts.kv_cache_manager, sinks)
        self._scheduler = TracingScheduler(parts.scheduler, clock, recorder, sinks)
        self._in_flight: dict[int, SchedulerOutput] = {}

    def play(self, record: Record) -> Record | None:
        """What the replay has in the place of `record`; None = nothing. Makes the call, unless it was made already.

        Raises UserError for a call that cannot be made: then the trace is broken.
        """
        if not self._made.records:
            self._time.time = record.at
            call = self._call_of(record)
            with contextlib.suppress(Exception):  # it is recorded, and compared with what was raised before
                call()
        return self._made.records.popleft() if self._made.records else None

    def stats(self) -> SchedulerStats:
        """Of the replayed scheduler, now."""
        return self._scheduler.stats()

    def _call_of(self, record: Record) -> Callable[[], object]:
        scheduler = self._scheduler
        match record:
            case Added():
                request = self._request(record.request)
                return lambda: scheduler.add_request(request)
            case Finished():
                reason = _reason(record.reason)
                return lambda: scheduler.finish_requests(record.ids, reason)
            case Scheduled() | Raised(method="schedule"):
                return self._schedule
            case Updated(step=step, sampled=sampled) | Raised(step=int(step), sampled=Sampled() as sampled):
                return self._update(step, sampled)
            case Told() | Raised(method="take_finished"):
                return scheduler.take_finished
            case AdmissionPaused():
                return lambda: scheduler.pause_admission(record.is_paused)
            case CacheReset():
                return scheduler.reset_prefix_cache
            case Closed():
                return scheduler.close
            case Wake() | Raised(method="wake_at"):
                return scheduler.wake_at
            case _:  # not a call: what belongs to one that did not come about this time
                return lambda: None

    def _schedule(self) -> None:
        output = self._scheduler.schedule()
        if output is not None:
            self._in_flight[output.step] = output

    def _update(self, step: int, sampled: Sampled) -> Callable[[], object]:
        output = self._in_flight.pop(step, None)
        if output is None:
            raise UserError(f"the trace takes in step {step}, which it did not schedule before: it is broken")
        try:
            result = result_from_record(output, sampled)
        except (ValueError, OverflowError) as error:
            raise UserError(f"what the trace has of step {step} is no result of a step: {error}") from error
        return lambda: self._scheduler.update_from_output(output, result)

    def _request(self, record: AddedRequest) -> EngineCoreRequest:
        try:
            return request_from_record(record, self._metadata(record.metadata))
        except (ValueError, OverflowError) as error:
            raise UserError(f"what the trace has of request '{record.id}' is no request: {error}") from error

    def _metadata(self, plain: Mapping[str, object]) -> Mapping[str, object]:
        """As the policy's own type has it; what was made without one stays as it is."""
        if not plain:
            return {}
        try:
            read = read_hints(plain, self._metadata_type)
        except ValidationError:
            return plain
        return {} if read is None else read.metadata_values()


def _facts(config: EngineConfig, header: Header) -> SchedulerFacts:
    sizes = header.sizes
    return SchedulerFacts(
        size=CacheSize(
            num_blocks=config.kv_cache.num_blocks or sizes.num_blocks,
            max_model_len=sizes.max_model_len,
            num_host_blocks=sizes.num_host_blocks,
        ),
        vocab_size=sizes.vocab_size,
        kv_cache_groups=[
            KVCacheGroupSpec(
                num_layers=group.num_layers,
                bytes_per_token=group.bytes_per_token,
                sliding_window=group.sliding_window,
            )
            for group in sizes.kv_cache_groups
        ],
        records_kv_events=sizes.records_kv_events,
    )


def _reason(name: str) -> FinishReason:
    try:
        return FinishReason(name)
    except ValueError:
        raise UserError(f"the trace ends requests with the reason {name!r}, which there is not: it is broken") from None
