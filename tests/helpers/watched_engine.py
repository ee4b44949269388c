"""A scripted engine behind an OutputProcessor and a Monitor: requests end to end, without HTTP, a second a step."""

from __future__ import annotations

from collections.abc import Sequence

from tiny_tokenizers import byte_level
from tokenyard.catalogue import Catalogue
from tokenyard.clock import VirtualClock
from tokenyard.engine.input_processor import TokenizedPrompt
from tokenyard.engine.output_processor import OutputProcessor, Update
from tokenyard.engine.request_listener import GuardedListener, RequestListener
from tokenyard.engine_outputs import EngineCoreOutputs
from tokenyard.request import FinishReason
from tokenyard.sampling_params import SamplingParams
from tokenyard.server.monitor import Monitor
from tokenyard.server.timeline import Timeline
from tokenyard.testing import EngineHarness

TOKENIZER = byte_level()
VOCAB_SIZE = 256


class WatchedEngine:
    """Ids of requests are their labels; choices of one with n > 1 are `INDEX_ID`."""

    def __init__(
        self,
        *overrides: str,
        catalogue: Catalogue | None = None,
        timeline_size: int = 100,
        listener: RequestListener | None = None,
    ) -> None:
        self.clock = VirtualClock(100.0)
        self.harness = EngineHarness(
            overrides, catalogue=catalogue, clock=self.clock, step_seconds=1.0, vocab_size=VOCAB_SIZE
        )
        self.monitor = Monitor(timeline_size, has_stats="engine.log_stats=false" not in overrides, now=self.clock.now)
        self.outputs = OutputProcessor(TOKENIZER)
        self.outputs.listener = GuardedListener(listener or self.monitor)

    def add(self, name: str, num_prompt_tokens: int, *, n: int = 1, first: int = 5, **sampling: object) -> None:
        """Queue a request whose prompt is `first`, `first` + 1, ..."""
        prompt = [(first + index) % 200 for index in range(num_prompt_tokens)]
        params = SamplingParams(n=n, ignore_eos=True, **sampling)  # type: ignore[arg-type]
        children = [name] if n == 1 else [f"{index}_{name}" for index in range(n)]
        self.outputs.add(name, TokenizedPrompt(None, prompt), params, self.clock.now(), children, label=name)
        for child in children:
            self.harness.add(prompt, child, max_tokens=params.max_tokens, ignore_eos=True)

    def step(self) -> tuple[EngineCoreOutputs, Update]:
        """One step, with what it changed."""
        outputs = self.harness.step()
        update = self.outputs.process(outputs, self.clock.now())
        if update.stopped:
            self.harness.finish(list(update.stopped), FinishReason.STOP)
        return outputs, update

    def run(self) -> None:
        """Until every request has ended."""
        while self.harness.has_requests:
            outputs, _ = self.step()
            if not outputs.did_run and (moment := self.harness.core.wake_at()) is not None:
                self.clock.wait(moment)

    def abort(self, *names: str) -> None:
        """As AsyncClient does it."""
        engine_ids = self.outputs.engine_ids(names)
        self.outputs.abort(names, self.clock.now())
        self.harness.finish(engine_ids)

    def timeline(self, name: str) -> Timeline:
        """The only one of this name."""
        (found,) = self.monitor.timelines(name)
        return found

    def events(self, name: str) -> list[tuple[float, str]]:
        """(seconds, what) of a request, by time."""
        return [(event.seconds, event.event) for event in sorted(self.timeline(name).events, key=lambda one: one[0])]


def names_of(events: Sequence[tuple[float, str]]) -> list[str]:
    """What happened, without the times."""
    return [event for _, event in events]
