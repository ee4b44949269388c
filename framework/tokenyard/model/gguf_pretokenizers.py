"""How byte-level vocabularies cut text before merging, by the names that GGUF files use (`tokenizer.ggml.pre`).

A name is here when its rules are known exactly; every other one is refused, because a text that is cut elsewhere gives
other tokens than the model was trained on, and nothing would show it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLIT_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}"
_SPLIT_QWEN2 = rf"{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPLIT_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"
)
_SPLIT_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """The steps of one name, in order: normalisation, digits, splits, GPT-2's own pattern."""

    nfc: bool = False
    single_digits: bool = False
    splits: tuple[str, ...] = ()  # each cuts what the one before left; matches and what lies between are pieces
    gpt2_pattern: bool = False
    whole_words: bool = False  # a piece that is in the vocabulary is taken without merging
    adds_bos: bool = False  # where the file does not say


_GPT2 = PreTokenizer(gpt2_pattern=True)
_DIGITS = PreTokenizer(single_digits=True, gpt2_pattern=True)
_LLAMA3 = PreTokenizer(splits=(_SPLIT_LLAMA3,), whole_words=True, adds_bos=True)
_QWEN2 = PreTokenizer(splits=(_SPLIT_QWEN2,), nfc=True)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    # llama.cpp's rules for a file that names none: what old files were made with
    "default": PreTokenizer(splits=(r"[\p{P}\$\+<=>\^~\|]+", _SPLIT_GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _GPT2,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "falcon3": _LLAMA3,
    "pixtral": _LLAMA3,
    "smaug-bpe": PreTokenizer(splits=(_SPLIT_LLAMA3,)),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": PreTokenizer(splits=(_SPLIT_TEKKEN,), whole_words=True, adds_bos=True),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
}
