"""/v1/completions: choices, batches, usage, echo, streams."""

from __future__ import annotations

import openai
import pytest
from completion_calls import chunks, complete, joined, post
from http_server import ThreadServer

GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
SEEDED = {"temperature": 1.5, "seed": 7, "max_tokens": 12, "ignore_eos": True}
PROMPTS = ["the hi", "he", "hihi the"]


@pytest.fixture(scope="module")
def model(server: ThreadServer) -> str:
    return server.service.model_names[0]


def test_a1_a_completion_has_one_choice_that_ends_with_its_length(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt="the hi", max_tokens=5, extra_body={"ignore_eos": True})
    (choice,) = answer.choices
    assert (answer.object, answer.model, choice.index) == ("text_completion", model, 0)
    assert answer.id.startswith("cmpl-")
    assert choice.finish_reason == "length"
    assert choice.logprobs is None
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (4, 5, 9)


def test_a_request_without_a_model_gets_the_first_served_one(server: ThreadServer, model: str) -> None:
    assert complete(server, prompt="hi", **GREEDY)["model"] == model
    status, body = post(server, prompt="hi", model="another")
    assert (status, body["error"]["type"], body["error"]["param"]) == (404, "NotFoundError", "model")


def test_a5_a_batch_of_texts_or_of_token_ids_has_its_choices_in_order(server: ThreadServer) -> None:
    ids = [server.llm.front.tokenizer.encode(prompt) for prompt in PROMPTS]
    alone = [complete(server, prompt=prompt, **GREEDY)["choices"][0]["text"] for prompt in PROMPTS]
    for prompts in (PROMPTS, ids):
        choices = complete(server, prompt=[*prompts, prompts[0]], **GREEDY)["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
        assert [choice["text"] for choice in choices] == [*alone, alone[0]]


@pytest.mark.parametrize("stream", [False, True])
def test_api_10_choice_i_of_prompt_p_has_the_index_p_times_n_plus_i(server: ThreadServer, stream: bool) -> None:
    body = {"prompt": ["a", "b", "c"], "n": 2, "return_token_ids": True, **SEEDED}
    whole = complete(server, **body)["choices"]
    assert [choice["index"] for choice in whole] == list(range(6))
    ids = [server.llm.front.tokenizer.encode(prompt) for prompt in ("a", "b", "c") for _ in range(2)]
    if stream:
        parts = joined(chunks(server, **body))
        assert sorted(parts) == list(range(6))
        whole = [parts[index] | {"prompt_token_ids": choice["prompt_token_ids"]} for index, choice in enumerate(whole)]
    assert [choice["prompt_token_ids"] for choice in whole] == ids
    alone = [complete(server, **{**body, "prompt": prompt})["choices"] for prompt in ("a", "b", "c")]
    assert [choice["text"] for choice in whole] == [choice["text"] for choices in alone for choice in choices]


@pytest.mark.parametrize("stream", [False, True])
def test_a4_n_choices_differ_and_each_ends_once(server: ThreadServer, stream: bool) -> None:
    body = {"prompt": "hi", "n": 5, **SEEDED}
    choices = list(joined(chunks(server, **body)).values()) if stream else complete(server, **body)["choices"]
    assert sorted(choice["index"] for choice in choices) == list(range(5))
    assert len({choice["text"] for choice in choices}) == 5
    assert {choice["finish_reason"] for choice in choices} == {"length"}


def test_greedy_choices_are_equal_and_smp_12_do_not_look_at_what_limits_sampling(server: ThreadServer) -> None:
    (expected,) = complete(server, prompt="hi", **GREEDY)["choices"]
    for change in ({"top_p": 0.1}, {"top_k": 5}, {"min_p": 0.5}, {"seed": 3}, {"temperature": 1e-6}):
        choices = complete(server, prompt="hi", n=2, **{**GREEDY, **change})["choices"]
        assert [choice["text"] for choice in choices] == [expected["text"]] * 2


@pytest.mark.parametrize("stream", [False, True])
def test_api_09_usage_counts_each_prompt_once_and_all_choices(server: ThreadServer, stream: bool) -> None:
    body = {"prompt": ["aa", "bbbb"], "n": 2, "max_tokens": 5, "ignore_eos": True}
    if stream:
        usage = chunks(server, stream_options={"include_usage": True}, **body)[-1]["usage"]
    else:
        usage = complete(server, **body)["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (6, 20, 26)


def test_api_09_cached_tokens_are_summed_over_the_prompts(server: ThreadServer) -> None:
    prompts = [[token] * 40 for token in (20, 21)]  # two full blocks of 16 each
    cold = complete(server, prompt=prompts, n=2, **GREEDY)["usage"]["prompt_tokens_details"]["cached_tokens"]
    warm = complete(server, prompt=prompts, n=2, **GREEDY)["usage"]["prompt_tokens_details"]["cached_tokens"]
    streamed = chunks(server, prompt=prompts, n=2, stream_options={"include_usage": True}, **GREEDY)[-1]["usage"]
    assert (cold, warm) == (0, 64)
    assert streamed["prompt_tokens_details"]["cached_tokens"] == 64


@pytest.mark.parametrize(
    "body", [{"prompt": PROMPTS, **GREEDY}, {"prompt": "hi", "n": 3, **SEEDED}, {"prompt": PROMPTS, "n": 2, **SEEDED}]
)
def test_a2_a_stream_put_together_is_the_whole_answer(server: ThreadServer, body: dict[str, object]) -> None:
    whole = complete(server, **body)["choices"]
    parts = joined(chunks(server, **body))
    assert sorted(parts) == [choice["index"] for choice in whole]
    for choice in whole:
        part = parts[choice["index"]]
        assert (part["text"], part["finish_reason"]) == (choice["text"], choice["finish_reason"])


def test_all_chunks_of_a_stream_have_one_id_time_and_model(server: ThreadServer, model: str) -> None:
    stream = chunks(server, prompt=PROMPTS, n=2, stream_options={"include_usage": True}, **SEEDED)
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in stream}) == 1
    assert (stream[0]["model"], stream[0]["object"]) == (model, "text_completion")


