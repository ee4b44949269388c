"""LLM with parts that watch, steer or fail: observers, a policy that goes by priority, the budget of each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tokenyard import LLM, ObserverDescriptor, PolicyDescriptor, SamplingParams
from tokenyard.catalogue import Catalogue
from tokenyard.errors import EngineDeadError
from tokenyard.interfaces import Observer, ObserverContext, RequestView, SchedulerView, SchedulingPolicy
from tokenyard.launch.compose import load_engine_config
from tokenyard.scheduler import BatchScheduler
from tokenyard.worker.model_runner import ModelRunner

if TYPE_CHECKING:
    from tokenyard.engine_outputs import EngineCoreOutputs
    from tokenyard.scheduler_output import SchedulerOutput

CatalogueWith = Callable[..., Catalogue]

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchOptions:
    label: str = "unnamed"


@dataclass
class Watch(Observer):
    """Keeps what it is told."""

    label: str
    seed: int
    num_scheduled: list[int] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    num_shutdowns: int = 0

    def on_step(self, output: SchedulerOutput, result: EngineCoreOutputs, now: float) -> None:
        self.num_scheduled.append(output.total_num_scheduled_tokens)
        self.finished += [end.request_id for end in result.finished]
        self.times.append(now)

    def on_shutdown(self) -> None:
        self.num_shutdowns += 1


@pytest.fixture
def watches() -> list[Watch]:
    """The observers that were made, in their order."""
    return []


@pytest.fixture
def start(tiny_llama_dir: Path, catalogue_with: CatalogueWith, watches: list[Watch]) -> Callable[..., LLM]:
    """Starts an LLM with overrides, where the observer `watch` and the policy `urgent` are installed."""

    def make_watch(options: WatchOptions, context: ObserverContext) -> Watch:
        watches.append(Watch(options.label, context.seed))
        return watches[-1]

    catalogue = catalogue_with(
        ObserverDescriptor(name="watch", api_version=(1, 1), options_type=WatchOptions, factory=make_watch),
        PolicyDescriptor(name="urgent", api_version=(1, 1), factory=lambda options, context: UrgentFirst()),
    )

    def make(*overrides: str) -> LLM:
        given = [f"model.name='{tiny_llama_dir}'", "model.dtype=float32", *overrides]
        return LLM.from_parts(*load_engine_config(given, catalogue=catalogue))

    return make


class UrgentFirst(SchedulingPolicy):
    """By priority alone."""

    def waiting_key(self, request: RequestView, view: SchedulerView) -> int:
        return request.priority


def test_every_observer_of_the_config_sees_every_step_with_its_own_options(
    start: Callable[..., LLM], watches: list[Watch]
) -> None:
    with start("observers=[watch,{name:watch,label:second}]", "seed=5", "kv_cache.num_blocks=16") as llm:
        llm.generate(["hi", "the"], GREEDY, use_tqdm=False)
        assert [(watch.label, watch.seed) for watch in watches] == [("unnamed", 5), ("second", 5)]
        for watch in watches:
            # Both prompts in one step ("the" has two tokens here), then a token each.
            assert watch.num_scheduled == [3, 2, 2, 2]
            assert watch.finished == ["0", "1"]
            assert watch.times == sorted(watch.times)
            assert watch.num_shutdowns == 0
    assert [watch.num_shutdowns for watch in watches] == [1, 1]


def test_without_observers_in_the_config_none_is_made(start: Callable[..., LLM], watches: list[Watch]) -> None:
    with start("kv_cache.num_blocks=16") as llm:
        llm.generate("hi", GREEDY, use_tqdm=False)
    assert watches == []


@pytest.mark.parametrize(
    ("priority", "order"),
    [([3, -1, 2], ["1", "2", "0"]), ([1, 2, 3], ["0", "1", "2"]), (7, ["0", "1", "2"]), (None, ["0", "1", "2"])],
)
def test_the_priority_of_each_prompt_reaches_the_policy(
    start: Callable[..., LLM], watches: list[Watch], priority: int | Sequence[int] | None, order: list[str]
) -> None:
    one_by_one = ("scheduler.max_num_seqs=1", "kv_cache.num_blocks=16", "observers=[watch]")
    with start("scheduler=urgent", *one_by_one) as llm:
        outputs = llm.generate(["hi", "he", "the"], GREEDY, use_tqdm=False, priority=priority)
    assert watches[0].finished == order
    assert [output.request_id for output in outputs] == ["0", "1", "2"]


@pytest.mark.parametrize("num_past_edge", range(1, 18))
def test_sch_12_no_step_exceeds_its_token_budget_whatever_the_prefix_hits(
    start: Callable[..., LLM], watches: list[Watch], num_past_edge: int
) -> None:
    """SCH-12: hits end at the edge of a block, the prompts 1 to 17 tokens later, and a decode of each runs beside."""
    budget = "scheduler.max_num_batched_tokens=64"
    shared = [10 + index % 200 for index in range(240)]
    # The last one is longer than a step, so that a prefill that has begun shares the next one with decodes.
    prompts = [shared[: 16 * num_blocks + num_past_edge] for num_blocks in (1, 2, 3, 4, 5, 6, 7, 13)]
    with start(budget, "kv_cache.num_blocks=128", "observers=[watch]") as llm:
        llm.generate([shared[:64]], GREEDY, use_tqdm=False)
        warm = llm.generate(prompts, GREEDY, use_tqdm=False)
    num_cached = [output.num_cached_tokens for output in warm]
    assert num_cached[:3] == [(len(prompt) - 1) // 16 * 16 for prompt in prompts[:3]]
    assert min(num_cached[3:]) == 64, "a later one may also hit what an earlier one has just computed"
    (watch,) = watches
    assert watch.num_scheduled[:5] == [64, 1, 1, 1, 64], "hits cost nothing, so the budget is used up"
    assert max(watch.num_scheduled) == 64
    num_prompt = 64 + sum(len(prompt) for prompt in prompts)
    assert sum(watch.num_scheduled) == num_prompt - sum(num_cached) + 9 * (GREEDY.max_tokens or 0) - 9
    with start(budget, "kv_cache.num_blocks=128", "kv_cache.enable_prefix_caching=false") as llm:
        cold = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in warm] == [output.outputs[0].token_ids for output in cold]


@pytest.mark.parametrize(
    ("owner", "method", "error"),
    [
        (ModelRunner, "execute", RuntimeError("device lost")),
        (ModelRunner, "sample", RuntimeError("device lost")),
        (BatchScheduler, "schedule", AssertionError("65 tokens in a step of 64")),
        (BatchScheduler, "update_from_output", AssertionError("a block is missing")),
    ],
    ids=["execute", "sample", "schedule", "update"],
)
def test_sch_12_an_error_inside_a_step_ends_the_engine_and_raises(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch, owner: type, method: str, error: Exception
) -> None:
    """SCH-12, offline: the requests in flight get the error, and so does everybody who comes later."""
    original, calls = getattr(owner, method), []

    def fail_at_third_call(*arguments: object) -> object:
        calls.append(arguments)
        if len(calls) == 3:
            raise error
        return original(*arguments)

    monkeypatch.setattr(owner, method, fail_at_third_call)
    cause = f"{type(error).__name__}: {error}"
    with LLM(tiny_llama_dir, overrides=["kv_cache.num_blocks=16"]) as llm:
        with pytest.raises(EngineDeadError, match=cause):
            llm.generate(["hi", "he", "the"], GREEDY, use_tqdm=False)
        assert not llm.engine.core.has_requests()
        for later in (lambda: llm.generate("hi"), llm.engine.core.step, llm.reset_prefix_cache):
            with pytest.raises(EngineDeadError, match=cause):
                later()
        assert len(calls) == 3
