"""What /v1/completions refuses, naming the field; and that the server answers afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import httpx
import openai
import pytest
from completion_calls import complete, post, refused
from http_server import DEADLINE, ThreadServer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenyard.server.protocol.sampling import MAX_BIASES, MAX_STOP, MAX_STOP_LENGTH, UNSUPPORTED

VOCAB = 265  # embeddings of the tiny model, all of which its tokenizer knows
HUGE = 2**31
TINY = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def still_answers(server: ThreadServer) -> Iterator[None]:
    """Whatever a test sent, the next request is answered."""
    yield
    assert complete(server, prompt="hi", max_tokens=1)["choices"][0]["finish_reason"] in ("stop", "length")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "prompt", ["", [""], [], [[]], ["a", ""], [[1], []]], ids=["empty", "[empty]", "[]", "[[]]", "second", "second ids"]
)
def test_api_01_d1_an_empty_prompt_is_refused(server: ThreadServer, prompt: object, stream: bool) -> None:
    error = refused(server, prompt=prompt, stream=stream)
    assert error["param"] == "prompt"
    assert "empty" in error["message"]


def test_d1_a_prompt_of_special_tokens_alone_is_a_prompt(server: ThreadServer) -> None:
    assert complete(server, prompt="<|im_start|>", max_tokens=1)["usage"]["prompt_tokens"] == 1


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        3,
        True,
        {"a": 1},
        [10**6],
        [VOCAB],
        [-1],
        [[1], [-1]],
        [1.5],
        [True],
        [None],
        [1, "a"],
        ["a", 1],
        [[1], "a"],
        [[1], 2],
        [[[1]]],
        [["a"]],
        [[1, None]],
        [10**30],
    ],
    ids=str,
)
def test_smp_17_a7_d9_a_prompt_of_the_wrong_kind_or_outside_the_vocabulary_is_refused(
    server: ThreadServer, prompt: object
) -> None:
    assert refused(server, prompt=prompt)["param"] in ("prompt", "prompt_token_ids")


def test_smp_17_the_last_id_of_the_vocabulary_is_taken(server: ThreadServer) -> None:
    assert complete(server, prompt=[VOCAB - 1], max_tokens=1)


def test_a_mistake_in_one_of_several_prompts_is_told_with_its_number(server: ThreadServer) -> None:
    assert "prompt 1 " in refused(server, prompt=[[1], [VOCAB]])["message"]


LIMITS: dict[str, tuple[Sequence[object], Sequence[object]]] = {
    "temperature": ([-1, -0.1, 2.1, "1", True, [1]], [0, -0.0, 1e-320, 2, 1.5]),
    "top_p": ([0, -0.1, 1.5, "1", True], [1, 1e-3]),
    "min_p": ([-0.1, 1.1, "0"], [0, 1]),
    "top_k": ([-2, 1.5, "3", True, HUGE], [-1, 0, 1, HUGE - 1]),
    "presence_penalty": ([-2.1, 2.1, "a"], [-2, 2]),
    "frequency_penalty": ([-2.1, 2.1, "a"], [-2, 2]),
    "repetition_penalty": ([0, -1, 1e5, "a"], [1e-4, 1e4]),
    "n": ([0, -1, 17, 100000, 10**9, 10**30, 1.5, "1", True], [1, 16]),
    "max_tokens": ([0, -5, 1.5, "1", True, 10**30], [1, 10**9]),
    "min_tokens": ([-1, 1.5, "1", HUGE], [0, 2]),
    "seed": ([-2, 1.5, "1", 2**63], [-1, 0, 2**63 - 1]),
    "logprobs": ([-1, 21, 501, 100000, 10**6, 10**9, "1", True, 1.5], [0, 20]),
    "prompt_logprobs": ([-1, 21, 10**6, "1", True], [0, 20]),
    "stop": (
        ["", [""], ["", "\n"], ["a"] * 2 + [str(i) for i in range(MAX_STOP)], "x" * (MAX_STOP_LENGTH + 1), 5, [5]],
        [[], "x", ["x"] * 3, "x" * MAX_STOP_LENGTH, [f"{i}#" for i in range(MAX_STOP)]],
    ),
    "stop_token_ids": ([[-1], [VOCAB], [1.5], ["1"], [True], 5, "5", list(range(VOCAB + 1))], [[], [5, 5], [264]]),
    "allowed_token_ids": ([[], [-1], [VOCAB], 5, ["1"]], [[5], list(range(VOCAB))]),
    "bad_words": (["", [""], [5], ["x" * 257], ["x"] * 2049], [[], "hi", ["hi", "the"]]),
    "logit_bias": (
        [
            {str(VOCAB): 5},
            {"999999": 5},
            {"-1": 5},
            {"abc": 1},
            {"1.5": 1},
            {"5": "x"},
            {"5": True},
            {"5": None},
            [1],
            5,
            {str(i): 0 for i in range(MAX_BIASES + 1)},
        ],
        [{}, {"5": 1000}, {"5": -100, "6": 0.5}],
    ),
    "cache_salt": (["", "x" * 129, 5, ["x"]], ["x", "x" * 128]),
    "user": (["", "x" * 257, 5], ["x" * 256]),
    "ignore_eos": ([1, "true"], [True, False]),
    "skip_special_tokens": ([1, "true"], [True, False]),
    "include_stop_str_in_output": ([0, "no"], [True, False]),
    "echo": ([1, "true"], [True, False]),
    "stream": ([1, "true", "yes"], [False]),
    "add_special_tokens": ([1, "a"], [True, False]),
    "return_token_ids": ([1, "a"], [True, False]),
    "return_tokens_as_token_ids": ([1, "a"], [True, False]),
    "stream_interval": ([0, -1, "1", 1.5], [1, 100]),
    "extra_args": ([5, [1], {"a": 1}, "a"], [{}]),
    "best_of": ([2, 10**9, "1", True, 0], [1]),
    "stream_options": ([{}, {"include_usage": True}, 5, "a"], []),
    "suffix": (["x", 5], [""]),
    "model": ([5, ["a"]], []),
}
"""By field: values that are refused, and values at the limit that are taken. API-02, D7 to D11, D14, D22, A4, A8."""


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, value) for field, (bad, _) in LIMITS.items() for value in bad],
    ids=lambda v: str(v)[:40],
)
def test_api_02_d22_a_value_beyond_its_limit_is_refused_by_name(
    server: ThreadServer, field: str, value: object
) -> None:
    error = refused(server, prompt="hi", **{field: value})
    assert str(error["param"]).startswith(field)
    assert len(error["message"]) < 2000


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, value) for field, (_, good) in LIMITS.items() for value in [None, *good]],
    ids=lambda v: str(v)[:40],
)
def test_d22_null_and_a_value_at_its_limit_are_taken(server: ThreadServer, field: str, value: object) -> None:
    assert complete(server, **{"prompt": "hi", "max_tokens": 2, field: value})["choices"]


def test_the_other_name_of_extra_args_is_checked_as_that(server: ThreadServer) -> None:
    assert refused(server, prompt="hi", vllm_xargs={"a": 1})["param"] == "extra_args"
    assert refused(server, prompt="hi", vllm_xargs={}, extra_args={})["param"] == "vllm_xargs"


@pytest.mark.parametrize("field", ["stop_token_ids", "logit_bias"])
def test_a8_the_message_lists_all_that_is_wrong(server: ThreadServer, field: str) -> None:
    given: object = {"300": 1, "7": 1, "301": 1} if field == "logit_bias" else [300, 7, 301]
    message = refused(server, prompt="hi", **{field: given})["message"]
    assert "300" in message
    assert "301" in message
    assert "7" not in message.replace("0 to 264", "")


def test_a8_all_keys_that_are_no_ids_are_listed(server: ThreadServer) -> None:
    message = refused(server, prompt="hi", logit_bias={"abc": 1, "5": 1, "x-y": 2, "6": "w"})["message"]
    assert all(part in message for part in ("'abc'", "'x-y'", "'6'"))


@pytest.mark.slow
@TINY
@given(st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False)))
@pytest.mark.parametrize("field", ["temperature", "top_p", "repetition_penalty", "presence_penalty"])
def test_d8_any_number_is_taken_or_refused(server: ThreadServer, field: str, number: float) -> None:
    assert post(server, prompt="hi", max_tokens=1, **{field: number})[0] in (200, 400)


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
@pytest.mark.parametrize(
    "field", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty", "timeout"]
)
def test_d8_a_number_that_is_none_is_refused(server: ThreadServer, field: str, literal: str) -> None:
    body = f'{{"prompt": "hi", "max_tokens": 1, "{field}": {literal}}}'
    answer = httpx.post(
        server.url + "/v1/completions", content=body, headers={"content-type": "application/json"}, timeout=DEADLINE
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "BadRequestError"


@pytest.mark.slow
@TINY
@given(st.lists(st.integers(min_value=-(2**40), max_value=2**40), min_size=1, max_size=4))
@pytest.mark.parametrize("field", ["prompt", "stop_token_ids", "allowed_token_ids"])
def test_d9_any_token_ids_are_taken_or_refused(server: ThreadServer, field: str, ids: list[int]) -> None:
    status, _ = post(server, **{"prompt": "hi", "max_tokens": 1, field: ids})
    assert status == (200 if all(0 <= one < VOCAB for one in ids) else 400)


def test_d10_min_tokens_are_at_most_max_tokens_and_what_the_model_takes(server: ThreadServer) -> None:
    assert refused(server, prompt="hi", min_tokens=17)["param"] == "min_tokens"  # max_tokens is 16
    assert refused(server, prompt="hi", min_tokens=HUGE, max_tokens=HUGE)["param"] == "min_tokens"


def test_d11_max_tokens_0_leaves_nothing_behind(server: ThreadServer) -> None:
    with httpx.Client(base_url=server.url, timeout=DEADLINE) as http:
        for _ in range(1000):
            answer = http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 0})
            assert answer.status_code == 400
    server.wait_until_idle()


@pytest.mark.parametrize("name", [*UNSUPPORTED, "suffix", "best_of"])
def test_d21_a_field_of_a_feature_that_is_not_there_is_refused_by_name(server: ThreadServer, name: str) -> None:
    error = refused(server, prompt="hi", **{name: {"a": 1}})
    assert error["param"] == name
    assert "not available" in error["message"]
    assert complete(server, prompt="hi", max_tokens=1, **{name: None})


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, neutral in UNSUPPORTED.items() for value in neutral]
    + [("best_of", 1), ("suffix", ""), ("tools", []), ("length_penalty", 1.0)],
)
def test_a_value_that_asks_for_nothing_is_taken(server: ThreadServer, name: str, value: object) -> None:
    assert complete(server, prompt="hi", max_tokens=1, **{name: value})


def test_robustness_a8_no_code_and_no_pickle_is_taken_from_a_request(server: ThreadServer) -> None:
    processors = [{"qualname": "os.system", "args": ["true"]}]
    assert refused(server, prompt="hi", logits_processors=processors)["param"] == "logits_processors"
    assert refused(server, prompt="hi", prompt_embeds="gASVAA==")["param"] == "prompt_embeds"


def test_a_field_that_nobody_knows_is_taken_and_told_once(
    server: ThreadServer, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        assert complete(server, prompt="hi", max_tokens=1, zzz_unknown=1, _target_="os.system")
    told = [record.getMessage() for record in caplog.records if "zzz_unknown" in record.getMessage()]
    assert len(told) == 1


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (json.dumps({"prompt": "hi"}), None),
        (json.dumps({"prompt": "hi"}), "text/plain"),
        ('{"prompt": ', "application/json"),
        ("", "application/json"),
        ("[]", "application/json"),
        ("null", "application/json"),
        ('"prompt"', "application/json"),
    ],
)
def test_api_21_a_body_that_is_no_json_object_is_refused(server: ThreadServer, content: str, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    answer = httpx.post(server.url + "/v1/completions", content=content, headers=headers, timeout=DEADLINE)
    assert answer.status_code in (400, 415)
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize("field", ["n", "temperature", "logprobs"])
def test_api_13_a_stream_that_is_refused_is_a_plain_error(server: ThreadServer, field: str) -> None:
    body = {"model": server.service.model_names[0], "prompt": "hi", "stream": True, "extra_body": {field: -3}}
    with pytest.raises(openai.BadRequestError) as caught:
        server.client.completions.create(**body)  # type: ignore[call-overload]
    assert caught.value.param == field
