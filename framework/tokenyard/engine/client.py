"""InprocClient: a front end and an engine in one process and thread."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tokenyard.engine.driver import drive
from tokenyard.engine.interrupts import interrupts_between_steps
from tokenyard.errors import EngineDeadError
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
    """Requests are queued all or none; `run` drives the engine until all have ended."""

    def __init__(self, *, engine: EngineCore, clock: Clock, inputs: InputProcessor, outputs: OutputProcessor) -> None:
        self._engine = engine
        self._clock = clock
        self._inputs = inputs
        self._outputs = outputs
        self._numbers = itertools.count()

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
                self._outputs.add(request_id, prompt, row, now)
        except BaseException:
            self.discard(submitted)
            raise
        return submitted

    def run(self, on_update: Callable[[Update], None] | None = None) -> None:
        """Drive until nothing is left; `on_update` is told each step's changes and may call `abort`."""

        with interrupts_between_steps() as check_interrupt:

            def deliver(outputs: EngineCoreOutputs) -> None:
                update = self._outputs.process(outputs, self._clock.now())
                if update.stopped:
                    self._engine.finish_requests(update.stopped, FinishReason.STOP)
                if on_update is not None:
                    on_update(update)
                check_interrupt()

            drive(self._engine, self._clock, deliver)

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; unknown and ended ones are ignored."""
        self._engine.finish_requests(request_ids, FinishReason.ABORT)
        self._outputs.abort(request_ids, self._clock.now())

    def discard(self, request_ids: Sequence[str]) -> None:
        """Forget requests whose outputs nobody will take; also after the engine has died."""
        self._outputs.forget(request_ids)
        with contextlib.suppress(EngineDeadError):
            self._engine.finish_requests(request_ids, FinishReason.ABORT)

    def text(self, request_id: str) -> str:
        """A request's text so far."""
        return self._outputs.text(request_id)

    def take(self, request_id: str) -> RequestOutput:
        """A request's output; it is forgotten here."""
        return self._outputs.pop(request_id)
