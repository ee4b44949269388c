"""ByteStream, TextStream, TokenBytes: ids to text one at a time, for every kind of tokenizer."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_tokenizers import ADDED, BOS, EOS, byte_fallback, byte_level, metaspace, word_pieces
from tokenyard.model.files import resolve_model
from tokenyard.model.text_stream import TextStream
from tokenyard.model.tokenizer import Tokenizer, load_tokenizer

BYTE_LEVEL = byte_level()
LLAMA_LIKE, GEMMA_LIKE = byte_fallback(), byte_fallback(strips=False)
METASPACE, WORD_PIECES = metaspace(), word_pieces()
ALL = {
    "byte_level": BYTE_LEVEL,
    "llama_like": LLAMA_LIKE,
    "gemma_like": GEMMA_LIKE,
    "metaspace": METASPACE,
    "word_pieces": WORD_PIECES,
}
COMPLETE = [BYTE_LEVEL, LLAMA_LIKE, GEMMA_LIKE]  # these can spell every text
FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"  # one emoji of five characters, joined
ODD_TEXTS = [
    "你好😀ď",
    f"{FAMILY} {FAMILY}",
    "🇨🇭🏳\ufe0f\u200d🌈👍🏽",
    "éạ\u0308z\u0324\u0359͒",
    "  a  b   世\n\n\tx ",
    f"a{ADDED}世{BOS}é{EOS} b",
    "\ufffd real \ufffd\ufffd",
    "﷽نعم؟",
    "\U0010ffff\x7f ",
]
REPLACEMENT = "\ufffd"


def deltas_of(tokenizer: Tokenizer, ids: Sequence[int], *, skip: bool = True, prompt: Sequence[int] = ()) -> list[str]:
    stream = tokenizer.new_stream(skip, prompt)
    return [*(stream.step(token_id) for token_id in ids), stream.flush()]


def text_of(tokenizer: Tokenizer, ids: Sequence[int], *, skip: bool = True, prompt: Sequence[int] = ()) -> str:
    return "".join(deltas_of(tokenizer, ids, skip=skip, prompt=prompt))


def any_ids(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Any tokens in any order, and ids that there are no tokens for."""
    return st.lists(st.integers(0, tokenizer.vocab_size + 5), max_size=40)


def byte_tokens(data: Iterable[int]) -> list[int]:
    return [LLAMA_LIKE.token_to_id(f"<0x{byte:02X}>") or 0 for byte in data]


# Texts


@pytest.mark.parametrize("text", ODD_TEXTS)
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("tokenizer", COMPLETE)
def test_txt_07_every_character_comes_whole_and_once(tokenizer: Tokenizer, text: str, skip: bool) -> None:
    ids = tokenizer.encode(text)
    deltas = deltas_of(tokenizer, ids, skip=skip)
    assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=skip)
    if REPLACEMENT not in text:
        assert REPLACEMENT not in "".join(deltas)
    assert not deltas[-1]  # nothing was left for the end


