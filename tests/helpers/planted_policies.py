"""Scheduling policies with a fault each, which PolicyContract must find."""

from __future__ import annotations

import asyncio
import datetime
import gc
import random
import time
from collections.abc import Sequence
from time import perf_counter as own_name_of_a_clock
from typing import TYPE_CHECKING, cast

import numpy as np
from tokenyard.interfaces import AdmitDecision, PreemptMode, RequestView, SchedulerView, SchedulingPolicy
from tokenyard.scheduler.predictions import TrueLengths

if TYPE_CHECKING:
    from tokenyard.interfaces import Preemption
    from tokenyard.request import FinishReason

# They starve somebody


class LastComeFirst(SchedulingPolicy):
    """Whoever came early."""

    def waiting_key(self, request: RequestView, view: SchedulerView) -> object:
        return -request.arrival_time


class ShortestFirst(SchedulingPolicy):
    """Long prompts."""

    def waiting_key(self, request: RequestView, view: SchedulerView) -> object:
        return request.num_prompt_tokens


class ShortestOutputFirst(SchedulingPolicy):
    """Long outputs."""

    def waiting_key(self, request: RequestView, view: SchedulerView) -> object:
        return request.max_output_tokens


class MostUrgentFirst(SchedulingPolicy):
    """The patient."""

    def waiting_key(self, request: RequestView, view: SchedulerView) -> object:
        return request.priority


class SnubsAClient(SchedulingPolicy):
    """One client, as long as there are others."""

    def waiting_key(self, request: RequestView, view: SchedulerView) -> object:
        return request.client_id == "z"


class WarmSessionsFirst(SchedulingPolicy):
    """Sessions that it has not seen before."""

    def __init__(self) -> None:
        self.seen: set[str | None] = set()

    def on_admit(self, requests: Sequence[RequestView], view: SchedulerView) -> None:
        self.seen |= {request.session_id for request in requests}

    def waiting_order(self, window: Sequence[RequestView], view: SchedulerView) -> Sequence[RequestView]:
        return sorted(window, key=lambda request: request.session_id not in self.seen)


class NeverForgetsService(SchedulingPolicy):
    """The first client that had much, whatever others get after it."""

    def __init__(self) -> None:
        self.num_admitted: dict[str | None, int] = {}

    def on_admit(self, requests: Sequence[RequestView], view: SchedulerView) -> None:
        for request in requests:
            self.num_admitted[request.client_id] = self.num_admitted.get(request.client_id, 0) + 1

    def waiting_order(self, window: Sequence[RequestView], view: SchedulerView) -> Sequence[RequestView]:
        first = next((client for client, count in self.num_admitted.items() if count >= 12), "nobody")
        return sorted(window, key=lambda request: request.client_id == first)


class HurriedFirst(SchedulingPolicy):
    """Who asks for no service level."""

    def waiting_key(self, request: RequestView, view: SchedulerView) -> object:
        return request.service_level is None


class CachedFirst(SchedulingPolicy):
    """Whose prompt nobody had before."""

    def waiting_order(self, window: Sequence[RequestView], view: SchedulerView) -> Sequence[RequestView]:
        return sorted(window, key=lambda request: -view.hit_tokens(request))


class DefersForEver(SchedulingPolicy):
    """Long prompts, as long as others wait."""

    def admit(self, request: RequestView, view: SchedulerView) -> AdmitDecision:
        if request.num_prompt_tokens >= 20 and view.num_waiting > 1:
            return AdmitDecision.defer("later")
        return AdmitDecision.accept()


class NeverItsTurn(SchedulingPolicy):
    """Who is in the batch, and gets no turn while there are others."""

    def running_order(self, running: Sequence[RequestView], view: SchedulerView) -> Sequence[RequestView]:
        others = [request for request in running if request.client_id != "z"]
        return others if others or view.num_waiting else running

    def preempt_mode(self, request: RequestView, view: SchedulerView) -> PreemptMode | None:
        return PreemptMode.PAUSE


class YoungestFirst(SchedulingPolicy):
    """Who has been in the batch for long: the least computed goes on, in the place of whoever is further."""

    def running_order(self, running: Sequence[RequestView], view: SchedulerView) -> Sequence[RequestView]:
        young = [request for request in running if request.num_output_tokens < 4]
        return young if young or view.num_waiting else running


class AlwaysTheSameVictim(SchedulingPolicy):
    """One client gives way whenever blocks are short, and goes to the end of the line."""

    def victim(self, candidates: Sequence[RequestView], num_blocks_needed: int, view: SchedulerView) -> RequestView:
        return next((request for request in candidates if request.client_id == "z"), candidates[-1])

    def waiting_key(self, request: RequestView, view: SchedulerView) -> object:
        return request.client_id == "z"

    def requeue_key(self, request: RequestView, view: SchedulerView) -> object:
        return self.waiting_key(request, view)


# They depend on what they must not


class RandomOrder(SchedulingPolicy):
    """A different schedule in every run."""

    def waiting_key(self, request: RequestView, view: SchedulerView) -> object:
        return random.random()


