"""SamplingParams: ranges, normalisation, and refusal of what is not there yet."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from tokenyard import SamplingParams
from tokenyard.errors import UnsupportedError, ValidationError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("temperature", 2.5),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_p", math.nan),
        ("min_p", 1.5),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_k", True),
        ("seed", -5),
        ("seed", 2**63),
        ("seed", 1.0),
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("max_tokens", 2.0),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("min_tokens", 2**31),
        ("min_tokens", 2.0),
        ("min_tokens", True),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", [1, True]),
        ("stop_token_ids", [1.0]),
        ("stop_token_ids", "12"),
        ("stop_token_ids", b"12"),
        ("stop_token_ids", 3),
        ("stop", ""),
        ("stop", [""]),
        ("stop", ["", "\n"]),
        ("stop", [3]),
        ("stop", 3),
        ("ignore_eos", "yes"),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_name_and_value(name: str, value: object) -> None:
    with pytest.raises(ValidationError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.parameter == name
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("presence_penalty", 1.0),
        ("frequency_penalty", 1.0),
        ("repetition_penalty", 1.1),
        ("min_p", 0.1),
        ("flat_logprobs", True),
        ("thinking_token_budget", 5),
        ("repetition_detection", {}),
        ("logprobs", 1),
        ("prompt_logprobs", 1),
        ("logit_bias", {1: 1.0}),
        ("bad_words", ["x"]),
        ("allowed_token_ids", [1]),
        ("structured_outputs", {"json": "{}"}),
        ("include_stop_str_in_output", True),
    ],
)
def test_what_is_not_there_yet_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(UnsupportedError, match=name):
        SamplingParams(**{name: value})
    default = next(field.default for field in dataclasses.fields(SamplingParams) if field.name == name)
    SamplingParams(**{name: default})


def test_smp_12_temperature_zero_is_plain_argmax_whatever_the_limits() -> None:
    for params in (
        SamplingParams(temperature=0, top_p=0.1, top_k=5, min_p=0.5),
        SamplingParams(temperature=1e-6),
        SamplingParams(temperature=0, seed=3),
    ):
        assert params.is_greedy
        assert (params.temperature, params.top_p, params.top_k) == (0.0, 1.0, 0)


def test_tiny_temperatures_are_raised_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert SamplingParams(temperature=0.001).temperature == 0.01
    assert "raised" in caplog.text


def test_txt_05_stop_takes_a_string_or_a_list() -> None:
    assert SamplingParams(stop="x").stop_strings == ("x",)
    assert SamplingParams(stop=["x", "yz"]).stop_strings == ("x", "yz")
    assert SamplingParams(stop=[]).stop_strings == SamplingParams(stop=None).stop_strings == ()
    assert len(SamplingParams(stop=list("abcde")).stop_strings) == 5  # no limit offline


def test_empty_lists_ask_for_nothing_and_true_is_no_number() -> None:
    SamplingParams(stop_token_ids=[], bad_words=[], logit_bias={}, repetition_penalty=1)
    for name, value in (("n", True), ("detokenize", 1), ("allowed_token_ids", [])):
        with pytest.raises(UnsupportedError, match=name):
            SamplingParams(**{name: value})  # type: ignore[arg-type]


def test_arrays_and_huge_values_are_refused_in_a_short_line() -> None:
    for name, value in (
        ("stop_token_ids", np.array([1, 2])),
        ("stop_token_ids", [*range(9999), -1]),
        ("n", np.array([1])),
        ("bad_words", ["word"] * 9999),
    ):
        with pytest.raises(ValidationError, match=name) as caught:
            SamplingParams(**{name: value})  # type: ignore[arg-type]
        assert len(str(caught.value)) < 400
    with pytest.raises(ValidationError):
        SamplingParams(temperature=10**400)


def test_stop_token_ids_are_de_duplicated_in_order() -> None:
    assert SamplingParams(stop_token_ids=[5, 3, 5, 9, 3]).stop_token_ids == (5, 3, 9)
    assert SamplingParams(stop_token_ids=[]).stop_token_ids == SamplingParams().stop_token_ids == ()
    assert SamplingParams(stop_token_ids=(3,)) == SamplingParams(stop_token_ids=[3, 3])


def test_d10_min_tokens_is_at_most_max_tokens() -> None:
    """D10: with no max_tokens the limit is the model's, which only the engine knows."""
    assert SamplingParams(min_tokens=16).min_tokens == 16
    assert SamplingParams(max_tokens=None, min_tokens=2**31).min_tokens == 2**31
    with pytest.raises(ValidationError, match="at most max_tokens, which is 3"):
        SamplingParams(max_tokens=3, min_tokens=4)


def test_seed_minus_one_means_no_seed() -> None:
    assert SamplingParams(seed=-1).seed is None


def test_defaults_are_the_ones_that_users_know() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens, params.n) == (1.0, 1.0, 0, 16, 1)
