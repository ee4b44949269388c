"""Several ranks sample as one: the leader chooses, and all go on with its tokens, whatever rows fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from late_device import CPU, LateCalls
from runner_steps import GREEDY, Steps
from safetensors.torch import load_file, save_file
from thread_ranks import run_ranks
from tokenyard.arrays import IntArray
from tokenyard.errors import LogitsProcessorError
from tokenyard.interfaces import RowLogitsProcessor
from tokenyard.model.ranks import RankGroup
from tokenyard.runner_output import ModelRunnerOutput
from tokenyard.sampling_params import SamplingParams
from tokenyard.scheduler_output import RequestStart
from tokenyard.worker import prompt_logprobs
from tokenyard.worker.stream import QueuedStream
from window_models import prompt_of

PROMPTS = [prompt_of(length, seed=length) for length in (5, 9, 3, 14)]
DRAWN = SamplingParams(temperature=1.0, seed=1, top_k=20, min_p=0.01)
PENALISED = SamplingParams(temperature=0, repetition_penalty=1.3, presence_penalty=0.5)
TOLD = SamplingParams(temperature=0, logprobs=3)
ALL_PARAMS = [GREEDY, DRAWN, PENALISED, TOLD]


@pytest.mark.parametrize("is_late", [False, True], ids=["on the host", "on a device that works behind it"])
@pytest.mark.parametrize("depth", [1, 2])
def test_two_ranks_sample_the_tokens_of_one(tiny_llama_dir: Path, depth: int, is_late: bool) -> None:
    expected = Steps(tiny_llama_dir).run(PROMPTS, 6, params=ALL_PARAMS)

    def work(ranks: RankGroup) -> list[list[int]]:
        stream = QueuedStream(CPU, LateCalls()) if is_late else None
        return Steps(tiny_llama_dir, stream=stream, ranks=ranks).run(
            PROMPTS, 6, params=ALL_PARAMS, depth=depth, chunk=4
        )

    leaders, others = run_ranks(2, work)
    assert leaders == expected
    assert others == [[], [], [], []]


def test_with_more_slots_than_a_device_keeps_tokens_for_they_come_over_the_host(tiny_llama_dir: Path) -> None:
    expected = Steps(tiny_llama_dir).run(PROMPTS, 4)

    def work(ranks: RankGroup) -> list[list[int]]:
        steps = Steps(tiny_llama_dir, stream=QueuedStream(CPU, LateCalls()), ranks=ranks, num_slots=2)
        return steps.run(PROMPTS, 4, depth=2)

    assert run_ranks(2, work)[0] == expected


def test_only_the_leader_tells_logprobs_and_they_are_those_of_one_rank(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slice of the prompt's logits at a time, in every rank the same slices."""
    monkeypatch.setattr(prompt_logprobs, "SLICE_BYTES", 4 * 272 * 2)
    params = SamplingParams(temperature=0, logprobs=2, prompt_logprobs=2)

    def result_of(steps: Steps) -> ModelRunnerOutput:
        counts = {steps.add(prompt, params): len(prompt) for prompt in PROMPTS[:2]}
        return steps.step(counts, wants=[True, True]).result()

    expected = result_of(Steps(tiny_llama_dir))
    leader, other = run_ranks(2, lambda ranks: result_of(Steps(tiny_llama_dir, ranks=ranks)))
    assert (len(other.token_ids), other.logprobs, other.prompt_logprobs) == (0, None, ())
    for found, wanted in zip(leader.prompt_logprobs, expected.prompt_logprobs, strict=True):
        assert found.logprobs.token_ids.tolist() == wanted.logprobs.token_ids.tolist()
        np.testing.assert_allclose(found.logprobs.logprobs, wanted.logprobs.logprobs, atol=1e-4)
    assert leader.logprobs is not None
    assert expected.logprobs is not None
    np.testing.assert_allclose(leader.logprobs.logprobs, expected.logprobs.logprobs, atol=1e-4)


@pytest.fixture
def broken_token(make_llama: Callable[..., Path]) -> tuple[Path, int]:
    """A model, and a token after which its logits are not finite."""
    folder, token = make_llama(), 200
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][token] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder, token


@pytest.mark.parametrize("wants", [[False] * 3, [True] * 3, [False, True, False]])
def test_rows_that_fail_end_alone_and_the_ranks_stay_in_step(broken_token: tuple[Path, int], wants: list[bool]) -> None:
    """Of a row that failed in its prompt the leader samples nothing: the others must not wait for its token."""
    folder, token = broken_token
    prompts = [[5, 6, 7], [5, token, 7], [8, 9, 10, 11]]

    def work(ranks: RankGroup, *, only: tuple[int, ...] = (0, 1, 2)) -> tuple[list[ModelRunnerOutput], list[int]]:
        steps = Steps(folder, ranks=ranks)
        params = [SamplingParams(temperature=0, prompt_logprobs=1 if want else None) for want in wants]
        numbers = [steps.add(prompts[index], params[index]) for index in only]
        counts = {number: len(prompts[index]) for number, index in zip(numbers, only, strict=True)}
        found = [steps.step(counts, wants=[wants[index] for index in only]).result()]
        good = {number: 1 for number, index in zip(numbers, only, strict=True) if index != 1}
        if good:
            found += [steps.step(good).result() for _ in range(3)]
        return found, numbers

    (first, *rest), _ = run_ranks(2, work)[0]
    assert set(first.errors) == {"r1"}
    assert first.num_sampled.tolist() == [1, 0, 1]
    alone, _ = run_ranks(2, lambda ranks: work(ranks, only=(0, 2)))[0]
    assert [result.token_ids.tolist() for result in [first, *rest]] == [result.token_ids.tolist() for result in alone]
    (nobody,), _ = run_ranks(2, lambda ranks: work(ranks, only=(1,)))[0]
    assert nobody.num_sampled.tolist() == [0]


def test_logits_processors_run_once_and_a_failing_one_ends_its_row_alone(tiny_llama_dir: Path) -> None:
    calls: list[int] = []

    def processor(start: RequestStart) -> RowLogitsProcessor | None:
        def run(logits: torch.Tensor, output: IntArray) -> None:
            calls.append(len(output))
            if start.request_id == "r1" and len(output) == 1:
                raise LogitsProcessorError("as planned")

        return run

    def work(ranks: RankGroup) -> list[ModelRunnerOutput]:
        steps = Steps(tiny_llama_dir, ranks=ranks, processors=processor)
        counts = {steps.add(prompt): len(prompt) for prompt in PROMPTS[:3]}
        found = [steps.step(counts).result()]
        return [*found, *(steps.step(dict.fromkeys(range(3), 1)).result() for _ in range(2))]

    expected = Steps(tiny_llama_dir).run(PROMPTS[:3], 3)
    results = run_ranks(2, work)[0]
    assert [list(result.errors) for result in results] == [[], ["r1"], []]
    assert results[1].num_sampled.tolist() == [1, 0, 1]
    assert [tokens[1] for index, tokens in enumerate(expected) if index != 1] == results[1].token_ids.tolist()
    assert len(calls) == 9  # three rows in three steps, by the leader alone