class OwnGenerator(SchedulingPolicy):
    """The same in every run, and the same for every seed."""

    def __init__(self) -> None:
        self.numbers = random.Random(7)

    def waiting_key(self, request: RequestView, view: SchedulerView) -> object:
        return self.numbers.random()


class NumpysNumbers(SchedulingPolicy):
    """Numbers that everybody shares."""

    def on_arrival(self, requests: Sequence[RequestView], view: SchedulerView) -> None:
        np.random.rand()


class SetOrder(SchedulingPolicy):
    """Of equals, whoever a set has first."""

    def victim(self, candidates: Sequence[RequestView], num_blocks_needed: int, view: SchedulerView) -> RequestView:
        first = next(iter({request.request_id for request in candidates}))
        return next(request for request in candidates if request.request_id == first)

    def waiting_order(self, window: Sequence[RequestView], view: SchedulerView) -> Sequence[RequestView]:
        clients = list({request.client_id or "" for request in window})
        return sorted(window, key=lambda request: clients.index(request.client_id or ""))


class HashOrder(SchedulingPolicy):
    """By the hash of an id."""

    def waiting_key(self, request: RequestView, view: SchedulerView) -> object:
        return hash(request.request_id)


class ReadsTheTime(SchedulingPolicy):
    """Wall time, not the engine's."""

    def waiting_key(self, request: RequestView, view: SchedulerView) -> object:
        return time.time()


class ReadsAnImportedClock(SchedulingPolicy):
    """The same, under a name that nobody can patch."""

    def on_arrival(self, requests: Sequence[RequestView], view: SchedulerView) -> None:
        own_name_of_a_clock()


class ReadsAClockByItsNumber(SchedulingPolicy):
    """The same, through the system's call."""

    def on_arrival(self, requests: Sequence[RequestView], view: SchedulerView) -> None:
        time.clock_gettime_ns(time.CLOCK_MONOTONIC)


class ReadsTheDate(SchedulingPolicy):
    """The same, as a date."""

    def on_arrival(self, requests: Sequence[RequestView], view: SchedulerView) -> None:
        datetime.datetime.now(tz=datetime.UTC)


class ReadsTheLocalTime(SchedulingPolicy):
    """The same, as a tuple."""

    def on_admit(self, requests: Sequence[RequestView], view: SchedulerView) -> None:
        time.localtime()


class AsksAnEventLoop(SchedulingPolicy):
    """The same, of a loop's own clock."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.close()

    def on_arrival(self, requests: Sequence[RequestView], view: SchedulerView) -> None:
        self.loop.time()


class KnowsTheTruth(SchedulingPolicy):
    """Finds the true lengths where only an oracle is told of them."""

    def waiting_key(self, request: RequestView, view: SchedulerView) -> object:
        for one in gc.get_objects():
            if type(one) is TrueLengths and request.request_id in one._told:
                return one._told[request.request_id]
        return 0


# They do what they must not


class IncomparableKeys(SchedulingPolicy):
    """Works until two requests of different kinds wait."""

    def waiting_key(self, request: RequestView, view: SchedulerView) -> object:
        return request.priority if request.priority else None


class ForgetsWhoNeverRan(SchedulingPolicy):
    """Believes that who ends has run."""

    def __init__(self) -> None:
        self.admitted: set[str] = set()

    def on_admit(self, requests: Sequence[RequestView], view: SchedulerView) -> None:
        self.admitted |= {request.request_id for request in requests}

    def on_finish(self, requests: Sequence[RequestView], reasons: Sequence[FinishReason], view: SchedulerView) -> None:
        for request in requests:
            self.admitted.remove(request.request_id)


class ForgetsPreemptions(SchedulingPolicy):
    """Believes that a request is admitted once."""

    def __init__(self) -> None:
        self.running: set[str] = set()

    def on_admit(self, requests: Sequence[RequestView], view: SchedulerView) -> None:
        for request in requests:
            if request.request_id in self.running:
                raise KeyError(request.request_id)
            self.running.add(request.request_id)

    def on_preempt(self, preemptions: Sequence[Preemption], view: SchedulerView) -> None: ...


class SortsInPlace(SchedulingPolicy):
    """Reorders what it was given."""

    def waiting_order(self, window: Sequence[RequestView], view: SchedulerView) -> Sequence[RequestView]:
        mine = cast("list[RequestView]", window)
        mine.sort(key=lambda request: -request.num_prompt_tokens)
        return list(mine)


class CountsAsPreempted(SchedulingPolicy):
    """Keeps its books in the requests of the scheduler."""

    def on_admit(self, requests: Sequence[RequestView], view: SchedulerView) -> None:
        for request in requests:
            request.num_preemptions += 1  # type: ignore[misc]  # that is the fault


class WritesMetadata(SchedulingPolicy):
    """The same, in what the user told."""

    def on_arrival(self, requests: Sequence[RequestView], view: SchedulerView) -> None:
        for request in requests:
            cast("dict[str, object]", request.metadata)["seen"] = view.now
