"""Prompt logprobs from hidden states: which rows have which numbers, and how many logits there are at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenyard.sampling_params import SamplingParams
from tokenyard.worker import prompt_logprobs as module
from tokenyard.worker.input_batch import PromptRows, SampledRequest
from tokenyard.worker.prompt_logprobs import prompt_logprobs

VOCAB, HIDDEN = 20, 6
HEAD = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1))


def asked(*wanted: tuple[int, int]) -> list[PromptRows]:
    """Rows of (tokens, prompt_logprobs); the tokens count on from row to row."""
    rows = []
    for row, (count, num_top) in enumerate(wanted):
        first = sum(count for count, _ in wanted[:row])
        request = SampledRequest(f"r{row}", SamplingParams(prompt_logprobs=num_top), 99, ())
        token_ids = (np.arange(first, first + count) % VOCAB).astype(np.int32)
        rows.append(PromptRows(2 * row, request, 1 + row, token_ids))
    return rows


def to_logits(states: torch.Tensor) -> torch.Tensor:
    return states @ HEAD.T


def states_of(rows: list[PromptRows]) -> torch.Tensor:
    count = sum(len(one.token_ids) for one in rows)
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(2))


@settings(max_examples=60, deadline=None)
@given(
    wanted=st.lists(st.tuples(st.integers(1, 9), st.sampled_from([0, 1, 3, VOCAB, -1])), min_size=1, max_size=5),
    num_at_once=st.integers(1, 12),
)
def test_each_row_gets_the_numbers_of_its_own_tokens_however_the_slices_fall(
    wanted: list[tuple[int, int]], num_at_once: int
) -> None:
    rows = asked(*wanted)
    states = states_of(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SLICE_BYTES", 4 * VOCAB * num_at_once)
        chunks, failed = prompt_logprobs(rows, states, to_logits, VOCAB)
    assert failed == []
    assert [(chunk.request_id, chunk.start) for chunk in chunks] == [(f"r{row}", 1 + row) for row in range(len(wanted))]
    offset = 0
    for chunk, one, (count, num_top) in zip(chunks, rows, wanted, strict=True):
        found = chunk.logprobs
        expected = to_logits(states[offset : offset + count]).log_softmax(-1).numpy()
        offset += count
        assert found.token_ids.shape == found.logprobs.shape == (count, 1 + (VOCAB if num_top < 0 else num_top))
        assert found.rows.tolist() == list(range(count))
        assert found.token_ids[:, 0].tolist() == one.token_ids.tolist()
        own = np.take_along_axis(expected, found.token_ids.astype(np.int64), axis=1)
        assert np.allclose(found.logprobs, own, rtol=0, atol=1e-5)
        assert np.array_equal(found.sampled_ranks, 1 + (expected > expected[range(count), one.token_ids, None]).sum(1))


def recorder(sizes: list[int]) -> Callable[[torch.Tensor], torch.Tensor]:
    def record(states: torch.Tensor) -> torch.Tensor:
        sizes.append(len(states))
        return torch.zeros(len(states), 49152)

    return record


def test_logits_of_a_long_prompt_exist_for_a_slice_at_a_time() -> None:
    """2,000 tokens of a vocabulary of 49,152 would be 390 MB."""
    rows, sizes = asked((2000, 1)), list[int]()
    prompt_logprobs(rows, torch.zeros(2000, HIDDEN), recorder(sizes), 49152)
    assert sum(sizes) == 2000
    assert max(sizes) * 49152 * 4 <= 24 << 20
    assert len(sizes) < 20  # nor a token at a time


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 3, 4, 6])
def test_a_row_whose_logits_are_not_finite_has_none_and_the_others_do(
    place: int, wrong: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SLICE_BYTES", 4 * VOCAB * 2)
    rows = asked((4, 1), (3, 0), (2, 2))
    states = states_of(rows)

    def damaged(part: torch.Tensor) -> torch.Tensor:
        logits = to_logits(part)
        logits[(part == states[place]).all(-1), 7] = wrong
        return logits

    chunks, failed = prompt_logprobs(rows, states, damaged, VOCAB)
    bad = 0 if place < 4 else 1
    assert failed == [2 * bad]  # rows of the step
    assert [chunk.request_id for chunk in chunks] == [f"r{row}" for row in range(3) if row != bad]
    good, _ = prompt_logprobs(rows, states, to_logits, VOCAB)
    for chunk in chunks:
        twin = next(one for one in good if one.request_id == chunk.request_id)
        assert np.array_equal(chunk.logprobs.logprobs, twin.logprobs.logprobs)