@settings(deadline=None)
@given(text=st.text(max_size=40), tokenizer=st.sampled_from(COMPLETE))
def test_txt_07_deltas_of_any_text_add_up_to_it(text: str, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(text)
    deltas = deltas_of(tokenizer, ids)
    assert "".join(deltas) == tokenizer.decode(ids)
    assert deltas[-1] == ""


def test_txt_07_a_character_is_withheld_no_longer_than_it_takes() -> None:
    for tokenizer in COMPLETE:
        ids = tokenizer.encode("a😀b😀")
        shown = list(itertools.accumulate(deltas_of(tokenizer, ids)))
        for count in range(len(ids) + 1):
            whole = tokenizer.decode(ids[:count]).rstrip(REPLACEMENT)
            assert (shown[count - 1] if count else "") == whole


def test_txt_11_a_character_is_not_sent_twice() -> None:
    ids = BYTE_LEVEL.encode("A 世")
    incomplete = BYTE_LEVEL.encode("é")[:1]
    shown = list(itertools.accumulate(deltas_of(BYTE_LEVEL, [*ids, *incomplete, *BYTE_LEVEL.encode("ab")])))
    assert shown[-1] == "A 世\ufffdab"
    assert all(after.startswith(before) for before, after in itertools.pairwise(shown))


# Any ids


@settings(max_examples=300, deadline=None)
@given(ids=any_ids(BYTE_LEVEL), skip=st.booleans())
@example(ids=[], skip=True)
def test_e10_any_ids_of_a_byte_level_tokenizer_give_their_full_decode(ids: list[int], skip: bool) -> None:
    assert text_of(BYTE_LEVEL, ids, skip=skip) == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(data=st.lists(st.sampled_from([0x41, 0x80, 0xBF, 0xC2, 0xE0, 0xA0, 0xED, 0xF0, 0x90, 0xF4, 0xFF]), max_size=12))
def test_e10_bytes_that_are_no_utf_8_come_out_as_in_the_full_decode(data: list[int]) -> None:
    table = {BYTE_LEVEL.token_bytes(token_id): token_id for token_id in range(256)}
    ids = [table[bytes([byte])] for byte in data]
    assert text_of(BYTE_LEVEL, ids) == BYTE_LEVEL.decode(ids) == bytes(data).decode("utf-8", "replace")


def expected_of_byte_tokens(tokenizer: Tokenizer, ids: Sequence[int], *, skip: bool) -> str:
    """Run by run: the characters before the first wrong byte, then one U+FFFD for each byte to the end of the run."""
    text, run = "", b""

    def shown(run: bytes) -> str:
        try:
            return run.decode()
        except UnicodeDecodeError as error:
            good = run[: error.start].decode()
            return good + REPLACEMENT * (len(run) - error.start)

    for token_id in ids:
        token = tokenizer.id_to_token(token_id)
        if token is None or (skip and token_id in tokenizer.special_ids):
            continue
        if match := re.fullmatch("<0x(..)>", token):
            run += bytes.fromhex(match[1])
        else:
            text, run = text + shown(run) + token.replace("▁", " "), b""
    text += shown(run)
    return text.removeprefix(" ") if tokenizer is LLAMA_LIKE else text


@settings(max_examples=300, deadline=None)
@given(
    tokenizer=st.sampled_from([LLAMA_LIKE, GEMMA_LIKE]),
    ids=any_ids(LLAMA_LIKE) | st.lists(st.sampled_from([0x0A, 0x41, 0xE4, 0xBD, 0xA0, 258, 256, 900]), max_size=20),
    skip=st.booleans(),
)
def test_e10_any_ids_with_byte_tokens_show_characters_and_one_replacement_for_each_wrong_byte(
    tokenizer: Tokenizer, ids: list[int], skip: bool
) -> None:
    assert text_of(tokenizer, ids, skip=skip) == expected_of_byte_tokens(tokenizer, ids, skip=skip)


@settings(deadline=None)
@given(data=st.lists(st.integers(0x80, 0xFF), max_size=8), before=st.booleans(), after=st.booleans())
def test_e10_a_run_of_byte_tokens_that_begins_wrong_gives_its_full_decode(
    data: list[int], before: bool, after: bool
) -> None:
    ids = [*LLAMA_LIKE.encode("a") * before, *byte_tokens([0xFF, *data]), *LLAMA_LIKE.encode("世") * after]
    assert text_of(LLAMA_LIKE, ids) == LLAMA_LIKE.decode(ids)


@pytest.mark.parametrize("name", ALL)
def test_txt_09_two_thousand_random_tokens_never_raise(name: str) -> None:
    tokenizer = ALL[name]
    for seed in range(50):
        ids = random.Random(seed).choices(range(tokenizer.vocab_size + 3), k=2000)
        text = text_of(tokenizer, ids)
        if name in ("byte_level", "metaspace"):
            assert text == tokenizer.decode(ids)


def test_txt_09_the_stream_goes_on_after_wrong_bytes() -> None:
    for tokenizer in COMPLETE:
        wrong = tokenizer.encode("😀")[:2]
        assert text_of(tokenizer, [*wrong, *tokenizer.encode("x 世 😀")]).lstrip(REPLACEMENT).strip() == "x 世 😀"


@pytest.mark.parametrize("name", ALL)
def test_smp_07_ids_that_the_tokenizer_does_not_know_have_no_text(name: str) -> None:
    tokenizer = ALL[name]
    unknown = tokenizer.vocab_size + 7
    ids = [unknown, *tokenizer.encode("a"), unknown, 10**6, *tokenizer.encode("b"), unknown]
    assert text_of(tokenizer, ids) == tokenizer.decode(ids)
    assert text_of(tokenizer, [unknown] * 100) == ""
    assert [tokenizer.token_bytes(token_id) for token_id in (unknown, 2**31, 2**63, -1)] == [b""] * 4


@settings(deadline=None)
@given(ids=any_ids(METASPACE), skip=st.booleans())
def test_a_metaspace_decoder_drops_marks_of_the_first_token_only(ids: list[int], skip: bool) -> None:
    assert text_of(METASPACE, ids, skip=skip) == METASPACE.decode(ids, skip_special_tokens=skip)


@settings(deadline=None)
@given(ids=any_ids(WORD_PIECES))
def test_a_decoder_of_another_kind_gives_its_full_decode(ids: list[int]) -> None:
    assert text_of(WORD_PIECES, ids) == WORD_PIECES.decode(ids)


def test_special_tokens_show_only_when_they_are_wanted() -> None:
    for tokenizer in COMPLETE:
        ids = tokenizer.encode(f"世{EOS}{ADDED}é")
        assert text_of(tokenizer, ids).replace(" ", "") == f"世{ADDED}é"
        assert text_of(tokenizer, ids, skip=False).replace(" ", "") == f"世{EOS}{ADDED}é"


# What stands before


@pytest.mark.parametrize("cut", [1, 2])
@pytest.mark.parametrize("tokenizer", COMPLETE)
def test_txt_10_nothing_of_the_prompt_is_in_the_first_delta(tokenizer: Tokenizer, cut: int) -> None:
    character = tokenizer.encode("x你")[-3:]
    assert tokenizer.decode(character) == "你"
    prompt = [*tokenizer.encode("Hello "), *character[:cut]]
    completed = [*character[cut:], *tokenizer.encode("ab")]
    assert text_of(tokenizer, completed, prompt=prompt).replace(" ", "") == "你ab"
    assert text_of(tokenizer, tokenizer.encode("ab"), prompt=prompt).strip() == "ab"
    assert text_of(tokenizer, [], prompt=prompt) == ""
    assert text_of(tokenizer, [tokenizer.vocab_size + 3], prompt=prompt) == ""


INCOMPLETE = re.compile(  # RFC 3629: what a character begins with
    rb"(?:[\xc2-\xdf]|\xe0[\xa0-\xbf]?|\xed[\x80-\x9f]?|[\xe1-\xec\xee\xef][\x80-\xbf]?"
    rb"|\xf0(?:[\x90-\xbf][\x80-\xbf]?)?|[\xf1-\xf3](?:[\x80-\xbf][\x80-\xbf]?)?|\xf4(?:[\x80-\x8f][\x80-\xbf]?)?)\Z"
)


def text_after(prompt: bytes, output: bytes) -> str:
    """An incomplete character at the prompt's end belongs to the text if the output goes on with it."""
    match = INCOMPLETE.search(prompt)
    begun = match[0] if match is not None and output else b""
    going_on = begun + output[:1]
    is_continued = INCOMPLETE.fullmatch(going_on) is not None or REPLACEMENT not in going_on.decode("utf-8", "replace")
    return ((begun if is_continued else b"") + output).decode("utf-8", "replace")


@settings(max_examples=300, deadline=None)
@given(prompt=any_ids(BYTE_LEVEL), ids=any_ids(BYTE_LEVEL))
@example(prompt=[172], ids=[94, 94])
@example(prompt=[169], ids=[94])
def test_txt_10_the_text_after_a_prompt_has_nothing_of_it_but_a_character_that_goes_on(
    prompt: list[int], ids: list[int]
) -> None:
    before, after = (b"".join(map(BYTE_LEVEL.token_bytes, part)) for part in (prompt, ids))
    assert text_of(BYTE_LEVEL, ids, skip=False, prompt=prompt) == text_after(before, after)


@settings(deadline=None)
@given(prompt=st.text(min_size=1, max_size=10), text=st.text(max_size=10), tokenizer=st.sampled_from(COMPLETE))
def test_txt_10_the_text_after_a_whole_prompt_is_the_full_decode_without_it(
    prompt: str, text: str, tokenizer: Tokenizer
) -> None:
    before, after = tokenizer.encode(prompt), tokenizer.encode(text)
    whole = tokenizer.decode(before + after)
    assert text_of(tokenizer, after, prompt=before) == whole[len(tokenizer.decode(before)) :]


@settings(deadline=None)
@given(
    prompt=st.lists(st.sampled_from([0x41, 0xE4, 0xBD, 0xF0, 0x9F]), max_size=5),
    output=st.lists(st.sampled_from([0x41, 0xE4, 0xBD, 0xA0, 0x98]), min_size=1, max_size=4),
)
@example(prompt=[0xE4, 0xBD], output=[0x41])
def test_txt_10_byte_tokens_after_a_prompt_have_nothing_of_it_but_a_character_that_goes_on(
    prompt: list[int], output: list[int]
) -> None:
    text = text_of(LLAMA_LIKE, byte_tokens(output), prompt=[*LLAMA_LIKE.encode("x"), *byte_tokens(prompt)])
    shown = text_after(bytes(prompt), bytes(output))
    assert text.rstrip(REPLACEMENT) == shown[: len(text.rstrip(REPLACEMENT))]
    assert len(text) <= len(output)  # no replacement for a byte of the prompt
    if REPLACEMENT not in shown:
        assert text == shown


@pytest.mark.parametrize("cut", [1, 2])
def test_txt_10_a_stream_for_any_decoder_shows_nothing_of_the_prompt_either(cut: int) -> None:
    character = BYTE_LEVEL.encode("你")

    def text(output: Sequence[int]) -> str:
        prompt = [*BYTE_LEVEL.encode("ab"), *character[:cut]]
        stream = TextStream(BYTE_LEVEL.decode, skipped_ids=frozenset(), prompt_ids=prompt)
        return "".join([*(stream.step(token_id) for token_id in output), stream.flush()])

    assert text([*character[cut:], *BYTE_LEVEL.encode("ab")]) == "你ab"
    assert text(BYTE_LEVEL.encode("ab 你")) == "ab 你"
    assert text([]) == ""


def test_txt_10_a_real_replacement_character_in_the_prompt_stays_there() -> None:
    for tokenizer in COMPLETE:
        assert text_of(tokenizer, tokenizer.encode("世"), prompt=tokenizer.encode("a\ufffd")).strip() == "世"


def test_the_space_before_a_first_word_is_kept_after_a_prompt_and_dropped_after_control_tokens() -> None:
    word, prompt = LLAMA_LIKE.encode("ab"), LLAMA_LIKE.encode("x")
    bos = [LLAMA_LIKE.token_to_id(BOS) or 0]
    assert text_of(LLAMA_LIKE, word, prompt=prompt) == " ab"
    assert text_of(LLAMA_LIKE, word, prompt=bos) == "ab"
    assert text_of(LLAMA_LIKE, word, prompt=bos, skip=False) == " ab"
    assert text_of(LLAMA_LIKE, word + word) == "ab ab"


# The default model's


@pytest.fixture(scope="module")
def default_tokenizer(default_model_dir: Path) -> Tokenizer:
    return load_tokenizer(resolve_model(str(default_model_dir)))


def test_e9_the_default_model_streams_its_full_decode(default_tokenizer: Tokenizer) -> None:
    for text in [*ODD_TEXTS, "Once upon a time, 1234 dogs\nsaid 'héllo' — and left."]:
        ids = default_tokenizer.encode(text)
        assert text_of(default_tokenizer, ids, skip=False) == default_tokenizer.decode(ids, skip_special_tokens=False)


def test_txt_09_random_tokens_of_the_default_model_give_their_full_decode(default_tokenizer: Tokenizer) -> None:
    for seed in range(10):
        ids = random.Random(seed).choices(range(default_tokenizer.vocab_size), k=2000)
        assert text_of(default_tokenizer, ids) == default_tokenizer.decode(ids)
