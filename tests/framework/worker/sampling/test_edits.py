"""Masks, biases and penalties: exactly the listed tokens, exactly the documented numbers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_reference import Row, edited_logits
from sampling_rows import edited, greedy, params_of, sample
from tokenyard.sampling_params import SamplingParams

V = 12
TOKEN = st.integers(0, V - 1)
TOKENS = st.lists(TOKEN, max_size=12)
LOGIT = st.floats(-50, 50, width=32) | st.sampled_from([0.0, -0.0, 3e38, -3e38])


@st.composite
def rows(draw: st.DrawFn) -> Row:
    """A row that may ask for anything; something is left to sample."""
    penalty = st.just(0.0) | st.floats(-2, 2)
    never_stop = st.integers(1, V - 1)  # token 0 is left
    params = SamplingParams(
        repetition_penalty=draw(st.just(1.0) | st.floats(1e-4, 1e4)),
        presence_penalty=draw(penalty),
        frequency_penalty=draw(penalty),
        logit_bias=draw(st.none() | st.dictionaries(TOKEN, st.floats(-100, 100), max_size=4)),
        allowed_token_ids=draw(st.none() | st.lists(TOKEN, max_size=5).map(lambda ids: [0, *ids])),
        min_tokens=draw(st.integers(0, 8)),
    )
    return Row(
        logits=draw(st.lists(LOGIT, min_size=V, max_size=V)),
        params=params,
        prompt=draw(TOKENS),
        output=draw(TOKENS),
        stop_token_ids=draw(st.lists(never_stop, max_size=3)),
        bad_words=draw(st.lists(st.tuples(TOKENS, never_stop).map(lambda word: [*word[0][:2], word[1]]), max_size=4)),
    )


@settings(max_examples=200, deadline=None)
@given(st.lists(rows(), min_size=1, max_size=5))
def test_logits_are_edited_as_documented_bit_for_bit(batch: list[Row]) -> None:
    assert edited(batch) == [edited_logits(row) for row in batch]


def test_smp_04_the_first_step_is_penalised_for_the_prompt_by_repetition_only() -> None:
    """SMP-04: positive logits are divided, negative ones multiplied; presence and frequency look at the output."""
    logits = [2.0, -2.0, 1.0, 0.5, -0.5]
    rows = [
        Row(logits=logits, params=greedy(repetition_penalty=2.0), prompt=[0, 1, 1]),
        Row(logits=logits, params=greedy(presence_penalty=2.0), prompt=[0, 1, 1]),
        Row(logits=logits, params=greedy(frequency_penalty=2.0), prompt=[0, 1, 1]),
    ]
    assert edited(rows) == [[1.0, -4.0, 1.0, 0.5, -0.5], logits, logits]


def test_smp_04_later_steps_are_penalised_once_or_by_count() -> None:
    """SMP-04: the output is 2, 2, 3; the prompt does not count for presence and frequency."""
    logits = [2.0, -2.0, 1.0, 0.5, -0.5]
    prompt, output = [0, 1, 1], [2, 2, 3]
    rows = [
        Row(logits=logits, params=greedy(repetition_penalty=2.0), prompt=prompt, output=output),
        Row(logits=logits, params=greedy(presence_penalty=2.0), prompt=prompt, output=output),
        Row(logits=logits, params=greedy(frequency_penalty=0.5), prompt=prompt, output=output),
        Row(logits=logits, params=greedy(presence_penalty=-1, frequency_penalty=1.5), prompt=prompt, output=output),
    ]
    assert edited(rows) == [
        [1.0, -4.0, 0.5, 0.25, -0.5],
        [2.0, -2.0, -1.0, -1.5, -0.5],
        [2.0, -2.0, 0.0, 0.0, -0.5],
        [2.0, -2.0, -1.0, 0.0, -0.5],
    ]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_e13_equal_logits_are_put_in_order_by_what_occurred(name: str, sign: int) -> None:
    """E13: the penalised end of the order is a token of the output; with frequency it is the most frequent."""
    params = params_of({name: sign * 1.5})
    (logits,) = edited([Row(logits=[1.0] * V, params=params, prompt=[9, 9, 9, 9], output=[4, 7, 4, 4, 2])])
    end = [token for token, logit in enumerate(logits) if logit == (min(logits) if sign > 0 else max(logits))]
    assert end == ([2, 4, 7] if name == "presence_penalty" else [4])


def test_e13_repetition_looks_at_prompt_and_output() -> None:
    params = SamplingParams(repetition_penalty=2.0)
    (logits,) = edited([Row(logits=[1.0] * V, params=params, prompt=[9, 9], output=[4])])
    assert [token for token, logit in enumerate(logits) if logit == 0.5] == [4, 9]


def test_prompt_tokens_that_the_model_cannot_sample_are_not_penalised() -> None:
    params = SamplingParams(repetition_penalty=2.0, frequency_penalty=1.0)
    assert edited([Row(logits=[1.0] * V, params=params, prompt=[V + 5, 3])]) == [[1.0] * 3 + [0.5] + [1.0] * 8]


@pytest.mark.parametrize("penalty", [1e-4, 1e4])
def test_d8_no_penalty_makes_a_logit_infinite(penalty: float) -> None:
    logits = [3e38, -3e38, 3e38, -3e38]
    params = SamplingParams(repetition_penalty=penalty, presence_penalty=2, frequency_penalty=-2)
    (found,) = edited([Row(logits=logits, params=params, prompt=[0, 1], output=[2, 3])])
    assert all(map(math.isfinite, found))


def test_e14_allowed_token_ids_leave_exactly_these() -> None:
    (logits,) = edited([Row(logits=[1.0] * V, params=SamplingParams(allowed_token_ids=[3, 11, 3]))])
    assert [token for token, logit in enumerate(logits) if logit > -math.inf] == [3, 11]


@pytest.mark.parametrize(
    ("output", "banned"),
    [
        ([], [5]),
        ([1], [5, 2]),
        ([1, 2], [5, 3]),
        ([9, 1, 2], [5, 3]),
        ([2], [5]),
        ([1, 2, 9], [5]),
        ([7], [5, 7]),
        ([7, 7], [5, 7, 8]),
        ([7, 1], [5, 2, 4]),
    ],
)
def test_e14_bad_words_ban_the_last_token_of_what_the_output_would_complete(
    output: list[int], banned: list[int]
) -> None:
    """E14: the words are 5, 1 2, 1 2 3, 7 7, 7 7 8 and 7 1 4; what the prompt ends with begins none of them."""
    words = [[5], [1, 2], [1, 2, 3], [7, 7], [7, 7, 8], [7, 1, 4]]
    row = Row(logits=[1.0] * V, params=SamplingParams(), prompt=[6, 1], output=output, bad_words=words)
    (logits,) = edited([row])
    assert {token for token, logit in enumerate(logits) if logit == -math.inf} == set(banned)


def test_e14_bad_words_look_at_the_output_alone() -> None:
    row = Row(logits=[1.0] * V, params=SamplingParams(), prompt=[1, 2], output=[3], bad_words=[[2, 3, 4], [3, 4, 5]])
    assert edited([row]) == [[1.0] * V]


def test_smp_05_ids_outside_of_the_vocabulary_touch_no_token() -> None:
    """SMP-05: front ends refuse them; the engine, should it get them, must not wrap around or stop."""
    outside = [V, 10**6, 2**31 - 1]
    params = SamplingParams(
        logit_bias=dict.fromkeys(outside, 5.0), allowed_token_ids=[*range(V), *outside], min_tokens=3
    )
    stops = [-1, -V, *outside]
    words = [[-1], [V], [0, V], [0, -2], [V, 0], []]
    row = Row(logits=[1.0] * V, params=params, prompt=[1], output=[0], stop_token_ids=stops, bad_words=words)
    assert edited([row, Row(logits=[2.0] * V, params=SamplingParams())]) == [[1.0] * V, [2.0] * V]


def test_smp_05_a_bias_of_100_decides_and_of_minus_100_forbids() -> None:
    logits = [5.0, 4.0, 3.0]
    rows = [Row(logits=logits, params=greedy(logit_bias={token: bias})) for token, bias in ((2, 100.0), (0, -100.0))]
    assert sample(rows).token_ids.tolist() == [2, 1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_smp_08_no_eos_and_no_stop_token_before_min_tokens(temperature: float) -> None:
    """SMP-08, S13: 3 and 8 are EOS ids, 9 is the user's; all that ends the output waits, and only so long."""
    logits = [0.0] * V
    logits[3] = logits[8] = logits[9] = 60.0
    logits[4] = 40.0
    for min_tokens, num_output in ((5, 0), (5, 4), (5, 5), (5, 6), (0, 0)):
        params = SamplingParams(temperature=temperature, max_tokens=10, min_tokens=min_tokens)
        row = Row(
            logits=logits, params=params, prompt=[1, 3], output=[2] * num_output, stop_token_ids=[3, 8, 9, 9, 999]
        )
        (token,) = sample([row]).token_ids.tolist()
        assert (token == 4) == (num_output < min_tokens)


def test_s13_only_the_rows_that_ask_wait_and_only_for_their_own_stop_tokens() -> None:
    logits = [0.0] * V
    logits[3] = 50.0
    waits, not_yet_over, over = (greedy(min_tokens=count) for count in (9, 3, 2))
    rows = [
        Row(logits=logits, params=params, prompt=[1] * 5, output=[1, 1], stop_token_ids=stops)
        for params, stops in ((waits, [3]), (waits, [4]), (not_yet_over, [3]), (over, [3]), (greedy(), [3]))
    ]
    assert [token == 3 for token in sample(rows).token_ids] == [False, True, False, True, True]
