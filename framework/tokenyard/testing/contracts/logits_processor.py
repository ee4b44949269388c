"""LogitsProcessorContract: what a logits processor must keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
from hypothesis import strategies as st

from tokenyard.interfaces.logits_processor import COMPONENT_KIND
from tokenyard.sampling_params import SamplingParams
from tokenyard.scheduler_output import RequestStart, Slot
from tokenyard.testing.contracts.base import Contract, Loaded, expect, no_errors

if TYPE_CHECKING:
    import torch
    from hypothesis.strategies import SearchStrategy

    from tokenyard.arrays import IntArray
    from tokenyard.interfaces.logits_processor import RowLogitsProcessor
    from tokenyard.worker.logits_processors import LogitsProcessors

VOCAB_SIZE = 32  # small, so that tokens come again
SEED = 0


class _Example(NamedTuple):
    """A request with what it has sampled."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    extra_args: Mapping[str, object] | None


class LogitsProcessorContract(Contract):
    """Set `overrides = ["logits_processors=[NAME]"]`, with options `["logits_processors=[{name: NAME, OPTION: 1}]"]`.

    - `extra_args`: what requests say to switch it on, one of them at a time: a list of dicts.
    - `wants_every_request`: it also changes requests that say nothing.
    """

    _kind = COMPONENT_KIND
    _choice = "logits_processors=[NAME]"

    extra_args: ClassVar[Sequence[Mapping[str, object]]] = ()
    wants_every_request: ClassVar[bool] = False

    def test_it_changes_logits_in_place(self) -> None:
        """`logits.in_place`: it returns None and keeps the tensor's shape and type; `-inf` is allowed, NaN is not."""
        loaded = self.load()

        def check(example: _Example) -> None:
            row = _start(_processors(loaded), "0", example)
            for count in range(len(example.output) + 1):
                if row is not None:
                    _run(row, example, count)

        self.for_all(check, self._examples())

    def test_it_changes_something(self) -> None:
        """`logits.works`: what `extra_args` say switches it on, and some logits change."""
        loaded, changed = self.load(), []

        def check(example: _Example) -> None:
            row = _start(_processors(loaded), "0", example)
            expect(row is not None, "logits.works", f"a request with extra_args {example.extra_args} is left alone")
            if row is not None:
                after, before = _run(row, example, len(example.output)), _logits(len(example.output))
                changed.append(not _same(after, before))

        self.for_all(check, self._examples())
        expect(any(changed), "logits.works", "no logits changed in any example")

    def test_a_request_that_asks_for_nothing_costs_nothing(self) -> None:
        """`logits.costs_nothing`: `start` returns None for a request that does not want it."""
        if self.wants_every_request:
            return
        loaded = self.load()

        def check(example: _Example) -> None:
            row = _start(_processors(loaded), "0", example._replace(extra_args=None))
            expect(row is None, "logits.costs_nothing", "a request that says nothing in extra_args gets a processor")

        self.for_all(check, self._examples())

    def test_it_goes_on_after_a_preemption(self) -> None:
        """`logits.restart`: made anew with the same output tokens, here or in another process, it does the same."""
        loaded = self.load()

        def check(example: _Example) -> None:
            processors = _processors(loaded)
            steady = _start(processors, "0", example)
            for count in range(len(example.output) + 1):
                expected = _run(steady, example, count)
                for again in (processors, _processors(loaded)):
                    found = _run(_start(again, "0", example), example, count)
                    where = f"{example} with {count} output tokens"
                    expect(_same(found, expected), "logits.restart", f"made anew it does something else for {where}")

        self.for_all(check, self._examples())

    def test_requests_do_not_touch_each_other(self) -> None:
        """`logits.own_request`: a request's logits are the same alone and beside others, whatever their ids are."""
        loaded = self.load()

        def check(first: _Example, second: _Example) -> None:
            alone = _start(_processors(loaded), "0", first)
            together = _processors(loaded)
            one, other = _start(together, "1", first), _start(together, "2", second)
            for count in range(max(len(first.output), len(second.output)) + 1):
                _run(other, second, min(count, len(second.output)))
                if count <= len(first.output):
                    same = _same(_run(alone, first, count), _run(one, first, count))
                    expect(same, "logits.own_request", f"{first} is treated otherwise beside {second}")

        self.for_all(check, self._examples(), self._examples())

    def _examples(self) -> SearchStrategy[_Example]:
        token_ids = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=24)
        asked = st.sampled_from(list(self.extra_args)) if self.extra_args else st.none()
        prompts = token_ids.map(lambda ids: tuple(ids or [0]))
        return st.builds(_Example, prompts, token_ids.map(tuple), asked)


def _processors(loaded: Loaded) -> LogitsProcessors:
    from tokenyard.worker.logits_processors import load_logits_processors  # torch

    return load_logits_processors(loaded.config, loaded.catalogue, VOCAB_SIZE, "cpu", SEED)


def _start(processors: LogitsProcessors, request_id: str, example: _Example) -> RowLogitsProcessor | None:
    empty = np.zeros(0, dtype=np.int32)
    start = RequestStart(
        request_id=request_id,
        slot=Slot(0, 1),
        token_ids=_array(example.prompt),
        num_prompt_tokens=len(example.prompt),
        num_computed_tokens=0,
        block_ids=(empty,),
        params=SamplingParams(extra_args=None if example.extra_args is None else dict(example.extra_args)),
    )
    with no_errors("logits.never_raises"):
        return processors.start(start)


def _run(row: RowLogitsProcessor | None, example: _Example, num_output_tokens: int) -> torch.Tensor:
    """The logits that a request's next token is chosen from."""
    logits = _logits(num_output_tokens)
    if row is None:
        return logits
    shape, dtype, address = logits.shape, logits.dtype, logits.data_ptr()
    import torch

    with torch.inference_mode(), no_errors("logits.never_raises"):
        row(logits, _array(example.output[:num_output_tokens]))
    kept = (logits.shape, logits.dtype, logits.data_ptr()) == (shape, dtype, address)
    expect(kept, "logits.in_place", f"the logits are {tuple(logits.shape)} of {logits.dtype} afterwards")
    expect(not bool(logits.isnan().any()), "logits.in_place", f"NaN among the logits for {example}")
    return logits


def _logits(position: int) -> torch.Tensor:
    """[VOCAB_SIZE] the model's, the same for each run of a position; some are forbidden already."""
    import torch

    logits = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(position))
    logits[position % VOCAB_SIZE] = -torch.inf
    return logits


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((one == other).all())


def _array(token_ids: Sequence[int]) -> IntArray:
    array = np.array(token_ids, dtype=np.int32)
    array.flags.writeable = False
    return array
