"""InputProcessor: what one model can serve is checked here, before anything is queued."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers
from tokenyard import SamplingParams
from tokenyard.engine.input_processor import InputProcessor, Prompt, TokenizedPrompt
from tokenyard.errors import ValidationError
from tokenyard.model.tokenizer import Tokenizer
from tokenyard.request import EngineCoreRequest, SchedulingHints, ServiceLevel
from tokenyard.scheduler.limits import Limits

MAX_MODEL_LEN = 64


def byte_level() -> Tokenizer:
    """`cat` with and without a blank before it are tokens of their own."""
    merges = [("c", "a"), ("ca", "t"), ("Ġ", "cat")]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in merges)]
    backend = tokenizers.Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>", "<other>"])
    return Tokenizer(backend, {}, None)


def metaspace() -> Tokenizer:
    """A text begins as if a blank were before it."""
    pieces = ["<unk>", "▁", "c", "a", "t", "(", ")", "ca", "cat", "▁cat", "▁(", "s", "\n"]
    merges = [("c", "a"), ("ca", "t"), ("▁", "cat"), ("▁", "(")]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace()
    return Tokenizer(backend, {}, None)


TOKENIZER = byte_level()
VOCAB_SIZE = TOKENIZER.vocab_size
EOS = (VOCAB_SIZE - 2, VOCAB_SIZE - 1)


def make_inputs(**others: Any) -> InputProcessor:
    given_values = {"tokenizer": TOKENIZER, "max_model_len": MAX_MODEL_LEN, "vocab_size": VOCAB_SIZE, **others}
    return InputProcessor(**{"eos_token_ids": EOS, **given_values})


INPUTS = make_inputs()


def requests_of(inputs: InputProcessor = INPUTS, /, **params: Any) -> list[EngineCoreRequest]:
    return inputs.make_requests("7", inputs.tokenize([1, 2, 3]), SamplingParams(**params), 100.0)


def request_of(inputs: InputProcessor = INPUTS, /, **params: Any) -> EngineCoreRequest:
    (request,) = requests_of(inputs, **params)
    return request


def refusal(inputs: InputProcessor = INPUTS, /, **params: Any) -> ValidationError:
    """Of the front end; the engine refuses a request with the same parameters too, where they are about ids."""
    with pytest.raises(ValidationError) as caught:
        requests_of(inputs, **params)
    return caught.value


# ---- Prompts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["", [], {"prompt": ""}, {"prompt_token_ids": []}])
def test_d1_a7_an_empty_prompt_is_refused(prompt: Prompt) -> None:
    with pytest.raises(ValidationError, match="the prompt is empty; give at least one token"):
        INPUTS.tokenize(prompt)


def test_d1_a_prompt_of_special_tokens_alone_is_a_prompt() -> None:
    assert INPUTS.tokenize("<eos><other>").token_ids == list(EOS)
    assert INPUTS.tokenize([EOS[0]]).token_ids == [EOS[0]]


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        ([VOCAB_SIZE], f"prompt token id {VOCAB_SIZE} is outside the vocabulary, 0 to {VOCAB_SIZE - 1}"),
        ([10**6], "prompt token id 1000000 is outside"),
        ([-1], "prompt token id -1 is outside"),
        ([5, -1, 10**6, 6, -1], "prompt token ids -1, 1000000 are outside"),
        ([10**400], "is outside the vocabulary"),
        ([1.5], r"prompt token ids are integers; got 1\.5"),
        ([True], "prompt token ids are integers; got True"),
        ([1, "2"], "prompt token ids are integers; got '2'"),
        ([[1]], "prompt token ids are integers"),
        (b"abc", "a prompt is text, a list of token ids, or a dict"),
        (3, "a prompt is text"),
    ],
)
def test_smp_17_a7_only_ids_that_the_embedding_has_are_a_prompt(prompt: Any, told: str) -> None:
    with pytest.raises(ValidationError, match=told) as caught:
        INPUTS.tokenize(prompt)
    assert len(str(caught.value)) < 1500
    with pytest.raises(ValidationError):
        INPUTS.tokenize({"prompt_token_ids": prompt})
    assert INPUTS.tokenize([VOCAB_SIZE - 1]).token_ids == [VOCAB_SIZE - 1]


def test_a7_a_prompt_leaves_room_for_one_token() -> None:
    assert len(INPUTS.tokenize([1] * (MAX_MODEL_LEN - 1)).token_ids) == MAX_MODEL_LEN - 1
    with pytest.raises(ValidationError, match=f"has {MAX_MODEL_LEN} tokens; .*at most {MAX_MODEL_LEN - 1} of prompt"):
        INPUTS.tokenize([1] * MAX_MODEL_LEN)


def test_a_dict_may_bring_a_salt_that_reaches_the_engine() -> None:
    for prompt in ({"prompt": "cat", "cache_salt": "s"}, {"prompt_token_ids": [1, 2], "cache_salt": "s" * 128}):
        tokenized = INPUTS.tokenize(prompt)
        (request,) = INPUTS.make_requests("7", tokenized, SamplingParams(), 0.0)
        assert request.cache_salt == prompt["cache_salt"]
    assert INPUTS.tokenize({"prompt": "cat", "cache_salt": None}) == INPUTS.tokenize("cat")


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        ({"prompt": "x", "cache_salt": "s" * 129}, "cache_salt='s.* must be text of 1 to 128 characters"),
        ({"prompt": "x", "cache_salt": ""}, "cache_salt='' is not valid"),
        ({"prompt": "x", "cache_salt": 5}, "cache_salt=5 is not valid"),
        ({"prompt": "x", "cache_sald": "s"}, "no key 'cache_sald'; did you mean 'cache_salt'"),
        ({"prompt": "x", "multi_modal_data": {}}, "no key 'multi_modal_data'"),
        ({"prompt": "x", "prompt_token_ids": [1]}, "one key of 'prompt' .text. and 'prompt_token_ids'"),
        ({"prompt": 3}, "one key of"),
        ({"cache_salt": "s"}, "one key of"),
        ({}, "one key of"),
    ],
)
def test_d22_a_dict_has_known_keys_of_a_bounded_size(prompt: dict[str, object], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        INPUTS.tokenize(prompt)


# ---- Parameters that need the model ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids", "logit_bias"])
def test_a8_d9_every_id_outside_the_vocabulary_is_named(name: str) -> None:
    ids = [VOCAB_SIZE, 5, 10**6, VOCAB_SIZE - 1]
    error = refusal(**{name: dict.fromkeys(ids, 1.0) if name == "logit_bias" else ids})
    assert error.parameter == name
    assert f"token ids {VOCAB_SIZE}, 1000000 are outside the vocabulary, 0 to {VOCAB_SIZE - 1}" in str(error)
    fine = {5: 1.0, VOCAB_SIZE - 1: 1.0} if name == "logit_bias" else [5, VOCAB_SIZE - 1]
    assert request_of(**{name: fine})


@given(st.lists(st.integers(0, 2 * VOCAB_SIZE), min_size=1))
def test_d9_the_engine_refuses_the_same_ids_as_the_front_end(ids: list[int]) -> None:
    limits = Limits(max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB_SIZE, capacity=MAX_MODEL_LEN)
    for params in ({"allowed_token_ids": ids}, {"logit_bias": dict.fromkeys(ids, 1.0)}, {"stop_token_ids": ids[:200]}):
        request = dataclasses.replace(request_of(), params=SamplingParams(**params))
        request = dataclasses.replace(request, stop_token_ids=tuple(request.params.stop_token_ids or ()))  # type: ignore[union-attr]
        found = []
        for check in (lambda: requests_of(**params), lambda: limits.total_length(request)):  # noqa: B023
            try:
                check()
            except ValidationError as error:
                found.append(error.parameter)
        assert len(found) in (0, 2)
        assert bool(found) == (max(params.get("stop_token_ids", ids)) >= VOCAB_SIZE)


def test_a9_stop_ids_are_the_models_and_the_requests_each_once() -> None:
    both = request_of(stop_token_ids=[7, EOS[0], 7, 5])
    assert (both.stop_token_ids, both.eos_token_ids) == ((*EOS, 7, 5), EOS)


def test_smp_10_e8_ignoring_eos_ignores_all_of_them_but_not_the_requests_own() -> None:
    ignoring = request_of(stop_token_ids=[7, EOS[0]], ignore_eos=True)
    assert (ignoring.stop_token_ids, ignoring.eos_token_ids) == ((7, EOS[0]), ())


def test_more_stop_ids_than_the_engine_takes_are_refused_before_it_is_asked() -> None:
    with pytest.raises(ValidationError, match="258, the model's own included; at most 256"):
        requests_of(make_inputs(vocab_size=1000), stop_token_ids=list(range(256)))


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_e16_d14_logprobs_are_limited_by_the_models_limit(name: str) -> None:
    for fine in (0, 1, 20):
        assert request_of(**{name: fine})
    for asked, told in (
        (21, f"{name}=21 is above model.max_logprobs=20"),
        (-1, f"{name}=-1, the whole vocabulary, is"),
    ):
        error = refusal(**{name: asked})
        assert error.parameter == name
        assert told in str(error)
    assert request_of(make_inputs(max_logprobs=-1), **{name: -1})
    assert request_of(make_inputs(max_logprobs=VOCAB_SIZE), **{name: -1})
    assert request_of(make_inputs(max_logprobs=-1), **{name: VOCAB_SIZE})
    assert refusal(make_inputs(max_logprobs=0), **{name: 1})


@pytest.mark.parametrize("asked", [VOCAB_SIZE + 1, 10**9])
def test_smp_17_more_logprobs_than_there_are_tokens_are_refused(asked: int) -> None:
    error = refusal(make_inputs(max_logprobs=-1), logprobs=asked)
    assert f"logprobs={asked} is more than the vocabulary, {VOCAB_SIZE} tokens; -1 asks for all of it" in str(error)


def test_k5_prompt_logprobs_and_a_wish_keep_a_request_from_reading_the_prefix_cache() -> None:
    assert request_of(prompt_logprobs=0).skip_prefix_cache
    assert request_of(skip_reading_prefix_cache=True).skip_prefix_cache
    assert not request_of(logprobs=0).skip_prefix_cache
    assert not request_of(skip_reading_prefix_cache=False).skip_prefix_cache


def test_d10_min_tokens_must_fit_behind_the_prompt() -> None:
    assert request_of(max_tokens=None, min_tokens=MAX_MODEL_LEN - 3)
    for asked in (MAX_MODEL_LEN - 2, 2**31):
        assert "leaves after a prompt of 3" in str(refusal(max_tokens=None, min_tokens=asked))


def test_extra_args_that_nobody_reads_are_refused() -> None:
    assert "choose one with logits_processors=[NAME]" in str(refusal(extra_args={"a": 1}))
    assert request_of(make_inputs(has_logits_processors=True), extra_args={"a": 1})
    assert request_of(extra_args={})


# ---- Bad words -------------------------------------------------------------------------------------------------------


def contains(ids: list[int], sequence: tuple[int, ...]) -> bool:
    return any(tuple(ids[start : start + len(sequence)]) == sequence for start in range(len(ids)))


@pytest.mark.parametrize("make", [byte_level, metaspace])
@pytest.mark.parametrize("given_word", ["cat", " cat", "  cat"])
def test_e14_a_bad_word_is_found_at_the_start_inside_and_after_other_characters(make: Any, given_word: str) -> None:
    tokenizer = make()
    inputs = make_inputs(tokenizer=tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=())
    spellings = request_of(inputs, bad_words=[given_word]).bad_words_token_ids
    assert len(set(spellings)) == len(spellings)
    for text in ("cat", "a cat", "(cat)"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert any(contains(ids, spelling) for spelling in spellings), (text, ids, spellings)
    for text in ("act", "a ca t"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert not any(contains(ids, spelling) for spelling in spellings), (text, ids, spellings)


def test_e14_bad_words_of_several_tokens_and_special_ones_and_of_blanks_have_spellings() -> None:
    assert tuple(TOKENIZER.encode("dog")) in request_of(bad_words=["dog"]).bad_words_token_ids
    assert (EOS[1],) in request_of(bad_words=["<other>"]).bad_words_token_ids
    assert tuple(TOKENIZER.encode("  ")) in request_of(bad_words=["  "]).bad_words_token_ids
    assert request_of().bad_words_token_ids == ()


def test_e14_a_spelling_that_the_model_has_no_row_for_needs_no_ban() -> None:
    small = make_inputs(vocab_size=256, eos_token_ids=())  # without the merged tokens
    assert all(max(ids) < 256 for ids in request_of(small, bad_words=["cat", "dog"]).bad_words_token_ids)


# ---- Several choices -------------------------------------------------------------------------------------------------


def test_req_06_each_choice_is_a_request_that_ends_where_one_of_its_own_would() -> None:
    params = {"max_tokens": None, "stop_token_ids": [5], "bad_words": ["cat"], "prompt_logprobs": 1, "seed": 2**63 - 1}
    alone, children = request_of(**params), requests_of(n=3, **params)
    assert alone.parent_id is None
    assert [child.request_id for child in children] == ["0_7", "1_7", "2_7"]
    assert [child.params.seed for child in children] == [2**63 - 1, 0, 1]  # type: ignore[union-attr]
    assert [child.params.prompt_logprobs for child in children] == [1, None, None]  # type: ignore[union-attr]
    for child in children:
        assert child.parent_id == "7"
        assert isinstance(child.params, SamplingParams)
        params_of_one = dataclasses.replace(child.params, seed=2**63 - 1, prompt_logprobs=1)
        own = dataclasses.replace(child, request_id="7", parent_id=None, params=params_of_one)
        assert _comparable(own) == _comparable(alone)


def test_smp_12_greedy_choices_are_equal_requests() -> None:
    first, second = requests_of(n=2, temperature=0)
    assert first.params == second.params == SamplingParams(temperature=0)


def test_d7_a_bad_one_of_n_makes_none() -> None:
    assert refusal(n=16384, allowed_token_ids=[VOCAB_SIZE]).parameter == "allowed_token_ids"


def test_the_engine_takes_one_choice_a_request() -> None:
    limits = Limits(max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB_SIZE, capacity=MAX_MODEL_LEN)
    with pytest.raises(ValidationError, match="n=2: the engine takes a request for each choice"):
        limits.total_length(dataclasses.replace(request_of(), params=SamplingParams(n=2)))
    for changes, told in (
        ({"bad_words_token_ids": ((1, VOCAB_SIZE),)}, "bad_words: token id"),
        ({"cache_salt": 5}, "cache_salt=5"),
        ({"lora_name": b"x"}, "lora_name="),
    ):
        with pytest.raises(ValidationError, match=told):
            limits.total_length(dataclasses.replace(request_of(), **changes))


def _comparable(request: EngineCoreRequest) -> dict[str, object]:
    values = {field.name: getattr(request, field.name) for field in dataclasses.fields(request)}
    return {**values, "prompt_token_ids": request.prompt_token_ids.tolist()}


# ---- Scheduling ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Metadata:
    weight: float = 1.0


def test_hints_and_priority_reach_the_engine_with_the_deadline_on_its_clock() -> None:
    hints = SchedulingHints(
        deadline=2.5, client_id="c", session_id="s", service_level=ServiceLevel(ttft=0.1), metadata=Metadata(weight=3.0)
    )
    prompt = TokenizedPrompt(None, [1])
    for request in INPUTS.make_requests("7", prompt, SamplingParams(n=2), 100.0, priority=-4, scheduling=hints):
        assert request.deadline == 102.5
        assert (request.client_id, request.session_id, request.priority) == ("c", "s", -4)
        assert request.service_level == ServiceLevel(ttft=0.1)
        assert request.metadata == {"weight": 3.0}
    (plain,) = INPUTS.make_requests("7", prompt, SamplingParams(), 100.0)
    assert (plain.deadline, plain.client_id, plain.service_level, plain.metadata) == (None, None, None, {})


@pytest.mark.parametrize("length", [100, 10**12, 10**30])
def test_a_prompt_that_is_too_long_is_refused_by_its_length_without_a_look_at_its_tokens(length: int) -> None:
    with pytest.raises(ValidationError, match=r"the prompt has \d+ tokens"):
        INPUTS.tokenize(range(length))
