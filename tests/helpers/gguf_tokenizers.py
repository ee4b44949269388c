"""Tokenizers trained on a few sentences, and the GGUF metadata that a converter would make of them."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import tokenizers
from gguf_files import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, TinyVocabulary
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenyard.model.gguf_reader import read_gguf
from tokenyard.model.gguf_tokenizer import tokenizer_from_gguf
from tokenyard.model.tokenizer import Tokenizer

SENTENCES = [
    "the quick brown fox jumps over the lazy dog and the other dogs don't, they'll wait 12 or 345 days",
    "def main(argv):\n    for i in range(10):\n        print(i, argv[i])\n\n\treturn {'a': 1}",
    "Der Fuß und die Straße; naïve café; ça va? Ещё один текст, ещё строка. 日本語のテキストです。 안녕하세요",
    "HTTPServer XMLParser camelCase snake_case SCREAMING 3.14159 1,000,000 50% (yes) [no] <tag/> a/b/c ...",
    "we're we'll WE'VE I'm I'd it's   three   spaces\n\n\nthree lines\r\nwindows 🙂🙂 👩‍👩‍👧‍👦",
] * 3
ODD_TEXTS = [
    *("", " ", "  ", "   hi", "hi ", " hi  there ", "\n", "\n\n\n", "\r\n\r\n", "\t x\ty", "\x00\x01\x7f"),
    *("a1b22c333d4444 55555", "don't DON'T I'LL", "é e\u0301 Å A\u030a", "日本語のテキスト、123円", "한국어 텍스트"),
    *("🙂👩‍👩‍👧‍👦🇩🇪", "العربية ١٢٣", "² ½ Ⅷ ①", "<|end|>hi<|start|> the<|end|>", "x<think>y</think>", "<think>"),
    *("▁ the▁quick", "<0x0A>", "<0xZZ>", "</s> <s>", "zero\u200bwidth\ufeff", "x" * 300, " " * 50 + "a", "[PAD300]"),
    *("HTTPServer snake_case ++i; a<=b; $x = ~y ^ z | w", "the the the\n the"),
]
MAPPED = ("<|end|>", "<|start|>")
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
BYTES_ONLY = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def isolated(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


# As the tokenizer.json of one model of each name has it.
ORIGINALS: dict[str, list[pre_tokenizers.PreTokenizer]] = {
    "gpt-2": [GPT2],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), GPT2],
    "starcoder": [pre_tokenizers.Digits(individual_digits=True), GPT2],
    "llama-bpe": [
        isolated(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
            r"|\s+(?!\S)|\s+"
        ),
        BYTES_ONLY,
    ],
    "qwen2": [
        isolated(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
            r"|\s+(?!\S)|\s+"
        ),
        BYTES_ONLY,
    ],
    "tekken": [
        isolated(
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?"
            r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+"
            r"|\s+(?!\S)|\s+"
        ),
        BYTES_ONLY,
    ],
}


def trained_byte_level(pre: str) -> tokenizers.Tokenizer:
    """A BPE of 700 tokens, learnt from the sentences with this pre-tokenizer."""
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=pre in ("llama-bpe", "tekken")))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(ORIGINALS[pre])
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=list(MAPPED),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in MAPPED])
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return tokenizer


def trained_sentencepiece() -> tokenizers.Tokenizer:
    """A BPE with byte fallback in the style of Llama 2's tokenizer.json; characters of the sentences only."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    learner = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    learner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    learner.pre_tokenizer = pre_tokenizers.Split(Regex("▁+[^▁]*"), behavior="isolated")
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=names, show_progress=False)
    learner.train_from_iterator(SENTENCES[:4], trainer)
    learnt = gguf_merges(learner)
    tokenizer = tokenizers.Tokenizer(
        models.BPE(learner.get_vocab(), learnt, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = learner.normalizer
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names[:3]])
    return tokenizer


def gguf_merges(tokenizer: tokenizers.Tokenizer) -> list[tuple[str, str]]:
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ")) for merge in merges]


def by_id(tokenizer: tokenizers.Tokenizer) -> list[str]:
    return sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)


def byte_level_metadata(tokenizer: tokenizers.Tokenizer, pre: str) -> TinyVocabulary:
    tokens = by_id(tokenizer)
    kinds = {**dict.fromkeys(MAPPED, CONTROL), "<think>": USER_DEFINED}
    return TinyVocabulary(
        pre=pre,
        tokens=[*tokens, "[PAD300]"],
        types=[*(kinds.get(token, NORMAL) for token in tokens), UNUSED],
        merges=[" ".join(pair) for pair in gguf_merges(tokenizer)],
        ids={"bos": 1, "eos": 0},
        flags={"add_bos_token": False},
    )


def sentencepiece_metadata(tokenizer: tokenizers.Tokenizer) -> TinyVocabulary:
    """As converters write it: scores that fall with the id, no merges."""
    tokens = by_id(tokenizer)
    kinds = {0: UNKNOWN, 1: CONTROL, 2: CONTROL} | dict.fromkeys(range(3, 259), BYTE)
    return TinyVocabulary(
        model="llama",
        pre="default",
        tokens=tokens,
        types=[kinds.get(index, NORMAL) for index in range(len(tokens))],
        scores=[0.0] * 259 + [-float(index) for index in range(len(tokens) - 259)],
        ids={"unknown": 0, "bos": 1, "eos": 2},
        flags={"add_bos_token": False},
    )


def write_vocabulary(path: Path, vocabulary: TinyVocabulary) -> Path:
    """A file that has a vocabulary and an embedding only."""
    writer = gguf.GGUFWriter(path, "llama")
    vocabulary.write(writer)
    writer.add_tensor("token_embd.weight", np.zeros((max(1, len(vocabulary.tokens)), 1), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load_vocabulary(path: Path) -> Tokenizer:
    """The tokenizer of a file, without a chat template."""
    backend, config = tokenizer_from_gguf(read_gguf(path))
    return Tokenizer(backend, config, None)
