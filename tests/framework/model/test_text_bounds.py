"""How much text tokens can stand for: a bound that no text breaks, and the refusal of what is longer."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenyard.errors import ValidationError
from tokenyard.model.text_bounds import MAX_TOKEN_BYTES, text_bound
from tokenyard.model.tokenizer import Tokenizer

MERGES = [("c", "a"), ("ca", "t"), ("cat", "cat")]
JOINED = [left + right for left, right in MERGES]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
BYTES = [f"<0x{value:02X}>" for value in range(256)]


def bpe(tokens: Sequence[str], **options: object) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, MERGES, **options))


def byte_level(left_out: str = "", *, split: pre_tokenizers.PreTokenizer | None = None) -> tokenizers.Tokenizer:
    backend = bpe([*(character for character in ALPHABET if character not in left_out), *JOINED])
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*([split] if split else []), *steps])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return backend


def with_nfc() -> tokenizers.Tokenizer:
    backend = byte_level()
    backend.normalizer = normalizers.NFC()
    return backend


def byte_fallback() -> tokenizers.Tokenizer:
    """Llama 2's kind."""
    backend = bpe(["<unk>", "▁", *"cat", *BYTES, *JOINED], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return backend


def taking_blanks() -> tokenizers.Tokenizer:
    backend = byte_level()
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    return backend


def shortening() -> tokenizers.Tokenizer:
    backend = byte_level()
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("....", ".")])
    return backend


TEXT = st.text(st.sampled_from("cat ▁<eos>\x14é日\u0301\u1100\u1161\u11a8") | st.characters(exclude_categories=["Cs"]))
EXACT = {
    "byte_level": (byte_level(), 6),
    "a_byte_without_token": (byte_level(left_out="ĔÃ"), 6),  # 0x14, and what é begins with
    "nfc": (with_nfc(), 24),
    "byte_fallback": (byte_fallback(), 6),
}
UNBOUNDED = {
    "blanks_join_a_token": taking_blanks(),
    "a_normalizer_shortens": shortening(),
    "a_split_drops": byte_level(split=pre_tokenizers.Split(" ", "removed")),
    "whitespace_is_dropped": byte_level(split=pre_tokenizers.WhitespaceSplit()),
    "any_text_is_one_unknown": bpe(["<unk>", *"cat", *JOINED], unk_token="<unk>", fuse_unk=True),
    "a_byte_token_is_missing": bpe(["<unk>", *"cat", *BYTES[1:], *JOINED], unk_token="<unk>", byte_fallback=True),
    "word_pieces": tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "c": 1}, unk_token="[UNK]")),
}


@pytest.mark.parametrize(("backend", "bytes_per_token"), EXACT.values(), ids=EXACT)
@given(text=TEXT)
def test_d17_no_text_has_more_bytes_than_its_tokens_can_stand_for(
    backend: tokenizers.Tokenizer, bytes_per_token: int, text: str
) -> None:
    bound = text_bound(backend)
    assert bound.bytes_per_token == bytes_per_token
    assert bound.size(text) <= bound.bytes_per_token * len(backend.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("backend", UNBOUNDED.values(), ids=UNBOUNDED)
def test_d17_where_a_token_may_stand_for_any_text_there_is_a_generous_bound(backend: tokenizers.Tokenizer) -> None:
    assert text_bound(backend) == (MAX_TOKEN_BYTES, b"")


def test_bytes_that_no_token_spells_do_not_count_for_they_are_dropped() -> None:
    bound = text_bound(byte_level(left_out="Ĕ"))
    assert (bound.size("\x14" * 1000 + "cat"), bound.without_token) == (3, b"\x14")


def test_text_that_is_encoded_quickly_is_refused_by_its_tokens(tiny: Tokenizer) -> None:
    assert len(tiny.encode("x" * 1000, max_tokens=10)) > 10  # the caller counts them


def test_d17_text_that_cannot_fit_is_refused_before_it_is_encoded_and_other_text_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tokenyard.model.tokenizer._QUICK", 0)
    tokenizer = Tokenizer(byte_level(), {}, "{% for m in messages %}{{ m.content }}{% endfor %}")
    try:
        for fits in ("cat" * 20, "x" * 60):
            assert tokenizer.encode(fits, max_tokens=10)
        with pytest.raises(ValidationError, match=r"text of 61 bytes;.* 10 tokens, which are at most 60 bytes \(6 a"):
            tokenizer.encode("x" * 61, max_tokens=10)
        chat = [{"role": "user", "content": "x" * 54 + "<eos>"}]  # the name in it is longer while it is marked
        assert tokenizer.encode_chat(chat, max_tokens=10)
        with pytest.raises(ValidationError, match=r"text of 59 bytes;.* 9 tokens, which are at most 54 bytes"):
            tokenizer.encode_chat(chat, max_tokens=9)
    finally:
        tokenizer.close()
