"""PredictorContract: what an output-length predictor must keep."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from hypothesis import strategies as st

from tokenyard.descriptors import PolicyDescriptor
from tokenyard.errors import PluginError
from tokenyard.interfaces.policy import SchedulingPolicy
from tokenyard.interfaces.predictor import COMPONENT_KIND
from tokenyard.launch.steering import make_steering
from tokenyard.request import EngineCoreRequest
from tokenyard.sampling_params import SamplingParams
from tokenyard.scheduler.request_state import Request
from tokenyard.testing.contracts.base import Contract, Loaded, Shape, expect, no_errors
from tokenyard.testing.contracts.traces import Operation, Player, shapes, traces
from tokenyard.testing.contracts.watch import noting

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from tokenyard.config import NoOptions
    from tokenyard.interfaces.policy import RequestView, SchedulerView
    from tokenyard.interfaces.predictor import OutputLengthPredictor

MOST_TOKENS = 64  # of a prompt, and of an output
_QUANTILES = (0.05, 0.5, 0.95)


class _Example(NamedTuple):
    """A request that has not ended, and how long its output will be in truth."""

    num_prompt_tokens: int
    max_tokens: int
    num_delivered: int  # below max_tokens
    truth: int

    def record(self, request_id: str) -> Request:
        core = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=np.arange(self.num_prompt_tokens, dtype=np.int32),
            params=SamplingParams(max_tokens=self.max_tokens, ignore_eos=True),
            arrival_time=0.0,
        )
        record = Request(core, self.num_prompt_tokens + self.max_tokens)
        record.append(np.zeros(self.num_delivered, dtype=np.int32))
        return record


class PredictorContract(Contract):
    """Set `overrides = ["scheduler.predictor=NAME"]`, or with options `["scheduler.predictor={name: NAME, X: 1}"]`."""

    _kind = COMPONENT_KIND
    _choice = "scheduler.predictor=NAME"

    def test_a_prediction_is_possible(self) -> None:
        """`predictor.possible`: at least one token more than was delivered, at most the request's limit."""
        loaded = self.load()

        def check(examples: Sequence[_Example]) -> None:
            predictor, records = _made(loaded, examples)
            for record in records:
                for length in _predictions(predictor, record):
                    least, most = record.num_output_tokens + 1, record.max_output_tokens
                    what = f"{length!r} of a request that has delivered {least - 1} of at most {most} tokens"
                    expect(least <= length <= most, "predictor.possible", what)

        self.for_all(check, _examples())

    def test_quantiles_grow(self) -> None:
        """`predictor.quantiles`: a longer output is never the less likely bound."""
        loaded = self.load()

        def check(examples: Sequence[_Example]) -> None:
            predictor, records = _made(loaded, examples)
            for record in records:
                lengths = _predictions(predictor, record)[1:]
                expect(lengths == sorted(lengths), "predictor.quantiles", f"those of {_QUANTILES} are {lengths}")

        self.for_all(check, _examples())

    def test_a_prediction_depends_on_nothing_but_requests_and_seed(self) -> None:
        """`predictor.pure`: the same again, in any order, and from another predictor that saw the same ends."""
        loaded = self.load()

        def check(ended: Sequence[_Example], examples: Sequence[_Example]) -> None:
            predictor, records = _made(loaded, examples, ended)
            first = [_predictions(predictor, record) for record in records]
            again = [_predictions(predictor, record) for record in reversed(records)][::-1]
            expect(first == again, "predictor.pure", f"asked again it says {again}, and said {first}")
            other, records = _made(loaded, examples, ended)
            elsewhere = [_predictions(other, record) for record in records]
            expect(first == elsewhere, "predictor.pure", f"another one says {elsewhere}, this one {first}")

        self.for_all(check, _examples(), _examples())

    def test_it_reads_no_clock_and_draws_no_numbers(self) -> None:
        """`predictor.no_clock`: so that it says the same in simulation; nor any numbers, `predictor.no_draws`."""
        loaded, clocks, draws = self.load(), list[str](), list[str]()

        def check(ended: Sequence[_Example], examples: Sequence[_Example]) -> None:
            with noting(clocks, draws):
                predictor, records = _made(loaded, examples, ended)
                for record in records:
                    _predictions(predictor, record)
            expect(not clocks, "predictor.no_clock", f"it calls {', '.join(clocks)}")
            expect(not draws, "predictor.no_draws", f"it calls {', '.join(draws)}")

        self.for_all(check, _examples(), _examples())

    def test_it_serves_a_policy_in_an_engine(self) -> None:
        """`predictor.in_engine`: shortest first by its predictions is the same schedule in every run, and all ends."""
        choice = f"scheduler={_SHORTEST.name}"
        loaded = self.load(choice, descriptors=(_SHORTEST,))

        def check(trace: Sequence[Operation], shape: Shape) -> None:
            schedules = []
            for _ in range(2):
                player = Player(loaded.harness(shape))
                with no_errors("predictor.never_raises"):
                    player.play(trace)
                    player.finish()
                schedules.append(player.schedule)
            expect(schedules[0] == schedules[1], "predictor.in_engine", "two runs of a trace have other schedules")

        self.for_all(check, traces(), shapes())


class _Shortest(SchedulingPolicy):
    may_starve = True

    def waiting_key(self, request: RequestView, view: SchedulerView) -> object:
        return view.predictor.output_len(request)

    def victim(self, candidates: Sequence[RequestView], num_blocks_needed: int, view: SchedulerView) -> RequestView:
        return max(candidates, key=lambda one: (view.predictor.quantile(one, 0.9), one.request_id))


_SHORTEST: PolicyDescriptor[NoOptions] = PolicyDescriptor(
    name="shortest_predicted_of_suite", api_version=(1, 7), factory=lambda options, context: _Shortest()
)


def _examples() -> SearchStrategy[list[_Example]]:
    count = st.integers(1, MOST_TOKENS)
    example = st.builds(_Example, count, count, st.integers(0, MOST_TOKENS - 1), count)
    return st.lists(example.filter(lambda one: one.num_delivered < one.max_tokens), min_size=1, max_size=5)


def _made(
    loaded: Loaded, examples: Sequence[_Example], ended: Sequence[_Example] = ()
) -> tuple[OutputLengthPredictor, list[Request]]:
    """A predictor that has seen some requests end, and records of others."""
    make = make_steering(loaded.config, loaded.catalogue).make_predictor
    if make is None:
        raise PluginError(f"predictor '{loaded.config.scheduler.predictor}' is not installed")
    truth = {f"ended {index}": one.truth for index, one in enumerate(ended)}
    truth |= {str(index): one.truth for index, one in enumerate(examples)}
    predictor = make(_told(truth))
    with no_errors("predictor.never_raises"):
        for index, one in enumerate(ended):
            record = one.record(f"ended {index}")
            predictor.output_len(record)
            predictor.on_finish(record)
    return predictor, [one.record(str(index)) for index, one in enumerate(examples)]


def _told(truth: dict[str, int]) -> Callable[[RequestView], int]:
    return lambda request: min(truth[request.request_id], request.max_output_tokens)


def _predictions(predictor: OutputLengthPredictor, record: Request) -> list[float]:
    """The prediction, and its quantiles."""
    with no_errors("predictor.never_raises"):
        lengths = [predictor.output_len(record), *(predictor.quantile(record, q) for q in _QUANTILES)]
    for length in lengths:
        is_number = isinstance(length, int | float) and not isinstance(length, bool) and math.isfinite(length)
        expect(is_number, "predictor.possible", f"{length!r} is no number of tokens")
    return lengths
