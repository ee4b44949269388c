"""Rows that have no token to sample: they fail alone, and say why."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from sampling_reference import Row
from sampling_rows import params_of, result_alone, results, sample
from tokenyard.arrays import IntArray
from tokenyard.errors import LogitsProcessorError
from tokenyard.interfaces.logits_processor import RowLogitsProcessor
from tokenyard.sampling_params import SamplingParams

V = 24

NOTHING_LEFT = [
    (
        Row(logits=[0.0] * 3, params=SamplingParams(min_tokens=1), stop_token_ids=[0, 1, 2]),
        "min_tokens with its stop tokens forbids",
    ),
    (Row(logits=[0.0] * 3, params=SamplingParams(), bad_words=[[0], [1], [2]]), "bad_words forbids"),
    (Row(logits=[0.0] * 3, params=SamplingParams(allowed_token_ids=[7])), "allowed_token_ids forbids"),
    (
        Row(
            logits=[0.0] * 3,
            params=SamplingParams(allowed_token_ids=[1], min_tokens=1),
            output=[2],
            stop_token_ids=[0],
            bad_words=[[1]],
        ),
        "allowed_token_ids, bad_words forbid",
    ),
    (
        Row(
            logits=[0.0] * 3,
            params=SamplingParams(allowed_token_ids=[0, 1], min_tokens=2),
            prompt=[1],
            output=[1],
            stop_token_ids=[1],
            bad_words=[[1, 0]],
        ),
        "allowed_token_ids, bad_words, min_tokens with its stop tokens forbid",
    ),
]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("row", "cause"), NOTHING_LEFT, ids=[cause for _, cause in NOTHING_LEFT])
def test_a_row_that_may_sample_nothing_fails_alone_and_says_why(row: Row, cause: str, temperature: float) -> None:
    row = dataclasses.replace(row, params=dataclasses.replace(row.params, temperature=temperature, logprobs=1))
    fine = Row(logits=[0.0, 1.0, 2.0], params=SamplingParams(logprobs=1), prompt=[1])
    found = sample([fine, row, fine])
    assert list(found.errors) == [1]
    assert found.errors[1] == f"no token is left to sample: {cause} every one"
    assert found.token_ids[1] == 0
    assert found.logprobs is not None
    assert found.logprobs.rows.tolist() == [0, 2]
    assert results(found, 3)[2] == result_alone(fine, "r2")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_d10_a_huge_min_tokens_waits_no_longer_than_there_are_other_tokens(temperature: float) -> None:
    """D10: where all tokens are stop tokens the request fails at once, and the step goes on."""
    params = SamplingParams(temperature=temperature, max_tokens=None, min_tokens=2**63 - 1)
    all_but_one = Row(logits=[0.0] * V, params=params, stop_token_ids=range(V - 1))
    found = sample([dataclasses.replace(all_but_one, stop_token_ids=range(V)), all_but_one])
    assert list(found.errors) == [0]
    assert found.token_ids[1] == V - 1


def raises(logits: torch.Tensor, output: IntArray) -> None:
    logits.fill_(torch.nan)
    raise KeyError("no such state")


def raises_ours(logits: torch.Tensor, output: IntArray) -> None:
    raise LogitsProcessorError("logits processor 'x' failed for request 'r'")


def forbids_all(logits: torch.Tensor, output: IntArray) -> None:
    logits.fill_(-torch.inf)


def makes_nan(logits: torch.Tensor, output: IntArray) -> None:
    logits[1] = torch.nan


def makes_infinite(logits: torch.Tensor, output: IntArray) -> None:
    logits[1] = torch.inf


FAILING: list[tuple[RowLogitsProcessor, str]] = [
    (raises, "its logits processor failed: KeyError: 'no such state'"),
    (raises_ours, "logits processor 'x' failed for request 'r'"),
    (forbids_all, "no token is left to sample: a logits processor forbids every one"),
    (makes_nan, "its logits processor left logits that are not finite numbers"),
    (makes_infinite, "its logits processor left logits that are not finite numbers"),
]


@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"top_p": 0.9}, {"top_k": 2, "presence_penalty": 1.0}])
@pytest.mark.parametrize(("processor", "why"), FAILING, ids=["raises", "raises ours", "forbids all", "NaN", "infinite"])
def test_a_logits_processor_that_fails_ends_its_row_alone(
    processor: RowLogitsProcessor, why: str, params: dict[str, float]
) -> None:
    """2.3 #5, one among 64: the other 63 have the tokens that they have without it."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(64, V, generator=generator).tolist()
    rows = [Row(logits=row, params=params_of({"logprobs": 1, **params}), prompt=[1], output=[2]) for row in logits]
    without = results(sample(rows), 64)
    found = sample(rows, processors=[processor if row == 9 else None for row in range(64)])
    assert found.errors == {9: why}
    assert results(found, 64)[9] == (0, None, why)
    without[9] = results(found, 64)[9]
    assert results(found, 64) == without
