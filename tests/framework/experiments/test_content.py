"""ContentTokens: equal segments are equal tokens, and nothing else is."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tokenyard.experiments.content import ContentTokens
from tokenyard.interfaces.workload import OUTPUT, Segment

VOCABULARY = np.arange(1000, 9000, 2, dtype=np.int32)
CONTENT = st.integers(0, 2**64 - 1)
SEED = st.integers(0, 2**32 - 1)


@given(seed=SEED, content=CONTENT, lengths=st.tuples(st.integers(1, 40), st.integers(1, 40)))
def test_segments_of_the_same_content_begin_with_the_same_tokens_wherever_they_stand(
    seed: int, content: int, lengths: tuple[int, int]
) -> None:
    tokens = ContentTokens(VOCABULARY, seed)
    alone = tokens.of([Segment(content, lengths[0])])
    behind = ContentTokens(VOCABULARY, seed).of([Segment(3, 5), Segment(content, lengths[1])])[5:]
    shorter = min(lengths)
    assert alone[:shorter].tolist() == behind[:shorter].tolist()
    assert (len(alone), len(behind)) == lengths
    assert set(alone.tolist()) <= set(VOCABULARY.tolist())


@given(seed=SEED, one=CONTENT, other=CONTENT)
def test_different_content_and_different_seeds_are_different_tokens(seed: int, one: int, other: int) -> None:
    tokens = ContentTokens(VOCABULARY, seed)
    found = tokens.of([Segment(one, 30)]).tolist()
    assert found != ContentTokens(VOCABULARY, seed + 1).of([Segment(one, 30)]).tolist()
    assert found != tokens.unknown(one % 1000, 30).tolist()
    if one != other:
        assert found != tokens.of([Segment(other, 30)]).tolist()


def test_prompts_that_nobody_knows_are_all_different_and_the_same_again() -> None:
    tokens = ContentTokens(VOCABULARY, 7)
    prompts = [tuple(tokens.unknown(number, 16).tolist()) for number in range(-3, 200)]
    assert len(set(prompts)) == len(prompts)
    assert prompts == [tuple(ContentTokens(VOCABULARY, 7).unknown(number, 16).tolist()) for number in range(-3, 200)]


def test_the_last_output_segment_is_the_last_answer() -> None:
    tokens = ContentTokens(VOCABULARY, 1)
    content = [Segment(1, 2), Segment(OUTPUT, 3), Segment(2, 2), Segment(OUTPUT, 2)]
    answers = [np.array(answer, dtype=np.int32) for answer in ([9, 9, 9], [1, 2, 3], [4, 5])]
    found = tokens.of(content, answers).tolist()
    assert found[2:5] == [1, 2, 3]
    assert found[7:] == [4, 5]
    assert found[:2] == tokens.of([Segment(1, 2)]).tolist()
    assert found[5:7] == tokens.of([Segment(2, 2)]).tolist()


def test_an_answer_that_is_missing_or_too_short_is_filled_up_and_one_that_is_too_long_is_cut() -> None:
    tokens = ContentTokens(VOCABULARY, 1)
    content = [Segment(OUTPUT, 3), Segment(OUTPUT, 3)]
    found = tokens.of(content, [np.array([1], dtype=np.int32)]).tolist()
    assert found[3] == 1
    assert set(found[:3] + found[4:]) <= set(VOCABULARY.tolist())
    assert tokens.of(content, [np.arange(9, dtype=np.int32)]).tolist()[3:] == [0, 1, 2]
