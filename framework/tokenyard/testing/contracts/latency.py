"""LatencyModelContract: what a latency model must keep."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hypothesis import strategies as st

from tokenyard.descriptors import PolicyDescriptor
from tokenyard.errors import ConfigError
from tokenyard.interfaces.latency import COMPONENT_KIND, StepLoad
from tokenyard.interfaces.policy import SchedulingPolicy
from tokenyard.launch.steering import make_steering
from tokenyard.testing.contracts.base import Contract, Loaded, Shape, expect, no_errors
from tokenyard.testing.contracts.traces import Operation, Player, shapes, traces
from tokenyard.testing.contracts.watch import noting

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from tokenyard.config import NoOptions
    from tokenyard.interfaces.latency import LatencyModel
    from tokenyard.interfaces.policy import SchedulerView

MOST_ROWS, MOST_CONTEXT = 256, 1 << 17


class LatencyModelContract(Contract):
    """Set `overrides = ["latency=NAME"]`, with options `["latency=NAME", "latency.OPTION=0.01"]`."""

    _kind = COMPONENT_KIND
    _choice = "latency=NAME"

    def test_a_step_takes_time(self) -> None:
        """`latency.seconds`: a finite number of seconds above 0, whatever the step computes."""
        loaded = self.load()

        def check(load: StepLoad) -> None:
            _seconds(_made(loaded), load)

        for load in (*_EDGES, *_full_steps(loaded)):
            check(load)
        self.for_all(check, _loads(loaded))

    def test_more_prefill_tokens_never_take_less(self) -> None:
        """`latency.grows`: in one chunk or in a new one; `StepLatency.budget_for` is a binary search."""
        loaded = self.load()

        def check(load: StepLoad, more: int) -> None:
            model = _made(loaded)
            larger = load._replace(
                num_prefills=max(1, load.num_prefills), num_prefill_tokens=load.num_prefill_tokens + more
            )
            less, longer = _seconds(model, load), _seconds(model, larger)
            expect(less <= longer, "latency.grows", f"{less} s for {load}, and {longer} s with {more} tokens more")

        self.for_all(check, _loads(loaded), st.integers(1, loaded.config.scheduler.max_num_batched_tokens))

    def test_it_depends_on_nothing_but_the_load(self) -> None:
        """`latency.pure`: the same again, in any order, and from another model."""
        loaded = self.load()

        def check(loads: Sequence[StepLoad]) -> None:
            model = _made(loaded)
            first = [_seconds(model, load) for load in loads]
            again = [_seconds(model, load) for load in reversed(loads)][::-1]
            expect(first == again, "latency.pure", f"asked again it says {again}, and said {first}")
            other = _made(loaded)
            elsewhere = [_seconds(other, load) for load in loads]
            expect(first == elsewhere, "latency.pure", f"another one says {elsewhere}, this one {first}")

        self.for_all(check, st.lists(_loads(loaded), min_size=1, max_size=5))

    def test_it_reads_no_clock_and_draws_no_numbers(self) -> None:
        """`latency.no_clock`: it serves simulation as the clock; nor any numbers, `latency.no_draws`."""
        loaded, clocks, draws = self.load(), list[str](), list[str]()

        def check(load: StepLoad) -> None:
            with noting(clocks, draws):
                _seconds(_made(loaded), load)
            expect(not clocks, "latency.no_clock", f"it calls {', '.join(clocks)}")
            expect(not draws, "latency.no_draws", f"it calls {', '.join(draws)}")

        self.for_all(check, _loads(loaded))

    def test_it_says_in_a_line_what_it_was_calibrated_on(self) -> None:
        """`latency.calibration`: text without a line break, which stands beside each result; or nothing."""
        with no_errors("latency.never_raises"):
            said = _made(self.load()).calibration
        is_line = isinstance(said, str) and len(said.splitlines()) <= 1
        expect(is_line, "latency.calibration", f"{said!r} is no line")

    def test_it_serves_a_policy_in_an_engine(self) -> None:
        """`latency.in_engine`: a policy that gives each step what fits a time has the same schedule in every run."""
        loaded = self.load(f"scheduler={_TIMED.name}", descriptors=(_TIMED,))

        def check(trace: Sequence[Operation], shape: Shape) -> None:
            schedules = []
            for _ in range(2):
                player = Player(loaded.harness(shape))
                with no_errors("latency.never_raises"):
                    player.play(trace)
                    player.finish()
                schedules.append(player.schedule)
            expect(schedules[0] == schedules[1], "latency.in_engine", "two runs of a trace have other schedules")

        self.for_all(check, traces(), shapes())


class _Timed(SchedulingPolicy):
    """The target is the time of four prefill tokens, so that a budget often binds."""

    def token_budget(self, view: SchedulerView) -> int | None:
        return view.latency.budget_for(view.latency.predict(StepLoad(num_prefills=1, num_prefill_tokens=4)))


_TIMED: PolicyDescriptor[NoOptions] = PolicyDescriptor(
    name="timed_of_suite", api_version=(1, 7), factory=lambda options, context: _Timed()
)
_EDGES = (
    StepLoad(num_decodes=1),
    StepLoad(num_prefills=1, num_prefill_tokens=1),
    StepLoad(num_prefills=1, num_prefill_tokens=1, num_prefill_context_tokens=MOST_CONTEXT),
    StepLoad(num_decodes=MOST_ROWS, num_decode_context_tokens=MOST_CONTEXT),
)


def _full_steps(loaded: Loaded) -> Sequence[StepLoad]:
    """Steps of as many tokens as there may be: one prompt, many prompts, and decodes beside them."""
    tokens = loaded.config.scheduler.max_num_batched_tokens
    rows = min(MOST_ROWS, tokens)
    one = StepLoad(num_prefills=1, num_prefill_tokens=tokens, num_prefill_context_tokens=MOST_CONTEXT)
    many = StepLoad(num_prefills=rows, num_prefill_tokens=tokens)
    decodes = StepLoad(num_decodes=rows, num_decode_context_tokens=MOST_CONTEXT)
    mixed = decodes._replace(num_prefills=1, num_prefill_tokens=max(1, tokens - rows))
    return one, many, decodes, mixed


def _loads(loaded: Loaded) -> SearchStrategy[StepLoad]:
    """Steps that compute something."""
    tokens = loaded.config.scheduler.max_num_batched_tokens
    load = st.builds(
        lambda decodes, context, prefills, more, before: StepLoad(
            num_decodes=decodes,
            num_decode_context_tokens=context if decodes else 0,
            num_prefills=prefills,
            num_prefill_tokens=prefills + more if prefills else 0,
            num_prefill_context_tokens=before if prefills else 0,
        ),
        st.integers(0, MOST_ROWS),
        st.integers(0, MOST_CONTEXT),
        st.integers(0, MOST_ROWS),
        st.integers(0, tokens),
        st.integers(0, MOST_CONTEXT),
    )
    return load.filter(lambda one: one.num_tokens > 0)


def _made(loaded: Loaded) -> LatencyModel:
    model = make_steering(loaded.config, loaded.catalogue).latency
    if model is None:
        raise ConfigError("latency=none is no latency model; set overrides = ['latency=NAME']")
    return model


def _seconds(model: LatencyModel, load: StepLoad) -> float:
    with no_errors("latency.never_raises"):
        seconds = model.step_seconds(load)
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool) and 0 < seconds < math.inf
    expect(is_number, "latency.seconds", f"{seconds!r} s for {load}")
    return seconds
