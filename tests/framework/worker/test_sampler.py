"""Sampler: greedy, limits, seeds; a row never depends on its batch mates."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tokenyard.sampling_params import SamplingParams
from tokenyard.worker.input_batch import SampledRequest
from tokenyard.worker.sampler import Sampler, SamplingBatch

CPU = torch.device("cpu")
VOCAB = 50


def requests_of(params: list[SamplingParams], stop_token_ids: tuple[int, ...] = ()) -> list[SampledRequest]:
    """Requests with prompts of 5 tokens."""
    return [SampledRequest(f"r{row}", row_params, 5, stop_token_ids) for row, row_params in enumerate(params)]


def sample(
    logits: torch.Tensor,
    params: list[SamplingParams],
    *,
    engine_seed: int = 0,
    position: int = 7,
    stop_token_ids: tuple[int, ...] = (),
) -> list[int]:
    batch = SamplingBatch.of(requests_of(params, stop_token_ids), logits.shape[-1], CPU)
    positions = np.full(len(params), position, dtype=np.int32)
    tokens: list[int] = Sampler(engine_seed, CPU).sample(logits.clone(), batch, positions).tolist()
    return tokens


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def test_greedy_rows_take_the_most_likely_token_beside_random_ones() -> None:
    logits = random_logits(4)
    params = [SamplingParams(temperature=t) for t in (0.0, 1.0, 0.0, 2.0)]
    tokens = sample(logits, params)
    assert [tokens[0], tokens[2]] == [int(logits[0].argmax()), int(logits[2].argmax())]


def test_smp_01_a_seeded_request_is_the_same_alone_and_beside_anyone() -> None:
    logits = random_logits(3)
    seeded = SamplingParams(temperature=0.8, seed=42)
    alone = sample(logits[:1], [seeded])
    for others in ([SamplingParams()], [SamplingParams(seed=1), SamplingParams(temperature=0)], [seeded, seeded]):
        for engine_seed in (0, 1):
            assert sample(logits[: 1 + len(others)], [seeded, *others], engine_seed=engine_seed)[:1] == alone


def test_seeds_and_positions_give_other_draws() -> None:
    logits = torch.zeros(1, VOCAB)
    by_seed = {sample(logits, [SamplingParams(seed=seed)])[0] for seed in range(30)}
    by_position = {sample(logits, [SamplingParams(seed=1)], position=position)[0] for position in range(30)}
    assert len(by_seed) > 10
    assert len(by_position) > 10


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        (SamplingParams(top_k=1), {3}),
        (SamplingParams(top_k=2), {3, 2}),
        (SamplingParams(top_p=0.5), {3}),
        (SamplingParams(top_p=0.8), {3, 2}),
        (SamplingParams(top_p=0.05), {3}),
        (SamplingParams(top_k=3, top_p=0.9), {3, 2, 1}),
        (SamplingParams(top_k=-1), {0, 1, 2, 3}),
        # 0.6 of all tokens, but 0.71 of the two that top-k leaves: top-p comes second.
        (SamplingParams(top_k=2, top_p=0.65), {3}),
    ],
)
def test_limits_keep_exactly_their_tokens(params: SamplingParams, allowed: set[int]) -> None:
    logits = torch.tensor([0.05, 0.1, 0.25, 0.6]).log().repeat(400, 1)
    assert set(sample(logits, [params] * 400)) == allowed


def test_limits_of_one_row_leave_the_others_alone() -> None:
    logits = torch.zeros(200, VOCAB)
    params = [SamplingParams(top_k=1) if row % 2 else SamplingParams() for row in range(200)]
    tokens = sample(logits, params)
    assert len(set(tokens[1::2])) == 1
    assert len(set(tokens[0::2])) > 20


def test_sampled_frequencies_are_the_probabilities() -> None:
    probabilities = torch.tensor([0.1, 0.2, 0.3, 0.4])
    draws = 20000
    tokens = torch.tensor(sample(probabilities.log().repeat(draws, 1), [SamplingParams()] * draws))
    counts = torch.bincount(tokens, minlength=4)
    chi_square = float(((counts - draws * probabilities) ** 2 / (draws * probabilities)).sum())
    assert chi_square < 21.1  # 3 degrees of freedom, p = 1e-4


def test_the_chi_square_test_would_catch_a_wrong_sampler() -> None:
    probabilities = torch.tensor([0.1, 0.2, 0.3, 0.4])
    draws = 20000
    tokens = torch.tensor(sample((probabilities.log() * 0.9).repeat(draws, 1), [SamplingParams()] * draws))
    counts = torch.bincount(tokens, minlength=4)
    assert float(((counts - draws * probabilities) ** 2 / (draws * probabilities)).sum()) > 21.1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_s13_a_stop_token_is_not_sampled_before_min_tokens(temperature: float) -> None:
    """S13: positions 5, 6, 7 get the first three output tokens of a prompt of 5."""
    logits = torch.zeros(1, VOCAB)
    logits[0, 3] = logits[0, 8] = 50.0
    logits[0, 9] = 40.0
    for params, masked_until in ((SamplingParams(temperature=temperature, min_tokens=3), 8), (SamplingParams(), 0)):
        for position in range(5, 11):
            (token,) = sample(logits, [params], position=position, stop_token_ids=(3, 8))
            assert (token == 9) == (position < masked_until)


def test_s13_only_the_rows_that_ask_wait_and_only_for_their_own_stop_tokens() -> None:
    logits = torch.zeros(4, VOCAB)
    logits[:, 3] = 50.0
    waits, not_yet_over, over = (SamplingParams(temperature=0, min_tokens=count) for count in (9, 3, 2))
    batch = SamplingBatch.of(
        [
            SampledRequest("waits", waits, 5, (3,)),
            SampledRequest("other stop ids", waits, 5, (4,)),
            SampledRequest("not yet over", not_yet_over, 5, (3, 3, 999)),
            SampledRequest("over", over, 5, (3,)),
        ],
        VOCAB,
        CPU,
    )
    tokens = Sampler(0, CPU).sample(logits, batch, np.full(4, 7, dtype=np.int32)).tolist()
    assert [token == 3 for token in tokens] == [False, True, False, True]


def test_s13_a_batch_in_which_nobody_asks_has_no_mask() -> None:
    requests = requests_of([SamplingParams(), SamplingParams(stop_token_ids=[3])], stop_token_ids=(2, 3))
    assert SamplingBatch.of(requests, VOCAB, CPU).stop_mask is None
    assert SamplingBatch.of(requests_of([SamplingParams(min_tokens=3)]), VOCAB, CPU).stop_mask is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_d10_a_huge_min_tokens_and_stop_tokens_without_end_are_sampled_at_once(temperature: float) -> None:
    """D10: with every token a stop token there is none to sample instead."""
    params = SamplingParams(temperature=temperature, max_tokens=None, min_tokens=2**200)
    assert sample(torch.zeros(1, VOCAB), [params], stop_token_ids=(*range(VOCAB),))[0] in range(VOCAB)
    assert sample(torch.zeros(1, VOCAB), [params], stop_token_ids=(*range(VOCAB - 1),)) == [VOCAB - 1]
