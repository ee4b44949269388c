"""LogitsProcessors: those that the config lists, as one callable a request; and no_repeat_ngram, which ships."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import planted_logits as planted
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenyard import LLM, ComponentDescriptor, SamplingParams
from tokenyard.config import NoOptions
from tokenyard.errors import LogitsProcessorError, PluginError, ValidationError
from tokenyard.interfaces import LogitsProcessor, LogitsProcessorContext, LogitsRequest, RowLogitsProcessor
from tokenyard.launch.compose import load_engine_config
from tokenyard.request import PoolingParams
from tokenyard.scheduler_output import RequestStart, Slot
from tokenyard.testing import catalogue_with
from tokenyard.worker.logits_processors import LogitsProcessors, load_logits_processors

if TYPE_CHECKING:
    from tokenyard.arrays import IntArray
    from tokenyard.catalogue import Catalogue

VOCAB_SIZE = 16


def start_of(prompt: list[int], resumed: list[int] | None = None, **extra_args: object) -> RequestStart:
    return RequestStart(
        request_id="7",
        slot=Slot(0, 1),
        token_ids=np.array([*prompt, *(resumed or [])], dtype=np.int32),
        num_prompt_tokens=len(prompt),
        num_computed_tokens=0,
        block_ids=(),
        params=SamplingParams(extra_args=extra_args),
    )


def banned(row: RowLogitsProcessor | None, output: list[int]) -> set[int]:
    assert row is not None
    logits = torch.zeros(VOCAB_SIZE)
    row(logits, np.array(output, dtype=np.int32))
    return set(torch.nonzero(logits == -torch.inf).flatten().tolist())


def load(*names: str, catalogue: Catalogue | None = None) -> LogitsProcessors:
    config, used = load_engine_config([f"logits_processors=[{','.join(names)}]"], catalogue=catalogue)
    return load_logits_processors(config, used, VOCAB_SIZE, "cpu", seed=3)


# ---- Loading and chaining --------------------------------------------------------------------------------------------


class Adds(LogitsProcessor):
    """Adds a number to logit 0 and multiplies it by ten: the order of several shows."""

    def __init__(self, number: float) -> None:
        self._number = number
        self.requests: list[LogitsRequest] = []

    def start(self, request: LogitsRequest) -> RowLogitsProcessor | None:
        self.requests.append(request)

        def row(logits: torch.Tensor, output_token_ids: IntArray) -> None:
            logits[0] = logits[0] * 10 + self._number

        return row if self._number else None


def test_they_run_in_the_configs_order_and_none_when_nobody_wants_the_request() -> None:
    processors = LogitsProcessors([("one", Adds(1)), ("nothing", Adds(0)), ("two", Adds(2))])
    row, logits = processors.start(start_of([5])), torch.zeros(3)
    assert row is not None
    row(logits, np.zeros(0, dtype=np.int32))
    assert logits.tolist() == [12, 0, 0]
    assert LogitsProcessors([("nothing", Adds(0))]).start(start_of([5])) is None
    assert LogitsProcessors([]).start(start_of([5])) is None


def test_a_processor_is_told_the_prompt_alone_and_cannot_write_to_it() -> None:
    processor, start = Adds(1), start_of([5, 6], resumed=[7, 8], a=1)
    LogitsProcessors([("adds", processor)]).start(start)
    (request,) = processor.requests
    assert (request.request_id, request.prompt_token_ids.tolist()) == ("7", [5, 6])
    assert request.params.extra_args == {"a": 1}
    with pytest.raises(ValueError, match="read-only"):
        request.prompt_token_ids[0] = 1
    assert start.token_ids.flags.writeable


def test_a_request_that_pools_has_no_logits() -> None:
    processor = Adds(1)
    start = RequestStart(
        request_id="7", slot=Slot(0, 1), token_ids=np.array([1], dtype=np.int32), num_prompt_tokens=1,
        num_computed_tokens=0, block_ids=(), params=PoolingParams(),
    )  # fmt: skip
    assert LogitsProcessors([("adds", processor)]).start(start) is None
    assert not processor.requests


def test_the_factory_is_told_the_model_and_the_seed_and_its_options() -> None:
    @dataclass(frozen=True)
    class Options:
        strength: float = 1.0

    made: list[tuple[Options, LogitsProcessorContext]] = []

    def make(options: Options, context: LogitsProcessorContext) -> LogitsProcessor:
        made.append((options, context))
        return planted.ForbidsLast()

    catalogue = catalogue_with(
        ComponentDescriptor(
            component_kind="logits_processor", name="told", api_version=(1, 3), options_type=Options, factory=make
        )
    )
    load("told", "{name: told, strength: 2}", catalogue=catalogue)
    context = LogitsProcessorContext(vocab_size=VOCAB_SIZE, device_type="cpu", seed=3)
    assert made == [(Options(), context), (Options(strength=2.0), context)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"factory": lambda options, context: 1 / 0}, "logits_processor 'bad' failed to start: ZeroDivisionError"),
        (
            {"factory": lambda options, context: 3},
            "logits_processor 'bad' is broken: its factory made a int, not a Log",
        ),
        ({"requires": lambda platform: ["no moon"]}, "logits_processor 'bad' cannot run here: no moon"),
    ],
)
def test_one_that_cannot_start_is_told_by_its_name(changes: dict[str, object], message: str) -> None:
    values = {"factory": lambda options, context: planted.ForbidsLast(), **changes}
    bad: ComponentDescriptor[NoOptions] = ComponentDescriptor(
        component_kind="logits_processor", name="bad", api_version=(1, 3), **values  # type: ignore[arg-type]
    )  # fmt: skip
    with pytest.raises(PluginError, match=message):
        load("bad", catalogue=catalogue_with(bad))


class Fails(LogitsProcessor):
    """At the start, or when it is called."""

    def __init__(self, error: BaseException, *, at_start: bool) -> None:
        self._error, self._at_start = error, at_start

    def start(self, request: LogitsRequest) -> RowLogitsProcessor | None:
        if self._at_start:
            raise self._error
        return self._fail

    def _fail(self, logits: torch.Tensor, output_token_ids: IntArray) -> None:
        raise self._error


@pytest.mark.parametrize("at_start", [True, False])
@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ZeroDivisionError("boom"), "ZeroDivisionError: boom"),
        (SystemExit(3), "SystemExit: 3"),
        (ValidationError("size=-1 is not valid", parameter="size", value=-1), "size=-1 is not valid"),
    ],
)
def test_what_one_raises_names_it_and_the_request(error: BaseException, told: str, at_start: bool) -> None:
    def run() -> None:
        row = LogitsProcessors([("adds", Adds(1)), ("bad", Fails(error, at_start=at_start))]).start(start_of([5]))
        assert row is not None
        row(torch.zeros(3), np.zeros(0, dtype=np.int32))

    with pytest.raises(LogitsProcessorError) as caught:
        run()
    assert str(caught.value) == f"logits processor 'bad' failed for request '7': {told}"


def test_ctrl_c_is_no_fault_of_a_processor() -> None:
    with pytest.raises(KeyboardInterrupt):
        LogitsProcessors([("bad", Fails(KeyboardInterrupt(), at_start=True))]).start(start_of([5]))


class Returns(LogitsProcessor):
    """Something from `start`, or from the call."""

    def __init__(self, started: object) -> None:
        self._started = started

    def start(self, request: LogitsRequest) -> RowLogitsProcessor | None:
        return cast(RowLogitsProcessor, self._started)


@pytest.mark.parametrize(
    ("started", "told"),
    [
        (3, r"its start\(\) returned a int, not a callable or None"),
        (0, r"its start\(\) returned a int"),
        (lambda logits, output: logits + 1, "it returned a Tensor; logits are changed in place and None is returned"),
    ],
)
def test_what_one_returns_instead_is_an_error_rather_than_nothing(started: object, told: str) -> None:
    def run() -> None:
        row = LogitsProcessors([("bad", Returns(started))]).start(start_of([5]))
        assert row is not None
        row(torch.zeros(3), np.zeros(0, dtype=np.int32))

    with pytest.raises(LogitsProcessorError, match=f"'bad' failed for request '7': {told}"):
        run()


# ---- no_repeat_ngram -------------------------------------------------------------------------------------------------


def repeats(tokens: list[int], size: int) -> set[int]:
    """Tokens that would make an n-gram come again, found the slow way."""
    known = {tuple(tokens[start : start + size]) for start in range(len(tokens) - size + 1)}
    before = tuple(tokens[len(tokens) - size + 1 :]) if size > 1 else ()
    return {token for token in range(VOCAB_SIZE) if (*before, token) in known and len(before) == size - 1}


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=12), st.lists(st.integers(0, 3), max_size=12), st.integers(1, 5)
)
def test_no_n_gram_of_prompt_and_output_comes_twice(prompt: list[int], output: list[int], size: int) -> None:
    row = load_ngram().start(start_of(prompt, no_repeat_ngram_size=size))
    for count in range(len(output) + 1):
        assert banned(row, output[:count]) == repeats([*prompt, *output[:count]], size)


_NGRAM: list[LogitsProcessors] = []


def load_ngram() -> LogitsProcessors:
    """Composing a config for each example would take a while."""
    if not _NGRAM:
        _NGRAM.append(load("no_repeat_ngram"))
    return _NGRAM[0]


def test_the_option_serves_requests_that_say_nothing() -> None:
    assert load_ngram().start(start_of([5])) is None
    assert load_ngram().start(start_of([5], no_repeat_ngram_size=0)) is None
    for_all = load("{name: no_repeat_ngram, size: 1}")
    assert banned(for_all.start(start_of([5])), [6]) == {5, 6}
    assert for_all.start(start_of([5], no_repeat_ngram_size=0)) is None


@pytest.mark.parametrize("size", ["2", -1, 1025, 1.5, True, None, [2]])
def test_a_size_that_is_none_fails_its_request_alone(size: object) -> None:
    with pytest.raises(LogitsProcessorError, match=r"'no_repeat_ngram' failed .* no_repeat_ngram_size=.* is not valid"):
        load_ngram().start(start_of([5], no_repeat_ngram_size=size))


@pytest.mark.parametrize("engine", ["sync", "overlap"])
def test_a_processor_changes_the_requests_that_ask_and_one_that_fails_ends_alone(
    tiny_llama_dir: Path, engine: str
) -> None:
    """2.3 #5: the others have the tokens that they have without it."""
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)

    def asking(size: object) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, extra_args={"no_repeat_ngram_size": size})

    def run(run_params: list[SamplingParams], *overrides: str) -> list[tuple[list[int], str | None]]:
        given_overrides = [f"engine={engine}", "kv_cache.num_blocks=64", *overrides]
        with LLM(
            tiny_llama_dir, dtype="float32", logits_processors=["no_repeat_ngram"], overrides=given_overrides
        ) as llm:
            outputs = llm.generate([[5, 6, 5]] * len(run_params), run_params, use_tqdm=False)
            return [(output.outputs[0].token_ids, output.error) for output in outputs]

    plain, asked, failed, other = run([greedy, asking(1), asking("x"), greedy])
    assert plain == other == run([greedy])[0]
    assert len(set(asked[0])) == len(asked[0]) == 24
    assert not {5, 6} & set(asked[0])
    assert asked == run([asking(1)])[0]
    assert failed[0] == []
    assert "no_repeat_ngram_size='x' is not valid" in str(failed[1])
    crowded = run([greedy, asking(1), greedy, asking(2)], "kv_cache.block_size=4", "kv_cache.num_blocks=12")
    assert crowded[:2] == [plain, asked]
