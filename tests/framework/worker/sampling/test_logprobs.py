"""token_logprobs: log-softmax of raw logits, ranks, ties; always finite."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_reference import Row, logprobs
from sampling_rows import sample
from tokenyard.sampling_params import SamplingParams
from tokenyard.worker.sampler import token_logprobs

V = 12
LOGITS = st.lists(st.integers(-12, 12).map(lambda n: n / 4), min_size=V, max_size=V)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(LOGITS, st.integers(0, V - 1), st.sampled_from([0, 1, 3, V, -1, 99])), min_size=1, max_size=6)
)
def test_e16_values_tokens_and_ranks_are_the_references(rows: list[tuple[list[float], int, int]]) -> None:
    """E16: the token itself, then the k most likely; -1 and more than there are is the whole vocabulary."""
    found = token_logprobs(
        torch.tensor([logits for logits, _, _ in rows]),
        torch.tensor([token for _, token, _ in rows]),
        [count for _, _, count in rows],
    )
    counts = [count if 0 <= count <= V else V for _, _, count in rows]
    assert found.token_ids.shape == found.logprobs.shape == (len(rows), 1 + max(counts))
    assert found.rows.tolist() == list(range(len(rows)))
    for index, (logits, token, _) in enumerate(rows):
        wanted, count = logprobs(logits), counts[index]
        order = sorted(range(V), key=lambda other: (-logits[other], other))
        assert found.token_ids[index].tolist() == [token, *order[:count]] + [-1] * (max(counts) - count)
        shown = [wanted[other] for other in [token, *order[:count]]]
        assert found.logprobs[index, : 1 + count].tolist() == pytest.approx(shown, abs=1e-5)
        assert found.sampled_ranks[index] == 1 + order.index(token)
    assert np.isfinite(found.logprobs).all()


def test_dtypes_are_those_of_the_contract_and_the_logits_stay_as_they_are() -> None:
    logits = torch.tensor([[1.0, -torch.inf, 2.0]])
    before = logits.clone()
    found = token_logprobs(logits, torch.tensor([0]), [2])
    assert torch.equal(logits, before)
    assert [found.rows.dtype, found.token_ids.dtype, found.sampled_ranks.dtype] == [np.int32] * 3
    assert found.logprobs.dtype == np.float32


def test_a_row_is_the_same_alone_and_beside_rows_that_ask_for_more() -> None:
    logits = torch.randn(40, 3000, generator=torch.Generator().manual_seed(0)).mul(4).round().div(4)
    tokens, counts = torch.arange(40) * 70, [[0, 1, 20, 5][row % 4] for row in range(40)]
    together = token_logprobs(logits, tokens, counts)
    for row, count in enumerate(counts):
        alone = token_logprobs(logits[row : row + 1], tokens[row : row + 1], [count])
        assert alone.token_ids[0].tolist() == together.token_ids[row, : 1 + count].tolist()
        assert alone.logprobs[0].tolist() == together.logprobs[row, : 1 + count].tolist()
        assert alone.sampled_ranks[0] == together.sampled_ranks[row]


@pytest.mark.parametrize("bad", [-torch.inf, torch.inf, torch.nan, 3e38, -3e38])
@pytest.mark.parametrize("count", [0, 2, -1])
def test_smp_14_all_are_finite_whatever_the_logits_are(bad: float, count: int) -> None:
    """SMP-14: JSON has no infinity."""
    for logits in ([[bad, 1.0, 2.0]], [[bad] * 3], [[1.0, 0.0, bad]], [[-3e38, bad, 3e38]]):
        found = token_logprobs(torch.tensor(logits), torch.tensor([0]), [count])
        json.dumps(found.logprobs.tolist(), allow_nan=False)
        assert (found.token_ids >= 0).all()


def test_smp_14_they_are_of_the_models_own_logits() -> None:
    """SMP-14, E16: neither limits nor biases nor penalties nor the temperature are in them."""
    logits = [0.0, 1.0, 2.0, 3.0]
    params = SamplingParams(
        logprobs=3, temperature=0.5, top_k=1, logit_bias={3: -100}, repetition_penalty=1.5, allowed_token_ids=[0, 2, 3]
    )
    found = sample([Row(logits=logits, params=params, prompt=[1, 2])])
    assert found.token_ids.tolist() == [2]
    assert found.logprobs is not None
    assert found.logprobs.token_ids.tolist() == [[2, 3, 2, 1]]
    wanted = logprobs(logits)
    assert found.logprobs.logprobs[0].tolist() == pytest.approx([wanted[token] for token in (2, 3, 2, 1)], abs=1e-6)
    assert found.logprobs.sampled_ranks.tolist() == [2]


def test_e16_only_rows_that_ask_have_some() -> None:
    asks = {1: 0, 3: 2, 4: -1}
    params = [SamplingParams(logprobs=asks.get(row), temperature=row % 2) for row in range(6)]
    found = sample([Row(logits=[0.0, 1.0, 2.0], params=one) for one in params])
    assert found.logprobs is not None
    assert found.logprobs.rows.tolist() == [1, 3, 4]
    assert [(row >= 0).sum() for row in found.logprobs.token_ids] == [1, 3, 4]
    assert sample([Row(logits=[0.0, 1.0], params=SamplingParams())]).logprobs is None


def test_smp_14_an_infinite_logit_is_the_most_likely_token() -> None:
    found = token_logprobs(torch.tensor([[0.0, torch.inf, 1.0]]), torch.tensor([1]), [0])
    assert found.sampled_ranks.tolist() == [1]