@pytest.mark.parametrize(
    "options",
    [None, {}, {"include_usage": False}, {"include_usage": False, "continuous_usage_stats": True}],
    ids=str,
)
def test_a3_api_08_a_stream_has_no_usage_unless_it_is_asked_for(server: ThreadServer, options: object) -> None:
    stream = chunks(server, prompt="hi", stream_options=options, **GREEDY)
    assert all(chunk["usage"] is None for chunk in stream)
    assert all(chunk["choices"] for chunk in stream)


def test_a3_usage_comes_once_after_the_last_choice(client: openai.OpenAI, model: str) -> None:
    stream = list(
        client.completions.create(
            model=model,
            prompt="hi",
            max_tokens=4,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
    )
    assert [chunk.usage for chunk in stream[:-1]] == [None] * (len(stream) - 1)
    assert stream[-1].choices == []
    assert stream[-1].usage is not None
    assert stream[-1].usage.completion_tokens == 4


def test_a3_continuous_usage_is_on_every_chunk_and_its_total_is_the_sum(server: ThreadServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = chunks(server, prompt=["hi", "the"], stream_options=options, **GREEDY)
    counts = [chunk["usage"]["completion_tokens"] for chunk in stream]
    assert counts == sorted(counts)
    assert counts[-1] == 12
    for chunk in stream:
        usage = chunk["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert usage["prompt_tokens"] == 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [[5, 6, 7], "the hi", [[5, 6, 7], [8, 9]], ["the", "hi"]], ids=str)
def test_api_07_an_echo_is_the_prompt_before_each_completion(
    server: ThreadServer, prompt: list[object] | str, stream: bool
) -> None:
    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    given = prompt if several else [prompt]
    shown = [one if isinstance(one, str) else server.llm.front.tokenizer.decode(one) for one in given]  # type: ignore[arg-type]
    body = {"prompt": prompt, "n": 2, **SEEDED}
    plain = complete(server, **body)["choices"]
    if stream:
        parts = joined(chunks(server, echo=True, **body))
        texts = [parts[index]["text"] for index in range(len(plain))]
    else:
        texts = [choice["text"] for choice in complete(server, echo=True, **body)["choices"]]
    assert texts == [shown[index // 2] + choice["text"] for index, choice in enumerate(plain)]


def test_special_tokens_in_an_echoed_text_are_echoed_too(server: ThreadServer) -> None:
    (choice,) = complete(server, prompt="<|im_start|>user hi", echo=True, **GREEDY)["choices"]
    assert choice["text"].startswith("<|im_start|>user hi")


@pytest.mark.parametrize("include", [False, True])
def test_txt_01_a_stop_string_is_never_streamed_before_it_is_whole(server: ThreadServer, include: bool) -> None:
    text = complete(server, prompt="the hi", **SEEDED)["choices"][0]["text"]
    stop = text[4:7]
    body = {"prompt": "the hi", "stop": [stop], "include_stop_str_in_output": include, **SEEDED}
    (whole,) = complete(server, **body)["choices"]
    expected = text[: text.index(stop) + (len(stop) if include else 0)]
    assert (whole["text"], whole["finish_reason"], whole["stop_reason"]) == (expected, "stop", stop)
    (part,) = joined(chunks(server, **body)).values()
    assert (part["text"], part["finish_reason"], part["stop_reason"]) == (expected, "stop", stop)


def test_txt_06_text_that_was_held_back_comes_with_the_end(server: ThreadServer) -> None:
    text = complete(server, prompt="the hi", **SEEDED)["choices"][0]["text"]
    body = {"prompt": "the hi", "stop": [text[-3:] + "and more"], **SEEDED}
    (part,) = joined(chunks(server, **body)).values()
    assert (part["text"], part["finish_reason"]) == (text, "length")


def test_txt_05_no_stop_string_is_as_good_as_an_empty_list_and_text_as_good_as_a_list_of_it(
    server: ThreadServer,
) -> None:
    text = complete(server, prompt="the hi", **SEEDED)["choices"][0]["text"]
    nothing: tuple[object, ...] = (None, [])
    for stop in nothing:
        assert complete(server, prompt="the hi", stop=stop, **SEEDED)["choices"][0]["text"] == text
    one, listed = text[3:6], [text[3:6]]
    first, second = (complete(server, prompt="the hi", stop=stop, **SEEDED)["choices"][0] for stop in (one, listed))
    assert first == second
    assert complete(server, prompt="the hi", stop=["#q1", "#q2", "#q3", "#q4", "#q5"], **SEEDED)


def test_txt_10_the_first_delta_of_a_prompt_that_ends_within_a_character_has_at_most_that(
    server: ThreadServer,
) -> None:
    tokenizer = server.llm.front.tokenizer
    *begun, last = tokenizer.encode("世")
    prompt = [*tokenizer.encode("Hello "), *begun]
    body = {"prompt": prompt, "max_tokens": 1, "allowed_token_ids": [last], "ignore_eos": True}
    (part,) = joined(chunks(server, **body)).values()
    assert part["text"] in ("世", "")
    assert complete(server, **body)["choices"][0]["text"] == part["text"]


def test_a9_the_models_own_stop_tokens_and_those_of_the_request_both_count(server: ThreadServer) -> None:
    def forced(token_id: int, **others: object) -> tuple[object, object]:
        body = {"prompt": "hi", "max_tokens": 4, "temperature": 0, "logit_bias": {str(token_id): 100}, **others}
        (choice,) = complete(server, **body)["choices"]
        return choice["finish_reason"], choice["stop_reason"]

    for eos in (0, 2):  # of generation_config.json
        assert forced(eos, stop_token_ids=[9, 9]) == ("stop", None)
    assert forced(9, stop_token_ids=[9, 9]) == ("stop", 9)
    assert forced(9) == ("length", None)
    assert forced(2, ignore_eos=True) == ("length", None)


def test_txt_03_a_stop_token_is_in_the_text_only_if_that_is_asked_for(server: ThreadServer) -> None:
    token_id = server.llm.front.tokenizer.encode(" the")[0]
    body = {"prompt": "hi", "temperature": 0, "logit_bias": {str(token_id): 100}, "stop_token_ids": [token_id]}
    for include, expected in ((False, ""), (True, " the")):
        (choice,) = complete(server, return_token_ids=True, include_stop_str_in_output=include, **body)["choices"]
        assert (choice["text"], choice["token_ids"], choice["stop_reason"]) == (expected, [token_id], token_id)
        (part,) = joined(chunks(server, include_stop_str_in_output=include, **body)).values()
        assert part["text"] == expected


def test_token_ids_of_prompt_and_choice_are_returned_if_asked_for(server: ThreadServer) -> None:
    prompt = server.llm.front.tokenizer.encode("the hi")
    (choice,) = complete(server, prompt="the hi", return_token_ids=True, **GREEDY)["choices"]
    assert choice["prompt_token_ids"] == prompt
    assert len(choice["token_ids"]) == 6
    stream = chunks(server, prompt="the hi", return_token_ids=True, **GREEDY)
    assert [token for chunk in stream for token in chunk["choices"][0]["token_ids"]] == choice["token_ids"]
    assert stream[0]["choices"][0]["prompt_token_ids"] == prompt
    assert all("prompt_token_ids" not in chunk["choices"][0] for chunk in stream[1:])
    assert "token_ids" not in complete(server, prompt="the hi", **GREEDY)["choices"][0]


def test_a_stream_interval_sends_several_tokens_at_once(server: ThreadServer) -> None:
    body = {"prompt": "hi", "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    assert len(chunks(server, stream_interval=6, **body)) < len(chunks(server, **body))
