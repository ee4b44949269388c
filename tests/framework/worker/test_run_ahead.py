"""ModelRunner on a device that works behind it: nothing is read before it is there, and nothing changes by that."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from late_device import CPU, LateCalls
from runner_steps import GREEDY, Steps
from tokenyard.arrays import IntArray
from tokenyard.interfaces import RowLogitsProcessor
from tokenyard.sampling_params import SamplingParams
from tokenyard.scheduler_output import RequestStart
from tokenyard.worker.last_tokens import LastTokens
from tokenyard.worker.sampler import NOT_FINITE
from tokenyard.worker.stream import QueuedStream
from window_models import prompt_of

PROMPTS = [prompt_of(length, seed=length) for length in (5, 9, 3, 14)]
DRAWN = SamplingParams(temperature=1.0, seed=1, top_k=20, min_p=0.01)


def late(folder: Path, calls: LateCalls, **options: int) -> Steps:
    return Steps(folder, stream=QueuedStream(CPU, calls), **options)  # type: ignore[arg-type]


def decode(count: int) -> dict[int, int]:
    return dict.fromkeys(range(count), 1)


def prefill(steps: Steps, prompts: list[list[int]], params: list[SamplingParams]) -> dict[int, int]:
    return {steps.add(prompt, one): len(prompt) for prompt, one in zip(prompts, params, strict=True)}


def test_the_next_steps_are_launched_before_any_token_has_reached_the_host(tiny_llama_dir: Path) -> None:
    expected = Steps(tiny_llama_dir).run(PROMPTS, 3, params=[GREEDY, DRAWN, GREEDY, DRAWN])
    calls = LateCalls()
    steps = late(tiny_llama_dir, calls)
    results = [steps.step(prefill(steps, PROMPTS, [GREEDY, DRAWN, GREEDY, DRAWN])), steps.step(decode(4))]
    assert calls.log == ["up", "down"] * 2  # one copy each way a step, and nobody waited
    assert not any(result.is_done() for result in results)
    assert results[0].result().token_ids.tolist() == [tokens[0] for tokens in expected]
    assert calls.log == ["up", "down"] * 2 + ["wait"]
    results.append(steps.step(decode(4)))  # the tokens of the step in front of it are on the device
    assert calls.log == ["up", "down"] * 2 + ["wait", "up", "down"]
    found = np.stack([result.result().token_ids for result in results], axis=1)
    assert found.tolist() == expected


def forbid_even(start: RequestStart) -> RowLogitsProcessor | None:
    def forbid(logits: torch.Tensor, output: IntArray) -> None:
        logits[len(output) % 2 :: 2] = -torch.inf

    assert isinstance(start.params, SamplingParams)
    return forbid if start.params.extra_args else None


PARAMS = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 1.0]), "seed": st.integers(0, 99)},
    optional={
        "top_p": st.just(0.7),
        "top_k": st.just(5),
        "repetition_penalty": st.just(1.4),
        "frequency_penalty": st.just(0.7),
        "logit_bias": st.just({7: 3.0}),
        "allowed_token_ids": st.just([3, 4, 5, 6]),
        "logprobs": st.just(2),
        "extra_args": st.just({"odd": True}),
    },
)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(PARAMS, min_size=1, max_size=4), st.integers(1, 4), st.integers(2, 20), st.sampled_from([0, 2, 12]))
def test_tokens_do_not_depend_on_how_many_steps_are_in_flight(
    tiny_llama_dir: Path, params: list[dict[str, object]], depth: int, chunk: int, num_slots: int
) -> None:
    """Nor on how many slots have room on the device."""
    asked = [SamplingParams(**one) for one in params]  # type: ignore[arg-type]
    prompts = PROMPTS[: len(asked)]
    plain = Steps(tiny_llama_dir, processors=forbid_even)
    stream = QueuedStream(CPU, LateCalls())
    steps = Steps(tiny_llama_dir, stream=stream, num_slots=num_slots, processors=forbid_even)
    expected = plain.run(prompts, 5, params=asked)
    assert steps.run(prompts, 5, params=asked, depth=depth, chunk=chunk) == expected


@pytest.mark.parametrize(
    ("params", "waits"),
    [
        (SamplingParams(temperature=0, repetition_penalty=1.3), True),
        (SamplingParams(temperature=0, presence_penalty=1.0), True),
        (SamplingParams(temperature=0, logit_bias={5: 1.0}), False),
        (SamplingParams(temperature=0, min_tokens=9, stop_token_ids=[4]), False),
        (SamplingParams(temperature=0, allowed_token_ids=[3, 4, 5]), False),
    ],
    ids=["repetition", "presence", "bias", "min_tokens", "allowed"],
)
def test_only_what_reads_tokens_waits_for_them_and_only_when_it_samples(
    tiny_llama_dir: Path, params: SamplingParams, waits: bool
) -> None:
    calls = LateCalls()
    steps = late(tiny_llama_dir, calls)
    steps.step(prefill(steps, PROMPTS[:2], [params, GREEDY]))
    steps.execute(decode(2))
    assert "wait" not in calls.log
    steps.runner.sample()
    assert ("wait" in calls.log) is waits


def test_logprobs_are_there_when_sample_returns(tiny_llama_dir: Path) -> None:
    calls = LateCalls()
    asks = SamplingParams(temperature=0, logprobs=3, prompt_logprobs=1)
    steps, plain = late(tiny_llama_dir, calls), Steps(tiny_llama_dir)
    results = [one.step(prefill(one, PROMPTS[:2], [asks, GREEDY]), [True, False]) for one in (steps, plain)]
    assert results[0].is_done()
    found, expected = (result.result() for result in results)
    assert found.logprobs is not None
    assert expected.logprobs is not None
    np.testing.assert_array_equal(found.logprobs.token_ids, expected.logprobs.token_ids)
    np.testing.assert_array_equal(
        found.prompt_logprobs[0].logprobs.logprobs, expected.prompt_logprobs[0].logprobs.logprobs
    )


@pytest.mark.parametrize("lands", [True, False], ids=["told in time", "found out late"])
def test_a_row_without_finite_logits_ends_alone_also_when_its_next_step_was_launched(
    tiny_llama_dir: Path, lands: bool
) -> None:
    expected = Steps(tiny_llama_dir).run(PROMPTS[:2], 4)[1]
    steps = late(tiny_llama_dir, LateCalls())
    results = [steps.step(prefill(steps, PROMPTS[:2], [GREEDY] * 2))]
    for cache in steps.caches[0]:
        cache[int(steps.blocks_of(0, 0)[0])] = torch.inf
    for _ in range(3):
        results.append(steps.step(decode(2)))
        if lands:
            assert results[-1].result().errors == {"r0": NOT_FINITE}
    outputs = [result.result() for result in results]
    assert not outputs[0].errors
    for output in outputs[1:]:
        assert output.errors == {"r0": NOT_FINITE}
        assert output.num_sampled.tolist() == [0, 1]
    assert [output.token_ids[-1] for output in outputs] == expected


def test_a_result_may_be_asked_for_by_several_threads_at_once(tiny_llama_dir: Path) -> None:
    calls = LateCalls()
    steps = late(tiny_llama_dir, calls)
    result = steps.step(prefill(steps, PROMPTS, [GREEDY] * 4))
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(result.result())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(output) for output in found}) == 1
    assert calls.log.count("wait") == 1
    assert result.ready_at is None


def test_a_step_in_which_no_row_samples_has_no_tokens_and_waits_for_nothing(tiny_llama_dir: Path) -> None:
    calls = LateCalls()
    steps = late(tiny_llama_dir, calls)
    steps.add(PROMPTS[3])
    result = steps.step({0: 4})
    assert result.is_done()
    assert result.result().num_sampled.tolist() == [0]
    assert calls.log == ["up"]


def test_tokens_of_slots_are_filled_in_where_their_stand_ins_are() -> None:
    tokens = LastTokens(4, CPU)
    tokens.store(torch.tensor([3, 0]), torch.tensor([70, 71]))
    ids = torch.tensor([5, *LastTokens.stand_ins(np.array([0, 3, 1])).tolist(), 0])
    assert tokens.fill(ids).tolist() == [5, 71, 70, 0, 0]
    assert tokens.has(np.array([0, 3]))
    assert tokens.has(np.array([], dtype=np.int64))
    assert not tokens.has(np.array([4, 0]))


def test_on_a_cpu_the_result_is_there_at_once(tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise AssertionError("the tokens were taken from the device")

    monkeypatch.setattr(LastTokens, "fill", fail)
    monkeypatch.setattr(LastTokens, "store", fail)
    steps = Steps(tiny_llama_dir)
    steps.step(prefill(steps, PROMPTS, [GREEDY] * 4))
    assert steps.step(decode(4)).is_done()


Model = Callable[[str], Path]


@pytest.mark.parametrize("family", ["mistral", "gpt_oss"])
def test_models_of_transformers_run_ahead_too(family: str, window_model: Model) -> None:
    folder = window_model(family)
    expected = Steps(folder).run(PROMPTS, 12)
    assert late(folder, LateCalls()).run(PROMPTS, 12, depth=2) == expected
