"""SamplingParams: ranges, normalisation, and refusal of what is not there yet."""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenyard import SamplingParams
from tokenyard.errors import UnsupportedError, ValidationError
from tokenyard.sampling_params import (
    CHECKS,
    NOT_YET,
    SamplingType,
    default_sampling_params,
    log_default_sampling_params,
)


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
def test_a_value_out_of_range_is_refused_with_its_name_and_value(name: str, value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.parameter == name
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("flat_logprobs", True),
        ("logprob_token_ids", [1]),
        ("prompt_logprob_start", 3),
        ("prompt_logprob_token_ids", [1]),
        ("repetition_detection", {}),
        ("routed_experts_prompt_start", 1),
        ("spaces_between_special_tokens", False),
        ("structured_outputs", {"json": "{}"}),
        ("thinking_token_budget", 5),
        ("trace_decode_token_ids", np.array([1])),
    ],
)
def test_what_is_not_there_yet_is_refused_by_name_and_its_default_is_taken(name: str, value: Any) -> None:
    assert name in NOT_YET
    with pytest.raises(UnsupportedError, match=f"{name}=.* is not available in this version; leave it at"):
        SamplingParams(**{name: value})
    default: Any = next(field.default for field in dataclasses.fields(SamplingParams) if field.name == name)
    assert SamplingParams(**{name: default}) == SamplingParams()


def test_every_field_has_a_check_that_takes_its_default() -> None:
    assert set(CHECKS) == {field.name for field in dataclasses.fields(SamplingParams)}
    for field in dataclasses.fields(SamplingParams):
        if field.default is not None:
            assert CHECKS[field.name](field.name, field.default) == field.default


@pytest.mark.parametrize(
    ("name", "most", "above"),
    [
        ("n", 16384, 16385),
        ("n", 16384, 10**9),
        ("presence_penalty", 2, 2.001),
        ("presence_penalty", -2, -2.001),
        ("frequency_penalty", 2, 3),
        ("repetition_penalty", 1e4, 1e5),
        ("repetition_penalty", 1e-4, 1e-320),
        ("temperature", 2, 2.001),
        ("top_k", 2**31 - 1, 2**31),
        ("seed", 2**63 - 1, 2**63),
        ("stop", ["x" * 4096], ["x" * 4097]),
        ("stop", [str(i) for i in range(256)], [str(i) for i in range(257)]),
        ("stop_token_ids", range(256), range(257)),
        ("stop_token_ids", [2**31 - 1], [2**31]),
        ("max_tokens", 2**63 - 1, 2**63),
        ("logprobs", 2**31 - 1, 2**31),
        ("prompt_logprobs", 2**31 - 1, 10**400),
        ("stream_interval", 2**63 - 1, 2**63),
        ("logit_bias", dict.fromkeys(range(16384), 0.0), dict.fromkeys(range(16385), 0.0)),
        ("allowed_token_ids", range(2**18), range(2**18 + 1)),
        ("bad_words", ["x" * 256], ["x" * 257]),
        ("bad_words", [str(i) for i in range(2048)], [str(i) for i in range(2049)]),
        ("extra_args", {"k": "x" * (65536 - 9)}, {"k": "x" * (65536 - 8)}),
    ],
)
def test_d7_d22_every_limit_is_finite_and_told_in_a_short_line(name: str, most: Any, above: Any) -> None:
    SamplingParams(**{name: most})
    with pytest.raises(ValidationError, match=name) as caught:
        SamplingParams(**{name: above})
    assert caught.value.parameter == name
    assert len(str(caught.value)) < 1500


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", True),
        ("n", 1.0),
        ("n", np.array([1])),
        ("presence_penalty", math.nan),
        ("frequency_penalty", "1"),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("repetition_penalty", math.inf),
        ("logprobs", -2),
        ("logprobs", 1.0),
        ("logprobs", "5"),
        ("prompt_logprobs", -2),
        ("detokenize", 1),
        ("detokenize", None),
        ("skip_special_tokens", "no"),
        ("include_stop_str_in_output", 0),
        ("output_kind", 0),
        ("output_kind", "DELTA"),
        ("stream_interval", 0),
        ("logit_bias", [1]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", "12"),
        ("bad_words", [""]),
        ("bad_words", [3]),
        ("bad_words", b"x"),
        ("extra_args", []),
        ("extra_args", {1: 2}),
        ("extra_args", {"a": {1: 2}}),
        ("extra_args", {"a": math.nan}),
        ("extra_args", {"a": (1, 2)}),
        ("extra_args", {"a": {3}}),
        ("extra_args", {"a": object}),
        ("skip_reading_prefix_cache", 1),
    ],
)
def test_a_value_of_a_wrong_kind_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=f"{name}=.* is not valid: it must be ") as caught:
        SamplingParams(**{name: value})
    assert caught.value.parameter == name


