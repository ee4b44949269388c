"""Text to ids and back, one token at a time too."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from chats import sentencepiece_like
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenyard.errors import ValidationError
from tokenyard.model.text_stream import TextStream
from tokenyard.model.tokenizer import Tokenizer


def test_encoding_and_decoding_agree(tiny: Tokenizer) -> None:
    ids = tiny.encode("hi the 12 ü😀")
    assert tiny.decode(ids) == "hi the 12 ü😀"
    assert tiny.decode([]) == ""
    assert tiny.id_to_token(2) == "<|im_end|>"
    assert tiny.token_to_id("<|im_end|>") == 2
    assert tiny.id_to_token(10**9) is None
    assert tiny.vocab_size == 265
    assert tiny.decode([10**6]) == ""
    with pytest.raises(ValidationError):
        tiny.decode([-1])


def test_control_tokens_in_text_are_parsed_only_when_asked_for(tiny: Tokenizer) -> None:
    text = "hi <|im_end|> the"
    assert 2 in tiny.encode(text)
    ids = tiny.encode(text, parse_special=False)
    assert not tiny.special_ids & set(ids)
    assert tiny.decode(ids) == text


def collect(tokenizer: Tokenizer, ids: Sequence[int], skip: bool = True) -> list[str]:
    stream = tokenizer.new_stream(skip)
    return [delta for index in ids if (delta := stream.step(index)) is not None] + [stream.flush()]


def test_txt_07_no_delta_shows_half_a_character(tiny: Tokenizer) -> None:
    ids = tiny.encode("你好😀ď")
    deltas = collect(tiny, ids)
    assert all("\ufffd" not in delta for delta in deltas)
    assert "".join(deltas) == "你好😀ď"
    assert [delta for delta in deltas if delta] == list("你好😀ď")


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=30), ids=st.lists(st.integers(0, 270), max_size=60), skip=st.booleans())
def test_txt_07_deltas_add_up_to_the_full_decode_for_any_ids(
    tiny: Tokenizer, text: str, ids: list[int], skip: bool
) -> None:
    everything = tiny.encode(text) + ids
    assert "".join(collect(tiny, everything, skip)) == tiny.decode(everything, skip_special_tokens=skip)


@given(text=st.text(alphabet="ab hi\n你😀ü", max_size=30))
def test_txt_07_byte_fallback_and_leading_spaces_add_up_too(text: str) -> None:
    tokenizer = sentencepiece_like()
    ids = tokenizer.encode(text, add_special_tokens=False)
    deltas = collect(tokenizer, ids)
    assert "".join(deltas) == tokenizer.decode(ids)
    assert all("\ufffd" not in delta for delta in deltas)


def test_txt_07_withheld_text_is_bounded_and_flushed(tiny: Tokenizer) -> None:
    start_byte = tiny.encode("😀")[0]
    stream = tiny.new_stream()
    shown = sum(len(stream.step(start_byte) or "") for _ in range(1000))
    assert shown >= 997
    assert shown + len(stream.flush()) == 1000


@pytest.mark.parametrize("garbage", [True, False])
def test_a_step_never_decodes_more_than_a_bounded_window(tiny: Tokenizer, garbage: bool) -> None:
    seen: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        seen.append(len(ids))
        return tiny.decode(ids)

    text = tiny.encode("😀")[:1] * 300 if garbage else tiny.encode("hi 😀" * 100) + [9999] * 300
    stream = TextStream(decode, skipped_ids=frozenset())
    assert "".join([*(stream.step(index) or "" for index in text), stream.flush()]) == tiny.decode(text)
    assert max(seen) <= 40


def test_a_stream_with_the_prompts_end_keeps_a_leading_space() -> None:
    tokenizer = sentencepiece_like()
    prompt, answer = tokenizer.encode("hi"), tokenizer.encode("ab", add_special_tokens=False)
    alone, after = tokenizer.new_stream(), tokenizer.new_stream(prompt_ids=prompt)
    assert (alone.step(answer[0]), after.step(answer[0])) == ("ab", " ab")


@pytest.mark.parametrize("parse_special", [True, False])
def test_other_threads_go_on_while_a_long_text_is_encoded(tiny: Tokenizer, parse_special: bool) -> None:
    """D17: encoding holds the interpreter's lock unless it is asked for a batch."""
    text = "hi the 12 " * 50_000
    turns, is_done = 0, threading.Event()

    def count() -> None:
        nonlocal turns
        while not is_done.wait(0.001):
            turns += 1

    thread = threading.Thread(target=count)
    thread.start()
    ids = tiny.encode(text, parse_special=parse_special)
    seen = turns
    is_done.set()
    thread.join()
    assert len(ids) > 2000
    assert seen > 5
