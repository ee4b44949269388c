"""Tokenizers of folders without a tokenizer.json: SentencePiece models, or a vocabulary with merges.

transformers converts them. It is given a folder of its own with nothing but the files named here, and JSON without
keys that choose code or files: what else came with the model cannot matter.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tokenyard.errors import ModelLoadError
from tokenyard.model.json_files import read_json
from tokenyard.model.tokenizer_file import MAX_TOKENIZER_BYTES, MAX_TOKENS, library_errors

if TYPE_CHECKING:
    import tokenizers

SENTENCEPIECE_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "spm.model")
_OTHER_FILES = ("vocab.json", "merges.txt", "vocab.txt", "tekken.json")
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json")
_FILE_KEYS = ("_file", "name_or_path", "cache_dir")
_NEEDED = {"sentencepiece": "sentencepiece", "protobuf": "google.protobuf"}  # package -> module


def convert_tokenizer(folder: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """(tokenizer, its special tokens by name) of a folder; seconds, for importing transformers.

    Neither network nor code of the model's is used. ModelLoadError when the folder has no tokenizer that transformers
    knows, or when reading one needs a package that is not installed.
    """
    present = [folder / name for name in (*SENTENCEPIECE_FILES, *_OTHER_FILES) if (folder / name).is_file()]
    if not present:
        raise ModelLoadError(f"{folder}: no tokenizer: neither tokenizer.json nor {SENTENCEPIECE_FILES[0]}; add it")
    for path in present:
        if path.stat().st_size > MAX_TOKENIZER_BYTES:
            raise ModelLoadError(f"{path}: more than {MAX_TOKENIZER_BYTES} bytes, which no tokenizer needs")
        if path.name in SENTENCEPIECE_FILES:
            _check_sentencepiece(path)
    with tempfile.TemporaryDirectory(prefix="tokenyard-tokenizer-") as clean:
        _copy_clean(folder, present, Path(clean))
        return _convert(Path(clean), folder)


def _convert(clean: Path, folder: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    from transformers import PreTrainedTokenizerFast

    from tokenyard.model.hf_calls import tokenizer_from_folder

    def refusal(reason: str) -> ModelLoadError:
        reason = reason.replace(str(clean), str(folder))
        return ModelLoadError(
            f"{folder}: no tokenizer.json, and transformers cannot make one of the other files ({reason}); add it"
        )

    with library_errors(refusal):  # whatever its many converters raise
        converted = tokenizer_from_folder(clean)
    if not isinstance(converted, PreTrainedTokenizerFast):
        raise ModelLoadError(f"{folder}: no tokenizer.json, and {type(converted).__name__} cannot be turned into one")
    return converted.backend_tokenizer, {
        name: str(token) for name, token in converted.special_tokens_map.items() if isinstance(token, str)
    }


def _copy_clean(folder: Path, present: list[Path], clean: Path) -> None:
    for path in present:
        shutil.copyfile(path, clean / path.name)
    for name in _SETTINGS:
        if (folder / name).is_file():
            content = read_json(folder / name)
            kept = {key: value for key, value in content.items() if not key.endswith(_FILE_KEYS)}
            (clean / name).write_text(json.dumps(kept), encoding="utf-8")


def _check_sentencepiece(path: Path) -> None:
    """Packages first: without them transformers takes the file for another format, and complains about that one."""
    missing = [name for name, module in _NEEDED.items() if not _is_installed(module)]
    if missing:
        raise ModelLoadError(
            f"{path}: reading a SentencePiece model needs {' and '.join(missing)}; "
            f"run `pip install {' '.join(missing)}`, or add the model's tokenizer.json"
        )
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined,unused-ignore]
    with library_errors(lambda reason: ModelLoadError(f"{path}: not a SentencePiece model ({reason})")):
        model.ParseFromString(path.read_bytes())
        pieces = [piece.piece for piece in model.pieces]
    if not 0 < len(pieces) <= MAX_TOKENS:
        raise ModelLoadError(f"{path}: {len(pieces)} pieces; a SentencePiece model has 1 to {MAX_TOKENS}")
    if len(set(pieces)) != len(pieces):
        twice = next(piece for index, piece in enumerate(pieces) if piece in pieces[:index])
        raise ModelLoadError(f"{path}: the piece {twice!r} is in the vocabulary twice; fetch the file again")
    if not 0 <= model.trainer_spec.unk_id < len(pieces):
        raise ModelLoadError(f"{path}: the unknown piece has the id {model.trainer_spec.unk_id}, which is not there")


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package around it
        return False