def test_a_number_too_long_to_print_is_refused_all_the_same() -> None:
    for name in ("n", "max_tokens", "temperature", "seed", "stop_token_ids"):
        with pytest.raises(ValidationError, match=f"{name}=<int>"):
            SamplingParams(**{name: 10**5000})  # type: ignore[arg-type]


@given(st.floats())
def test_d8_no_float_passes_that_is_not_finite_and_in_range(value: float) -> None:
    """D8: NaN and infinity pass comparisons that are written the wrong way round."""
    for name, low, high in (
        ("temperature", 0, 2),
        ("top_p", 0, 1),
        ("min_p", 0, 1),
        ("presence_penalty", -2, 2),
        ("frequency_penalty", -2, 2),
        ("repetition_penalty", 1e-4, 1e4),
    ):
        given_value: dict[str, Any] = {name: value}
        try:
            found = getattr(SamplingParams(**given_value), name)
        except ValidationError:
            continue
        assert math.isfinite(found)
        assert low <= value <= high


def test_smp_05_all_bad_keys_of_a_logit_bias_are_named_at_once() -> None:
    bias = {"5": 1, 7: 1000, "abc": 1, -1: 2, "1.5": 3, True: 1, 9: -1e9, "٣": 1, 2.0: 1, None: 0}
    with pytest.raises(ValidationError, match="logit_bias") as caught:
        SamplingParams(logit_bias=bias)  # type: ignore[arg-type]
    assert all(repr(key) in str(caught.value) for key in ("abc", -1, "1.5", True, "٣", 2.0, None))
    assert "'5'" not in str(caught.value)
    for value in (math.nan, "1", None, True, [1]):
        with pytest.raises(ValidationError, match="the values of keys 6 are not numbers"):
            SamplingParams(logit_bias={5: 1.0, 6: value})  # type: ignore[dict-item]
    with pytest.raises(ValidationError, match="each given once"):
        SamplingParams(logit_bias={5: 1.0, "5": 2.0})  # type: ignore[dict-item]


def test_smp_05_bias_keys_are_numbers_and_values_are_clipped_in_a_copy() -> None:
    given_bias = {"5": 1000, 7: -1000, "8": -math.inf, 9: 3}
    params = SamplingParams(logit_bias=given_bias)  # type: ignore[arg-type]
    assert params.logit_bias == {5: 100.0, 7: -100.0, 8: -100.0, 9: 3.0}
    given_bias["7"] = 0
    assert params.logit_bias == {5: 100.0, 7: -100.0, 8: -100.0, 9: 3.0}


def test_extra_args_are_copied() -> None:
    inner = {"list": [1, 2.5, None, True, "x"]}
    params = SamplingParams(extra_args={"a": inner})
    inner["list"].append(3)
    assert params.extra_args == {"a": {"list": [1, 2.5, None, True, "x"]}}
    endless: dict[str, object] = {}
    endless["self"] = endless
    deep: dict[str, object] = {}
    for _ in range(5000):
        deep = {"a": deep}
    for value in (endless, deep):
        with pytest.raises(ValidationError, match="extra_args"):
            SamplingParams(extra_args=value)


def test_logprobs_true_is_one_and_false_is_none() -> None:
    for name in ("logprobs", "prompt_logprobs"):
        found = [getattr(SamplingParams(**{name: value}), name) for value in (True, False, None, 0, -1)]  # type: ignore[arg-type]
        assert found == [1, None, None, 0, -1]
        assert type(found[0]) is int


def test_e16_prompt_logprobs_read_nothing_from_the_prefix_cache() -> None:
    assert SamplingParams(prompt_logprobs=0).skip_reading_prefix_cache is True
    assert SamplingParams(logprobs=0).skip_reading_prefix_cache is None
    assert SamplingParams(skip_reading_prefix_cache=True).skip_reading_prefix_cache is True
    assert SamplingParams(skip_reading_prefix_cache=False).skip_reading_prefix_cache is False
    with pytest.raises(ValidationError, match=r"skip_reading_prefix_cache=False .* with prompt_logprobs"):
        SamplingParams(prompt_logprobs=1, skip_reading_prefix_cache=False)


def test_a_stop_string_needs_text() -> None:
    SamplingParams(detokenize=False, stop=[], bad_words=["x"])
    with pytest.raises(ValidationError, match=r"detokenize=False .* with stop"):
        SamplingParams(detokenize=False, stop="x")


VALUES: dict[str, st.SearchStrategy[object]] = {
    "n": st.integers(1, 4),
    "presence_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.5, 2),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.1, 1),
    "top_k": st.integers(-1, 5),
    "min_p": st.floats(0, 1),
    "seed": st.one_of(st.none(), st.integers(-1, 2**63 - 1)),
    "stop": st.one_of(st.none(), st.text(min_size=1), st.lists(st.text(min_size=1))),
    "stop_token_ids": st.one_of(st.none(), st.lists(st.integers(0, 9))),
    "logprobs": st.one_of(st.none(), st.booleans(), st.integers(-1, 5)),
    "prompt_logprobs": st.one_of(st.none(), st.booleans(), st.integers(-1, 5)),
    "logit_bias": st.one_of(st.none(), st.dictionaries(st.integers(0, 9), st.floats(allow_nan=False))),
    "bad_words": st.one_of(st.none(), st.lists(st.text(min_size=1))),
    "extra_args": st.one_of(st.none(), st.dictionaries(st.text(), st.lists(st.integers()))),
}


