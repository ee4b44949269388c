"""Small SentencePiece models, trained here."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

_LINES = [
    "hello the world, this is a test",
    "the quick brown fox jumps over 12 lazy dogs",
    "你好 世界 😀 ď",
    "a  b   c\td",
    "ich bin über den Wolken",
    "foo_bar(baz) { return 1; }",
    "hi hi hi the the the",
] * 20

GEMMA_TRAINING: dict[str, object] = {
    "user_defined_symbols": ["<mask>", "<start_of_turn>", "<end_of_turn>"],
    "pad_id": 0,
    "eos_id": 1,
    "bos_id": 2,
    "unk_id": 3,
    "pad_piece": "<pad>",
    "eos_piece": "<eos>",
    "bos_piece": "<bos>",
    "add_dummy_prefix": False,
}


def train(**training: object) -> bytes:
    """A byte-fallback BPE model of some 400 pieces, as Llama 2 has it, changed by `training`."""
    trainer = pytest.importorskip("sentencepiece").SentencePieceTrainer
    settings = {
        "model_type": "bpe",
        "vocab_size": 400,
        "byte_fallback": True,
        "character_coverage": 0.99,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "split_digits": True,
        "allow_whitespace_only_pieces": True,
        "hard_vocab_limit": False,
        "minloglevel": 2,
        "num_threads": 1,
    }
    out = io.BytesIO()
    trainer.train(sentence_iterator=iter(_LINES), model_writer=out, **{**settings, **training})
    return out.getvalue()


def write_folder(folder: Path, model: bytes, name: str = "tokenizer.model", /, **settings: object) -> Path:
    """A model's folder with nothing but its tokenizer: `settings` are JSON files by their names without `.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(model)
    for stem, content in settings.items():
        (folder / f"{stem}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder
