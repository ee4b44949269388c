"""InprocClient: a front end and an engine in one process and thread."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

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
    from tokenyard.sampling_params import SamplingParams


class InprocClient:
    """`complete` is the whole of it; requests are queued all or none."""

    def __init__(self, *, engine: EngineCore, clock: Clock, inputs: InputProcessor, outputs: OutputProcessor) -> None:
        self._engine = engine
        self._clock = clock
        self._inputs = inputs
        self._outputs = outputs
        self._numbers = itertools.count()
        self._open: set[str] = set()  # submitted, and neither taken nor discarded

    def submit(
        self, prompts: Sequence[TokenizedPrompt], params: Sequence[SamplingParams], priorities: Sequence[int]
    ) -> list[str]:
        """Queue checked prompts and return their ids; when one is refused none is queued and the refusal is raised."""
        submitted: list[str] = []
        try:
            for prompt, row, priority in zip(prompts, params, priorities, strict=True):
                request_id, now = str(next(self._numbers)), self._clock.now()
                self._engine.add_request(self._inputs.make_request(request_id, prompt, row, now, priority))
                submitted.append(request_id)
                self._open.add(request_id)
                self._outputs.add(request_id, prompt, row, now)
        except BaseException:
            self.discard(submitted)
            raise
        return submitted

    def complete(
        self,
        prompts: Sequence[TokenizedPrompt],
        params: Sequence[SamplingParams],
        priorities: Sequence[int],
        on_update: Callable[[Sequence[str], Update], None],
    ) -> list[RequestOutput]:
        """Queue, run and take: the outputs in the order of the prompts.

        `on_update` is told the request ids and each step's changes, and may call `abort`. Whatever it raises, and
        Ctrl-C, ends the requests and leaves the engine as it was.
        """
        with interrupts_between_steps() as check_interrupt:
            request_ids = self.submit(prompts, params, priorities)
            try:
                self._run(request_ids, on_update, check_interrupt)
                check_interrupt()
                return [self.take(request_id) for request_id in request_ids]
            except BaseException:
                self.discard(request_ids)
                raise

    def _run(
        self,
        request_ids: Sequence[str],
        on_update: Callable[[Sequence[str], Update], None],
        check_interrupt: Callable[[], None],
    ) -> None:
        def deliver(outputs: EngineCoreOutputs) -> None:
            update = self._outputs.process(outputs, self._clock.now())
            if update.stopped:
                self._engine.finish_requests(update.stopped, FinishReason.STOP)
            on_update(request_ids, update)
            check_interrupt()

        drive(self._engine, self._clock, deliver)

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; unknown and ended ones are ignored."""
        self._engine.finish_requests(request_ids, FinishReason.ABORT)
        self._outputs.abort(request_ids, self._clock.now())

    def discard(self, request_ids: Sequence[str]) -> None:
        """Forget requests whose outputs nobody will take; also after the engine has died.

        Afterwards they hold no blocks, unless other requests go on: then their last steps land with those.
        """
        self._outputs.forget(request_ids)
        self._open.difference_update(request_ids)
        with contextlib.suppress(TokenyardError):  # what ended the run is raised, not what came after it
            self._engine.finish_requests(request_ids, FinishReason.ABORT)
        with contextlib.suppress(TokenyardError):
            while not self._open and self._engine.has_requests() and self._engine.step().did_run:
                pass

    def text(self, request_id: str) -> str:
        """A request's text so far."""
        return self._outputs.text(request_id)

    def take(self, request_id: str) -> RequestOutput:
        """A request's output; it is forgotten here."""
        self._open.discard(request_id)
        return self._outputs.pop(request_id)