@given(st.fixed_dictionaries({}, optional=VALUES))
def test_normalising_twice_changes_nothing_and_params_are_values(given_values: dict[str, Any]) -> None:
    params = SamplingParams(**given_values)
    assert dataclasses.replace(params) == params
    assert pickle.loads(pickle.dumps(params)) == params == copy.deepcopy(params)
    assert hash(dataclasses.replace(params)) == hash(params)


@given(st.fixed_dictionaries({}, optional=VALUES), st.integers(0, 3))
def test_req_06_a_child_differs_from_its_parent_in_n_and_seed_only(given_values: dict[str, Any], index: int) -> None:
    params = SamplingParams(**given_values)
    child = params.child(index)
    assert child.n == 1
    assert child.seed == (None if params.seed is None else (params.seed + index) % 2**63)
    assert dataclasses.replace(child, n=params.n, seed=params.seed) == params


def test_sampling_types_are_the_three_that_users_know() -> None:
    assert SamplingParams(temperature=0, seed=1).sampling_type is SamplingType.GREEDY
    assert SamplingParams().sampling_type is SamplingType.RANDOM
    assert SamplingParams(seed=1).sampling_type is SamplingType.RANDOM_SEED


@pytest.mark.parametrize(
    ("generation_config", "expected"),
    [
        ({}, SamplingParams()),
        (
            {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1},
            SamplingParams(temperature=0.6, top_p=0.9, top_k=20, min_p=0.1),
        ),
        ({"repetition_penalty": 1.05, "max_new_tokens": 99}, SamplingParams(repetition_penalty=1.05, max_tokens=99)),
        (
            {"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.1},
            SamplingParams(temperature=0, repetition_penalty=1.1),
        ),
        ({"do_sample": True, "top_k": None, "eos_token_id": [1, 2], "length_penalty": 3.0}, SamplingParams()),
    ],
)
def test_smp_15_the_models_own_defaults(generation_config: dict[str, object], expected: SamplingParams) -> None:
    assert default_sampling_params(generation_config) == expected


def test_smp_15_the_models_own_defaults_are_told_once_at_start_up(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="tokenyard")
    log_default_sampling_params({})
    assert not caplog.records
    log_default_sampling_params({"temperature": 0.6, "max_new_tokens": 99})
    assert "sampling_params=None means temperature=0.6, max_tokens=99" in caplog.text
    caplog.clear()
    log_default_sampling_params({"temperature": "hot"})
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "generation_config.json: temperature='hot' is not valid" in record.getMessage()


def test_smp_12_temperature_zero_is_plain_argmax_whatever_the_limits() -> None:
    for params in (
        SamplingParams(temperature=0, top_p=0.1, top_k=5, min_p=0.5),
        SamplingParams(temperature=1e-6),
        SamplingParams(temperature=0, seed=3),
        SamplingParams(temperature=0, n=2),
        SamplingParams(temperature=-0.0),
        SamplingParams(temperature=1e-320),
    ):
        assert params.is_greedy
        assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.0, 1.0, 0, 0.0)
        assert math.copysign(1, params.temperature) == 1


def test_tiny_temperatures_are_raised_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert SamplingParams(temperature=0.001).temperature == 0.01
    assert "raised" in caplog.text


def test_txt_05_stop_takes_a_string_or_a_list() -> None:
    assert SamplingParams(stop="x").stop_strings == ("x",)
    assert SamplingParams(stop=["x", "yz"]).stop_strings == ("x", "yz")
    assert SamplingParams(stop=[]).stop_strings == SamplingParams(stop=None).stop_strings == ()
    assert len(SamplingParams(stop=list("abcde")).stop_strings) == 5  # the API's limit of 4 is not ours


def test_empty_lists_ask_for_nothing() -> None:
    empty = SamplingParams(stop=[], stop_token_ids=[], bad_words=[], logit_bias={}, extra_args={})
    assert empty == SamplingParams()


def test_e14_token_lists_keep_their_order_and_lose_repetitions() -> None:
    assert SamplingParams(allowed_token_ids=[5, 3, 5]).allowed_token_ids == (5, 3)
    assert SamplingParams(bad_words=["b", "a", "b"]).bad_words == ("b", "a")
    assert SamplingParams(bad_words="word").bad_words == ("word",)


def test_arrays_and_huge_values_are_refused_in_a_short_line() -> None:
    for name, value in (
        ("stop_token_ids", np.array([1, 2])),
        ("stop_token_ids", [*range(9999), -1]),
        ("n", np.array([1])),
        ("bad_words", list(map(str, range(9999)))),
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
