"""JSON files that come with a model: read with a size cap, and stripped of keys that may choose code."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from tokenyard.errors import ModelLoadError

MAX_JSON_BYTES = 32 * 2**20
_FILE_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_CODE_KEYS = frozenset({"attn_implementation", "use_kernels", "trust_remote_code"})
_CODE_PREFIX = "_attn_implementation"


def read_json(path: Path) -> dict[str, object]:
    """The object in a JSON file, sanitised; ModelLoadError when it is too large, invalid, or not an object.

    Sanitised means: `auto_map` anywhere is refused (it names code of the model's author, which is never run), and
    keys that choose an attention implementation, kernels or trust are dropped at every depth.
    """
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise ModelLoadError(f"{path}: {size} bytes of JSON, at most {MAX_JSON_BYTES} are read")
        content = _sanitise(json.loads(path.read_bytes()), path)
    except (ValueError, RecursionError, OSError) as error:
        if isinstance(error, ModelLoadError):
            raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelLoadError(f"{path}: cannot be read as JSON ({reason}); fetch the file again") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path}: a JSON object is expected, got {type(content).__name__}")
    return content


def read_json_if_there(path: Path) -> dict[str, object]:
    """As read_json; an empty object when there is no such file."""
    return read_json(path) if path.is_file() else {}


def file_in_folder(folder: Path, name: object, *, named_by: Path) -> Path:
    """The file `name` directly in `folder`, where `name` was read from a JSON file.

    Only a bare name is accepted, so that JSON can never point out of the folder. An entry of the folder itself may be
    a symbolic link: whoever made the folder put it there, and the Hugging Face cache is built of such links.
    """
    if not isinstance(name, str) or not _FILE_NAME.fullmatch(name) or name in {".", ".."}:
        raise ModelLoadError(
            f"{named_by}: names the file {name!r}; only plain names of letters, digits, '.', '_' and '-' in the same "
            "folder are read"
        )
    path = folder / name
    if not path.is_file():
        raise ModelLoadError(f"{path}: missing, though {named_by.name} names it; fetch the model again")
    return path


def _sanitise(value: object, path: Path) -> object:
    if isinstance(value, Mapping):
        if value.get("auto_map"):
            raise ModelLoadError(
                f"{path}: 'auto_map' asks to run code that came with the model, which is never done; if transformers "
                "has this architecture itself, remove the key from the file"
            )
        return {key: _sanitise(item, path) for key, item in value.items() if not _chooses_code(key)}
    if isinstance(value, list):
        return [_sanitise(item, path) for item in value]
    return value


def _chooses_code(key: str) -> bool:
    return key in _CODE_KEYS or key.startswith(_CODE_PREFIX) or key == "auto_map"
