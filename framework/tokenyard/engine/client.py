"""InprocClient: a front end and an engine in one process and thread."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from tokenyard.engine.driver import drive
from tokenyard.engine.interrupts import interrupts_between_steps
from tokenyard.errors import TokenyardError
from tokenyard.request import FinishReason

if TYPE_CHECKING:
    from tokenyard.clock import Clock
    from tokenyard.engine.input_processor import InputProcessor, TokenizedPrompt
    from tokenyard.engine.output_processor import OutputProcessor, Update
    from tokenyard.engine_outputs import EngineCoreOutputs
    from tokenyard.interfaces.engine_core import EngineCore
    from tokenyard.outputs import RequestOutput
    from tokenyard.request import EngineCoreRequest, SchedulingHints
    from tokenyard.sampling_params import SamplingParams

OnUpdate: TypeAlias = "Callable[[Sequence[str], Update], None]"
"""Told the request ids that are run and each step's changes; may call `abort`."""


AddRequests: TypeAlias = "Callable[[Sequence[EngineCoreRequest]], None]"


class InprocClient:
    """`complete` is `submit`, `run` and `take` in one. Requests are queued all or none, each with all its choices.

    Request ids are made here and never come again, so that nothing that a user calls a request can mix two up.
    """

    def __init__(
        self,
        *,
        engine: EngineCore,
        clock: Clock,
        inputs: InputProcessor,
        outputs: OutputProcessor,
        add_requests: AddRequests | None = None,
    ) -> None:
        """`add_requests` queues several at once, all or none, where that is less work than one after the other."""
        self._engine = engine
        self._add_requests = add_requests or self._add_one_by_one
        self._clock = clock
        self._inputs = inputs
        self._outputs = outputs
        self._numbers = itertools.count()
        self._open: dict[str, None] = {}  # submitted, in order, and neither taken nor discarded

    def submit(
        self,
        prompts: Sequence[TokenizedPrompt],
        params: Sequence[SamplingParams],
        priorities: Sequence[int],
        scheduling: Sequence[SchedulingHints | None] | None = None,
    ) -> list[str]:
        """Queue checked prompts and return their ids; when one is refused none is queued and the refusal is raised."""
        now, hints = self._clock.now(), [None] * len(prompts) if scheduling is None else scheduling
        made = []
        for prompt, row, priority, hint in zip(prompts, params, priorities, hints, strict=True):
            request_id = str(next(self._numbers))
            requests = self._inputs.make_requests(request_id, prompt, row, now, priority=priority, scheduling=hint)
            made.append((request_id, prompt, row, requests))
        request_ids = [request_id for request_id, *_ in made]
        try:
            for request_id, prompt, row, requests in made:
                self._open[request_id] = None
                self._outputs.add(request_id, prompt, row, now, [request.request_id for request in requests])
            self._add_requests([request for *_, requests in made for request in requests])
        except BaseException:
            self.discard(request_ids)
            raise
        return request_ids

    def run(self, request_ids: Sequence[str] | None, on_update: OnUpdate) -> None:
        """Step until these requests have ended; None = all that are open. What else is queued runs along.

        What `on_update` raises, and Ctrl-C, comes between two steps and leaves all requests as they are: run again, or
        `discard` them.
        """
        with interrupts_between_steps() as check_interrupt:
            self._run(list(self._open) if request_ids is None else request_ids, on_update, check_interrupt)
            check_interrupt()

    def complete(
        self,
        prompts: Sequence[TokenizedPrompt],
        params: Sequence[SamplingParams],
        priorities: Sequence[int],
        on_update: OnUpdate,
        scheduling: Sequence[SchedulingHints | None] | None = None,
    ) -> list[RequestOutput]:
        """Queue, run and take: the outputs in the order of the prompts.

        Whatever `on_update` raises, and Ctrl-C, ends the requests and leaves the engine as it was.
        """
        with interrupts_between_steps() as check_interrupt:
            request_ids = self.submit(prompts, params, priorities, scheduling)
            try:
                self._run(request_ids, on_update, check_interrupt)
                check_interrupt()
                return [self.take(request_id) for request_id in request_ids]
            except BaseException:
                self.discard(request_ids)
                raise

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests with all their choices; unknown and ended ones are ignored."""
        self._engine.finish_requests(self._outputs.engine_ids(request_ids), FinishReason.ABORT)
        self._outputs.abort(request_ids, self._clock.now())

    def discard(self, request_ids: Sequence[str]) -> None:
        """Forget requests whose outputs nobody will take; also after the engine has died.

        Afterwards they hold no blocks, unless other requests go on: then their last steps land with those.
        """
        engine_ids = self._outputs.engine_ids(request_ids)
        self._outputs.forget(request_ids)
        for request_id in request_ids:
            self._open.pop(request_id, None)
        with contextlib.suppress(TokenyardError):  # what ended the run is raised, not what came after it
            self._engine.finish_requests(engine_ids, FinishReason.ABORT)
        with contextlib.suppress(TokenyardError):
            while not self._open and self._engine.has_requests() and self._engine.step().did_run:
                pass

    def is_finished(self, request_id: str) -> bool:
        """Whether a request has ended; also of one that is not known any more."""
        return self._outputs.is_finished(request_id)

    def stream_output(self, request_id: str) -> RequestOutput | None:
        """What a stream of this request sends next: see OutputProcessor.stream_output."""
        return self._outputs.stream_output(request_id)

    def take(self, request_id: str) -> RequestOutput:
        """A request's output; it is forgotten here. One that has not ended is ended first, and says so."""
        if not self._outputs.is_finished(request_id):
            self.abort([request_id])
        self._open.pop(request_id, None)
        return self._outputs.pop(request_id)

    def _add_one_by_one(self, requests: Sequence[EngineCoreRequest]) -> None:
        for request in requests:
            self._engine.add_request(request)

    def _run(self, request_ids: Sequence[str], on_update: OnUpdate, check_interrupt: Callable[[], None]) -> None:
        def deliver(outputs: EngineCoreOutputs) -> None:
            update = self._outputs.process(outputs, self._clock.now())
            if update.stopped:
                self._engine.finish_requests(update.stopped, FinishReason.STOP)
            on_update(request_ids, update)
            check_interrupt()

        unfinished = list(reversed(request_ids))

        def is_done() -> bool:
            while unfinished and self._outputs.is_finished(unfinished[-1]):
                unfinished.pop()
            # With nobody else's requests the engine is run dry, so that no step of these is left in flight.
            return not unfinished and self._outputs.num_unfinished > 0

        drive(self._engine, self._clock, deliver, until=is_done)
