"""Limits and defaults that come from the server's config, the model's generation_config.json and its tokenizer."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers
from completion_calls import chunks, complete, joined, post, refused
from http_server import ThreadServer, running_server
from tokenizers import processors
from tokenyard import LLM

GENERATION_CONFIG = {"temperature": 0.7, "top_k": 40, "max_new_tokens": 7, "eos_token_id": [2, 0]}
LIMITS = ["server.max_prompts=4", "server.max_n=3", "model.max_model_len=64"]
PROMPT = {"prompt": "hi", "max_tokens": 2}


def with_generation_config(folder: Path, model: Path, **config: object) -> Path:
    shutil.copytree(model, folder)
    (folder / "generation_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def opinionated_dir(tmp_path_factory: pytest.TempPathFactory, tiny_llama_dir: Path) -> Path:
    """A model whose generation_config.json has sampling defaults."""
    return with_generation_config(tmp_path_factory.mktemp("opinions") / "model", tiny_llama_dir, **GENERATION_CONFIG)


@pytest.fixture(scope="module")
def limited(opinionated_dir: Path) -> Iterator[ThreadServer]:
    with running_server(LIMITS, model=opinionated_dir) as running:
        yield running


def test_a4_d7_n_is_limited_by_the_server(limited: ThreadServer) -> None:
    assert len(complete(limited, n=3, **PROMPT)["choices"]) == 3
    error = refused(limited, n=4, **PROMPT)
    assert error["param"] == "n"
    assert "server.max_n" in error["message"]


def test_a7_the_number_of_prompts_is_limited_and_the_limit_is_taken(limited: ThreadServer) -> None:
    for one in ("hi", [5]):
        assert len(complete(limited, prompt=[one] * 4, max_tokens=1)["choices"]) == 4
        error = refused(limited, prompt=[one] * 5, max_tokens=1)
        assert error["param"] == "prompt"
        assert "server.max_prompts" in error["message"]


def test_prompts_times_n_are_limited_before_anything_is_made(limited: ThreadServer) -> None:
    assert len(complete(limited, prompt=["hi"] * 2, n=2, max_tokens=1)["choices"]) == 4
    assert "6 completions" in refused(limited, prompt=["hi"] * 2, n=3, max_tokens=1)["message"]
    assert refused(limited, prompt=["hi"] * 10**5, n=3, max_tokens=1)


@pytest.mark.parametrize("as_ids", [False, True])
def test_api_05_a_too_long_prompt_is_told_by_its_own_length(limited: ThreadServer, as_ids: bool) -> None:
    def of(length: int) -> object:
        return [5] * length if as_ids else "a" * length

    (choice,) = complete(limited, prompt=of(63), ignore_eos=True, return_token_ids=True)["choices"]
    assert (len(choice["token_ids"]), choice["finish_reason"]) == (1, "length")
    for length in (64, 65, 1000):
        error = refused(limited, prompt=of(length))
        assert error["param"] == "prompt"
        assert f"{length} tokens" in error["message"]


@pytest.mark.parametrize("max_tokens", [60, 10**9])
def test_api_05_more_tokens_than_the_context_leaves_end_with_it(limited: ThreadServer, max_tokens: int) -> None:
    answer = complete(limited, prompt=[5] * 8, max_tokens=max_tokens, ignore_eos=True)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 56


def test_smp_15_what_a_request_leaves_out_is_the_models_own_default(
    limited: ThreadServer, opinionated_dir: Path
) -> None:
    with LLM(opinionated_dir, dtype="float32", overrides=["kv_cache.num_blocks=64"]) as llm:
        params = dataclasses.replace(llm.get_default_sampling_params(), seed=1)
        assert (params.temperature, params.top_k, params.max_tokens) == (0.7, 40, 7)
        (expected,) = llm.generate("the hi", params, use_tqdm=False)
    body = {"prompt": "the hi", "seed": 1}
    assert complete(limited, **body)["choices"][0]["text"] == expected.outputs[0].text
    assert joined(chunks(limited, **body))[0]["text"] == expected.outputs[0].text


def test_what_a_request_says_comes_before_the_models_defaults(limited: ThreadServer) -> None:
    answer = complete(limited, prompt="hi", max_tokens=9, ignore_eos=True, seed=1)
    assert answer["usage"]["completion_tokens"] == 9
    greedy = [complete(limited, prompt="hi", temperature=0)["choices"][0]["text"] for _ in range(3)]
    assert len(set(greedy)) == 1
    null = complete(limited, prompt="hi", max_tokens=None, temperature=None, ignore_eos=True)
    assert null["usage"]["completion_tokens"] == 7


def test_a_default_of_the_model_that_does_not_hold_is_told_as_such(tmp_path: Path, tiny_llama_dir: Path) -> None:
    model = with_generation_config(tmp_path / "model", tiny_llama_dir, temperature=5)
    with running_server(model=model) as server:
        assert "generation_config.json" in refused(server, **PROMPT)["message"]
        assert complete(server, temperature=1, **PROMPT)
        assert "generation_config.json" not in refused(server, temperature=5, **PROMPT)["message"]


@pytest.fixture(scope="module")
def with_bos(tmp_path_factory: pytest.TempPathFactory, tiny_llama_dir: Path) -> Iterator[ThreadServer]:
    """A server whose tokenizer puts a BOS before every text."""
    folder = tmp_path_factory.mktemp("bos") / "model"
    shutil.copytree(tiny_llama_dir, folder)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    single = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    backend.post_processor = single
    backend.save(str(folder / "tokenizer.json"))
    with running_server(["model.max_logprobs=-1"], model=folder) as running:
        yield running


def test_e16_the_whole_vocabulary_is_told_where_the_server_has_no_limit(with_bos: ThreadServer) -> None:
    answer = complete(with_bos, prompt="hi", logprobs=-1, return_tokens_as_token_ids=True, max_tokens=1)
    assert len(answer["choices"][0]["logprobs"]["top_logprobs"][0]) == 265
    assert refused(with_bos, prompt="hi", logprobs=266)["param"] == "logprobs"


def test_api_01_an_empty_text_is_a_prompt_where_the_tokenizer_adds_a_bos(with_bos: ThreadServer) -> None:
    for prompt in ("", [""], ["a", ""]):
        answer = complete(with_bos, prompt=prompt, max_tokens=1, return_token_ids=True)
        assert answer["choices"][-1]["prompt_token_ids"] == [1]
        assert refused(with_bos, prompt=prompt, add_special_tokens=False)["param"] == "prompt"
    no_ids: tuple[object, ...] = ([], [[]])
    for ids in no_ids:
        assert refused(with_bos, prompt=ids)["param"] == "prompt"


def test_api_19_a_bos_is_added_to_a_text_unless_told_not_to(with_bos: ThreadServer) -> None:
    hi = with_bos.llm.front.tokenizer.encode("hi", add_special_tokens=False)
    for adds, expected in ((None, [1, *hi]), (True, [1, *hi]), (False, hi)):
        answer = complete(with_bos, prompt="hi", max_tokens=1, add_special_tokens=adds, return_token_ids=True)
        assert answer["choices"][0]["prompt_token_ids"] == expected
        status, tokenized = post(with_bos, "/tokenize", prompt="hi", add_special_tokens=adds)
        assert (status, tokenized["tokens"]) == (200, expected)


def test_an_echo_does_not_show_the_bos_that_was_added(with_bos: ThreadServer) -> None:
    body = {"prompt": "hi the", "echo": True, "logprobs": 0, "temperature": 0, "max_tokens": 2, "ignore_eos": True}
    (choice,) = complete(with_bos, **body)["choices"]
    assert choice["text"].startswith("hi the")
    assert choice["logprobs"]["tokens"][:3] == ["<|im_start|>", "hi", " the"]
    assert choice["logprobs"]["text_offset"][:4] == [0, 0, 2, 6]
