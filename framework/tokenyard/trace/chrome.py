"""ChromeTrace: records as Chrome trace events, for ui.perfetto.dev and chrome://tracing.

An array of events, one a line, each complete in itself: what a crash leaves without its end still loads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from tokenyard.trace.records import Added, Closed, Finished, Header, Raised, Scheduled, Told, Updated, seconds_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tokenyard.trace.file import TraceFile
    from tokenyard.trace.records import AnyLine, Preempted, Start

Arguments: TypeAlias = "Mapping[str, object]"

ENGINE, REQUESTS = 1, 2  # process ids: one track group for the engine, one for the requests
_MICROSECONDS = 1e6


@dataclass(slots=True)
class _Slice:
    """What a track is at."""

    name: str
    began: float
    arguments: Arguments
    step: int | None = None  # of a prefill chunk: when this one lands, it is over


@dataclass(slots=True)
class _Track:
    """One request."""

    number: int
    slice: _Slice | None = None


@dataclass(slots=True)
class _Lanes:
    """Steps in flight side by side: under overlap two of them, one a lane."""

    free: list[int] = field(default_factory=list)
    used: dict[int, tuple[int, Scheduled]] = field(default_factory=dict)  # step -> lane, record

    def enter(self, record: Scheduled, step: int) -> None:
        self.free.sort(reverse=True)
        self.used[step] = (self.free.pop() if self.free else len(self.used), record)

    def leave(self, step: int) -> tuple[int, Scheduled] | None:
        found = self.used.pop(step, None)
        if found is not None:
            self.free.append(found[0])
        return found


class ChromeTrace:
    """A track a request (waiting, prefill, decoding, preempted, paused), one for steps, and counters. Times in us."""

    def __init__(self, file: TraceFile) -> None:
        self._file = file
        self.name = str(file.path)
        self._started = 0.0
        self._last = 0.0
        self._tracks: dict[str, _Track] = {}
        self._num_tracks = 0
        self._lanes = _Lanes()
        self._num_lanes = 0
        self._counters: dict[str, dict[str, float]] = {}
        self._separator = "[\n"

    def take(self, record: AnyLine) -> None:
        if isinstance(record, Header):
            self._begin(record)
            return
        self._last = max(self._last, record.at)
        match record:
            case Added(error=None):
                self._add(record)
            case Scheduled():
                self._schedule(record)
            case Updated():
                self._land(record.step, record.at)
                self._end((end.id for end in record.ended), record.at)
            case Told():
                self._end((end.id for end in record.ended), record.at)
            case Finished():
                self._end(record.ended, record.at)
            case Raised():
                self._event({"ph": "i", "s": "g", "name": record.error, "pid": ENGINE, "tid": 0}, record.at)
            case Closed():
                self._end(tuple(self._tracks), record.at)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._end(tuple(self._tracks), self._last)
        self._file.write(b"\n]\n")
        self._file.close()

    def abandon(self) -> None:
        self._file.abandon()

    # Records

    def _begin(self, header: Header) -> None:
        self._started = self._last = header.started
        for process, name in ((ENGINE, "engine"), (REQUESTS, "requests")):
            self._name("process_name", process, 0, name)
        self._file.flush()

    def _add(self, record: Added) -> None:
        request = record.request
        track = self._tracks[request.id] = _Track(self._num_tracks)
        self._num_tracks += 1
        self._name("thread_name", REQUESTS, track.number, request.id)
        arguments = {"prompt tokens": len(request.prompt), "priority": request.priority, "client": request.client}
        began = min(record.at, max(self._started, seconds_of(request.arrival)))
        track.slice = _Slice("waiting", began, arguments)

    def _schedule(self, record: Scheduled) -> None:
        at, step = record.at, record.step
        for lost in record.preempted:
            self._lose(lost, at)
        hits = {start.id: start for start in (*record.new, *record.resumed)}
        for chunk in record.chunks:
            arguments = {"tokens": chunk.num_tokens, "computed before": chunk.num_computed, **_hit(hits.get(chunk.id))}
            self._enter(chunk.id, _Slice("prefill", at, arguments, step))
        for request_id in record.decodes or ():
            track = self._tracks.get(request_id)
            if track is not None and (track.slice is None or track.slice.name != "decoding"):
                self._enter(request_id, _Slice("decoding", at, {}))
        if step is not None:
            self._lanes.enter(record, step)
        waiting = sum(record.waits.by_reason.values())
        self._count("requests", {"running": record.waits.num_running, "waiting": waiting}, at)
        self._count("free blocks", {"free": record.num_free_blocks}, at)

    def _lose(self, lost: Preempted, at: float) -> None:
        name = "paused" if lost.mode == "pause" else "preempted"
        arguments = {"mode": lost.mode, "reason": lost.reason, "tokens lost": lost.num_lost}
        self._enter(lost.id, _Slice(name, at, arguments))

    def _land(self, step: int, at: float) -> None:
        found = self._lanes.leave(step)
        if found is None:
            return
        lane, record = found
        while self._num_lanes <= lane:
            self._name("thread_name", ENGINE, self._num_lanes, f"steps, lane {self._num_lanes}")
            self._num_lanes += 1
        arguments = {"tokens": record.num_tokens, "chunks": len(record.chunks), "admitted": len(record.new)}
        self._slice(ENGINE, lane, _Slice(f"step {step}", record.at, arguments), at)
        for chunk in record.chunks:
            track = self._tracks.get(chunk.id)
            if track is not None and track.slice is not None and track.slice.step == step:
                self._leave(track, at)

    def _end(self, request_ids: Iterable[str], at: float) -> None:
        for request_id in request_ids:
            track = self._tracks.pop(request_id, None)
            if track is not None:
                self._leave(track, at)
        if not self._tracks and "requests" in self._counters:  # else they would stand as they were at the last step
            self._count("requests", {"running": 0, "waiting": 0}, at)

    # Tracks

    def _enter(self, request_id: str, new: _Slice) -> None:
        """A request is at something else from now on."""
        track = self._tracks.get(request_id)
        if track is not None:
            self._leave(track, new.began)
            track.slice = new

    def _leave(self, track: _Track, at: float) -> None:
        if track.slice is not None:
            self._slice(REQUESTS, track.number, track.slice, at)
            track.slice = None

    # Events

    def _slice(self, process: int, thread: int, what: _Slice, end: float) -> None:
        duration = round(max(0.0, end - what.began) * _MICROSECONDS, 3)
        event = {"ph": "X", "name": what.name, "pid": process, "tid": thread, "dur": duration, "args": what.arguments}
        self._event(event, what.began)

    def _count(self, name: str, values: dict[str, float], at: float) -> None:
        if self._counters.get(name) != values:
            self._counters[name] = values
            self._event({"ph": "C", "name": name, "pid": ENGINE, "tid": 0, "args": values}, at)

    def _name(self, what: str, process: int, thread: int, name: str) -> None:
        self._write({"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}})

    def _event(self, event: dict[str, Any], at: float) -> None:
        self._write({**event, "ts": round((at - self._started) * _MICROSECONDS, 3)})

    def _write(self, event: Mapping[str, object]) -> None:
        self._file.write(self._separator.encode() + msgspec.json.encode(event))
        self._separator = ",\n"


def _hit(start: Start | None) -> dict[str, object]:
    return {} if start is None else {"prefix hit": start.num_hit_tokens}
