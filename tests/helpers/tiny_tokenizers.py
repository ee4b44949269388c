"""Tiny tokenizers of each kind, with special and added tokens; every text can be encoded with every one of them."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenyard.model.tokenizer import Tokenizer

BOS, EOS = "<s>", "</s>"
ADDED = "<tool>"  # not special
_MERGES = (("a", "b"), ("ab", "a"), ("b", "b"), ("aba", "bb"), ("Ġ", "a"), ("ã", "ģ"))
_WORD_PIECES = ("▁", "a", "b", "▁a", "▁b", "ab", "▁ab", "▁▁", "世", "▁世", "é", "ok", ".", "-", "x")


def _with_added(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in (BOS, EOS)])
    backend.add_tokens([AddedToken(ADDED, special=False, normalized=False)])
    return backend


def byte_level() -> Tokenizer:
    """One token a byte and a few merges, as GPT-2, Llama 3 and Qwen have it."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in _MERGES)]
    backend = tokenizers.Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, list(_MERGES)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(_with_added(backend), {}, None)


def byte_fallback(*, strips: bool = True, pieces: tuple[str, ...] = _WORD_PIECES) -> Tokenizer:
    """Pieces with a mark for spaces, and a byte token for each byte: `strips` as Llama 2, without it as Gemma."""
    vocabulary = {token: index for index, token in enumerate([f"<0x{byte:02X}>" for byte in range(256)])}
    vocabulary |= {token: len(vocabulary) + index for index, token in enumerate(pieces)}
    merges = [(left, right) for left in pieces for right in pieces if left + right in pieces]
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True))
    prepend = [normalizers.Prepend("▁")] if strips else []
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    steps: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strips:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    return Tokenizer(_with_added(backend), {}, None)


def metaspace() -> Tokenizer:
    """Pieces with a mark for spaces and an unknown token, as XLM-R has it."""
    vocabulary = {token: index for index, token in enumerate(("<unk>", *_WORD_PIECES))}
    merges = [(left, right) for left in _WORD_PIECES for right in _WORD_PIECES if left + right in _WORD_PIECES]
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return Tokenizer(_with_added(backend), {}, None)


def word_pieces() -> Tokenizer:
    """WordPiece, whose text of a token depends on where it stands."""
    vocabulary = {token: index for index, token in enumerate(("[UNK]", "a", "##b", "世", "##!", ".", "x"))}
    backend = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    return Tokenizer(_with_added(backend), {}, None)
