"""The parts of a choice, however they are cut, make the whole."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import tokenizers
from completion_calls import joined
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers
from tokenyard.engine.detokenizer import Detokenizer
from tokenyard.engine.input_processor import TokenizedPrompt
from tokenyard.model.files import resolve_model
from tokenyard.model.tokenizer import Tokenizer, load_tokenizer
from tokenyard.outputs import CompletionOutput, Logprob, LogprobsOfPosition, RequestOutput
from tokenyard.server.chunks import ChunkFrame
from tokenyard.server.completion_choices import ChoiceOptions, PromptWriter
from tokenyard.server.completion_stream import CompletionStream
from tokenyard.server.logprobs import prompt_offsets

IDS = st.lists(st.integers(min_value=0, max_value=264), min_size=1, max_size=12)


@pytest.fixture(scope="module")
def tokenizer(tiny_llama_dir: Path) -> Tokenizer:
    return load_tokenizer(resolve_model(str(tiny_llama_dir)))


def position(tokenizer: Tokenizer, token_id: int) -> LogprobsOfPosition:
    ids = (token_id, (token_id + 1) % 265)
    data = {one: tokenizer.token_bytes(one) for one in ids}
    return {
        one: Logprob(
            logprob=-1.0 - one, rank=1, decoded_token=data[one].decode("utf-8", "replace"), token_bytes=data[one]
        )
        for one in ids
    }


def outputs(
    tokenizer: Tokenizer, prompt: Sequence[int], choices: Sequence[Sequence[int]], order: Sequence[int]
) -> list[RequestOutput]:
    """Deltas in which the choices take a token each, in this order; the prompt's logprobs come with the first one's."""
    detokenizers = [Detokenizer(tokenizer, prompt) for _ in choices]
    made: list[RequestOutput] = []
    marks = [0] * len(choices)
    prompt_logprobs = [None, *(position(tokenizer, token) for token in prompt[1:])]
    for index in order:
        detokenizer, place = detokenizers[index], len(detokenizers[index].token_ids)
        token_id = choices[index][place]
        detokenizer.add([token_id])
        is_last = place + 1 == len(choices[index])
        if is_last:
            detokenizer.finish()
        delta = CompletionOutput(
            index=index,
            text=detokenizer.text_since(marks[index]),
            token_ids=[token_id],
            logprobs=[position(tokenizer, token_id)],
            finish_reason="length" if is_last else None,
        )
        marks[index] = detokenizer.num_pieces
        made.append(
            RequestOutput(
                request_id="r",
                prompt=None,
                prompt_token_ids=list(prompt),
                prompt_logprobs=prompt_logprobs if index == 0 and place == 0 else None,
                outputs=[delta],
                finished=False,
            )
        )
    return made


def whole(deltas: Sequence[RequestOutput]) -> RequestOutput:
    """What a request that is no stream gets."""
    made: dict[int, CompletionOutput] = {}
    for output in deltas:
        for part in output.outputs:
            one = made.setdefault(part.index, CompletionOutput(index=part.index, text="", token_ids=[], logprobs=[]))
            one.text += part.text
            one.token_ids = [*one.token_ids, *part.token_ids]
            one.logprobs = [*(one.logprobs or ()), *(part.logprobs or ())]
            one.finish_reason = part.finish_reason
    return RequestOutput(
        request_id="r",
        prompt=None,
        prompt_token_ids=deltas[0].prompt_token_ids,
        prompt_logprobs=next(output.prompt_logprobs for output in deltas if output.prompt_logprobs),
        outputs=[made[index] for index in sorted(made)],
        finished=True,
    )


@settings(max_examples=150, deadline=None)
@given(st.data(), IDS, st.lists(IDS, min_size=1, max_size=3), st.booleans(), st.booleans(), st.booleans())
def test_a2_txt_16_the_events_of_a_stream_put_together_are_the_whole(
    tokenizer: Tokenizer,
    data: st.DataObject,
    prompt: list[int],
    choices: list[list[int]],
    echo: bool,
    has_logprobs: bool,
    has_token_ids: bool,
) -> None:
    turns = [index for index, ids in enumerate(choices) for _ in ids]
    deltas = outputs(tokenizer, prompt, choices, data.draw(st.permutations(turns)))
    options = ChoiceOptions(num_choices=len(choices), echo=echo, has_logprobs=has_logprobs, has_token_ids=has_token_ids)
    tokenized = TokenizedPrompt(None, prompt)
    frame = ChunkFrame(object_name="text_completion", response_id="cmpl-1", created=1, model="m")
    stream = CompletionStream(
        frame, [tokenized], tokenizer, options, includes_usage=True, has_continuous_usage=has_token_ids
    )
    events = [event for delta in deltas for event in stream.events(0, delta)]
    last = stream.usage_event()
    assert last is not None
    parts = joined(msgspec.json.decode(event.removeprefix(b"data: ")) for event in events)
    answer = PromptWriter(0, tokenized, tokenizer, options).take(whole(deltas))
    assert sorted(parts) == [choice.index for choice in answer]
    for choice in msgspec.to_builtins(answer):
        part = parts[choice["index"]]
        assert (part["text"], part["finish_reason"]) == (choice["text"], "length")
        assert part["logprobs"] == choice["logprobs"]
        assert part["token_ids"] == choice.get("token_ids", [])
    usage = msgspec.json.decode(last.removeprefix(b"data: "))["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), sum(map(len, choices)))


@settings(max_examples=100, deadline=None)
@given(IDS, IDS, st.booleans())
def test_txt_15_the_offset_of_a_token_is_the_length_of_the_text_before_it(
    tokenizer: Tokenizer, prompt: list[int], ids: list[int], echo: bool
) -> None:
    options = ChoiceOptions(num_choices=1, echo=echo, has_logprobs=True)
    answer = whole(outputs(tokenizer, prompt, [ids], [0] * len(ids)))
    (choice,) = PromptWriter(0, TokenizedPrompt(None, prompt), tokenizer, options).take(answer)
    assert choice.logprobs is not None
    detokenizer = Detokenizer(tokenizer, prompt)
    before = len(tokenizer.decode(prompt)) if echo else 0
    for offset, token_id in zip(choice.logprobs.text_offset[len(prompt) if echo else 0 :], ids, strict=True):
        assert offset == before + len(detokenizer.text)
        detokenizer.add([token_id])


def test_where_a_tokenizer_changes_the_text_the_next_token_that_is_found_sets_the_offset_right() -> None:
    backend = tokenizers.Tokenizer(models.BPE({one: place for place, one in enumerate("hiqĠ")}, []))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    lower = Tokenizer(backend, {}, None)
    text = "QQ hi"
    ids = lower.encode(text)
    assert prompt_offsets(lower, text, ids) == [0, 0, 2, 3, 4]


def test_the_pieces_of_a_plain_event_are_what_its_fields_would_be(tokenizer: Tokenizer) -> None:
    frame = ChunkFrame(object_name="text_completion", response_id='cm"pl', created=1, model="mödel\\")
    (delta,) = outputs(tokenizer, [5], [[60, 61]], [0])
    text = 'quotes " and \\ and \n and \u2028 and 世'
    delta.outputs[0].text = text
    events = {}
    for name, has_ids in (("plain", False), ("fields", True)):
        stream = CompletionStream(
            frame,
            [TokenizedPrompt(None, [5])],
            tokenizer,
            ChoiceOptions(num_choices=1, has_token_ids=has_ids),
            includes_usage=False,
            has_continuous_usage=False,
        )
        (event,) = stream.events(0, delta)
        events[name] = msgspec.json.decode(event.removeprefix(b"data: "))
    for extra in ("token_ids", "prompt_token_ids"):
        events["fields"]["choices"][0].pop(extra)
    assert events["plain"] == events["fields"]
    assert events["plain"]["choices"][0]["text"] == text
    assert (events["plain"]["id"], events["plain"]["model"]) == ('cm"pl', "mödel\\")
