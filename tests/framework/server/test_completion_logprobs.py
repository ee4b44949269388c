"""Logprobs of completions: in OpenAI's older form, with echo, in streams, and as lm-eval reads them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from completion_calls import Json, chunks, complete, joined, refused
from http_server import ThreadServer
from tokenyard import LLM, SamplingParams

GREEDY = {"temperature": 0, "max_tokens": 5, "ignore_eos": True}
SEEDED = {"temperature": 1.5, "seed": 3, "max_tokens": 12, "ignore_eos": True}
TEXT = "\nthe hi, 世界!"  # a newline first, and characters of several tokens


@pytest.fixture(scope="module")
def offline(tiny_llama_dir: Path) -> Iterator[LLM]:
    """Our own float32 reference."""
    with LLM(tiny_llama_dir, dtype="float32", overrides=["kv_cache.num_blocks=256"]) as llm:
        yield llm


def check_lists(logprobs: Json, num_tokens: int) -> None:
    assert {name: len(values) for name, values in logprobs.items()} == dict.fromkeys(
        ("tokens", "token_logprobs", "top_logprobs", "text_offset"), num_tokens
    )


def test_a1_logprobs_null_is_none_of_them(server: ThreadServer) -> None:
    assert complete(server, prompt="hi", logprobs=None, **GREEDY)["choices"][0]["logprobs"] is None
    assert all(chunk["choices"][0]["logprobs"] is None for chunk in chunks(server, prompt="hi", **GREEDY))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize("temperature", [0, 1])
def test_e16_api_15_each_token_has_the_likeliest_and_itself(
    server: ThreadServer, count: int, stream: bool, temperature: int
) -> None:
    body = {"prompt": "hi", "logprobs": count, **GREEDY, "temperature": temperature, "seed": 1}
    if stream:
        logprobs = joined(chunks(server, **body))[0]["logprobs"]
    else:
        logprobs = complete(server, **body)["choices"][0]["logprobs"]
    check_lists(logprobs, 5)
    rows = zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    for token, logprob, top in rows:
        assert top[token] == logprob
        assert len(top) in (max(1, count), count + 1)
        if temperature == 0 and count:
            assert logprob == max(top.values())


def test_logprobs_are_those_of_the_offline_engine(server: ThreadServer, offline: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=2, prompt_logprobs=2)
    (expected,) = offline.generate("the hi", params, use_tqdm=False)
    logprobs = complete(server, prompt="the hi", logprobs=2, echo=True, **GREEDY)["choices"][0]["logprobs"]
    ids = [*expected.prompt_token_ids, *expected.outputs[0].token_ids]
    rows = [*(expected.prompt_logprobs or ()), *(expected.outputs[0].logprobs or ())]
    values = [None if row is None else row[token].logprob for token, row in zip(ids, rows, strict=True)]
    assert values[0] is logprobs["token_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:] == pytest.approx(values[1:], abs=1e-4)
    for top, row in zip(logprobs["top_logprobs"][1:], rows[1:], strict=True):
        assert row is not None
        assert sorted(top.values()) == pytest.approx(sorted(one.logprob for one in row.values()), abs=1e-4)


@pytest.mark.parametrize("prompt", ["\nthe hi", [5, 6, 7, 8]], ids=str)
def test_a6_txt_15_echoed_tokens_put_together_are_the_text_and_offsets_are_theirs(
    server: ThreadServer, prompt: object
) -> None:
    # Printable tokens only, so that every token is whole characters.
    allowed = server.llm.front.tokenizer.encode("abcdefgh the hi")
    body = {"prompt": prompt, "logprobs": 1, "echo": True, "allowed_token_ids": allowed, **SEEDED}
    (choice,) = complete(server, **body)["choices"]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["text_offset"] == offsets_of(logprobs["tokens"])
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    assert all(value is not None for value in logprobs["token_logprobs"][1:])
    assert all(top for top in logprobs["top_logprobs"][1:])


def offsets_of(tokens: Sequence[str]) -> list[int]:
    return [len("".join(tokens[:index])) for index in range(len(tokens))]


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("prompt", [TEXT, [5, 6, 7], [TEXT, "hi"]], ids=["text", "ids", "batch"])
def test_txt_16_the_logprobs_of_a_stream_put_together_are_those_of_the_whole(
    server: ThreadServer, prompt: object, n: int, echo: bool
) -> None:
    body = {"prompt": prompt, "n": n, "logprobs": 2, "echo": echo, **SEEDED}
    parts = joined(chunks(server, **body))
    choices = complete(server, **body)["choices"]
    assert sorted(parts) == [choice["index"] for choice in choices]
    for choice in choices:
        part = parts[choice["index"]]
        assert part["text"] == choice["text"]
        for name in ("tokens", "text_offset"):
            assert part["logprobs"][name] == choice["logprobs"][name]
        assert none_as_nan(part["logprobs"]) == pytest.approx(none_as_nan(choice["logprobs"]), abs=1e-4, nan_ok=True)
        assert part["logprobs"]["text_offset"] == sorted(part["logprobs"]["text_offset"])


def none_as_nan(logprobs: Json) -> list[float]:
    return [math.nan if value is None else value for value in logprobs["token_logprobs"]]


def test_txt_16_the_offsets_of_a_choice_begin_where_its_text_does(server: ThreadServer) -> None:
    for prompt in ("hi the", [5, 6, 7], TEXT):
        plain = complete(server, prompt=prompt, logprobs=0, **SEEDED)["choices"][0]
        echoed = complete(server, prompt=prompt, logprobs=0, echo=True, **SEEDED)["choices"][0]
        start = len(echoed["text"]) - len(plain["text"])
        own = echoed["logprobs"]["text_offset"][-len(plain["logprobs"]["tokens"]) :]
        assert plain["logprobs"]["text_offset"][0] == 0
        assert own == [start + offset for offset in plain["logprobs"]["text_offset"]]


def test_the_offsets_of_an_echoed_prompt_find_its_tokens(server: ThreadServer) -> None:
    prompt = "<|im_start|>user hi<|im_end|>" + TEXT
    logprobs = complete(server, prompt=prompt, logprobs=0, echo=True, **GREEDY)["choices"][0]["logprobs"]
    ids = server.llm.front.tokenizer.encode(prompt)
    spelled = [server.llm.front.tokenizer.token_bytes(token) for token in ids]
    text = b""
    for offset, piece in zip(logprobs["text_offset"][: len(ids)], spelled, strict=True):
        assert offset == len(text.decode("utf-8", "ignore"))
        text += piece
    assert text.decode() == prompt


def test_a_token_that_is_no_whole_character_is_called_by_its_bytes(server: ThreadServer) -> None:
    begun = server.llm.front.tokenizer.encode("世")[0]
    body = {"prompt": "hi", "logprobs": 0, "max_tokens": 1, "allowed_token_ids": [begun], "ignore_eos": True}
    logprobs = complete(server, **body)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["bytes:\\xe4"]
    assert list(logprobs["top_logprobs"][0]) == ["bytes:\\xe4"]


def test_tokens_can_be_called_by_their_ids(server: ThreadServer) -> None:
    body = {"prompt": [5, 6], "logprobs": 3, "echo": True, "return_token_ids": True, **GREEDY}
    (choice,) = complete(server, return_tokens_as_token_ids=True, **body)["choices"]
    ids = [*choice["prompt_token_ids"], *choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in ids]
    assert all(name.startswith("token_id:") for top in choice["logprobs"]["top_logprobs"][1:] for name in top)


def test_prompt_logprobs_come_by_token_id(server: ThreadServer) -> None:
    (choice,) = complete(server, prompt=[5, 6, 7], prompt_logprobs=2, **GREEDY)["choices"]
    first, second, third = choice["prompt_logprobs"]
    assert first is None
    assert {"6"} <= set(second)
    assert second["6"].keys() == {"logprob", "rank", "decoded_token"}
    assert len(third) in (2, 3)
    assert refused(server, prompt="hi", prompt_logprobs=1, stream=True)["param"] == "prompt_logprobs"


def test_smp_14_a_token_that_is_all_but_forbidden_has_a_finite_logprob(server: ThreadServer) -> None:
    first = complete(server, prompt="hi", return_token_ids=True, **GREEDY)["choices"][0]["token_ids"][0]
    for change in ({"logit_bias": {str(first): -100}}, {"top_p": 0.1}):
        logprobs = complete(server, prompt="hi", logprobs=5, **{**GREEDY, **change})["choices"][0]["logprobs"]
        assert all(math.isfinite(value) for value in logprobs["token_logprobs"])
        assert all(math.isfinite(value) for top in logprobs["top_logprobs"] for value in top.values())


# lm-eval, local-completions: what its api model does with a batch of (context, continuation) pairs

PAIRS = [("the hi", " the"), ("hi", "hihi the"), ("a", "b"), ("世 the", " he 界")]


def scores(answer: Json, context_lengths: Sequence[int]) -> list[tuple[float, bool]]:
    """As the harness reads an answer: (sum of logprobs, whether all tokens are the likeliest) of each continuation."""
    found = []
    for choice, length in zip(sorted(answer["choices"], key=lambda one: one["index"]), context_lengths, strict=True):
        tokens = choice["logprobs"]["token_logprobs"][length:-1]
        tops = choice["logprobs"]["top_logprobs"][length:-1]
        is_greedy = all(value == max(top.values()) for value, top in zip(tokens, tops, strict=True))
        found.append((sum(tokens), is_greedy))
    return found


@pytest.mark.parametrize("as_text", [False, True])
def test_lm_evals_log_likelihoods_are_those_of_our_own_reference(
    server: ThreadServer, offline: LLM, as_text: bool
) -> None:
    tokenizer = offline.get_tokenizer()
    contexts = [tokenizer.encode(context) for context, _ in PAIRS]
    ids = [[*tokenizer.encode(context), *tokenizer.encode(rest)] for context, rest in PAIRS]
    prompt: list[Any] = [tokenizer.decode(row) for row in ids] if as_text else list(ids)
    whole = [tokenizer.encode(text) for text in prompt] if as_text else ids
    lengths = [len(row) for row in contexts]
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True, "seed": 1234}
    answer = complete(server, model=server.service.model_names[0], **body)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    outputs = offline.generate([{"prompt_token_ids": row} for row in whole], params, use_tqdm=False)
    for (total, is_greedy), output, length in zip(scores(answer, lengths), outputs, lengths, strict=True):
        rows = list(zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=True))[length:]
        own = [(position[token].logprob, position[token].rank) for token, position in rows if position is not None]
        assert total == pytest.approx(sum(logprob for logprob, _ in own), abs=1e-4)
        assert is_greedy == all(rank == 1 for _, rank in own)


def test_lm_evals_greedy_continuation_is_told_from_others(server: ThreadServer) -> None:
    prompt = [5, 6, 7]
    answer = complete(server, prompt=prompt, return_token_ids=True, **GREEDY)["choices"][0]
    likeliest = [*prompt, *answer["token_ids"]]
    body = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True, "seed": 1234}
    other = [*likeliest[:-1], (likeliest[-1] + 1) % 256 + 3]
    (_, is_greedy), (_, is_other_greedy) = scores(complete(server, prompt=[likeliest, other], **body), [3, 3])
    assert is_greedy
    assert not is_other_greedy
