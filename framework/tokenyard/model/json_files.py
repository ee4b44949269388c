"""JSON files that come with a model: read with a size cap, and stripped of keys that may choose code."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from tokenyard.errors import ModelLoadError

MAX_JSON_BYTES = 32 * 2**20
_FILE_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_CODE_KEYS = frozenset(
    {
        # transformers acts on each of these when it stands in a config: kernels and attention from the Hub, patches of
        # modules, files to load, other code than its own
        "allow_all_kernels",
        "attn_implementation",
        "code_revision",
        "custom_generate",
        "custom_pipelines",
        "distributed_config",
        "experts_implementation",
        "fusion_config",
        "kernel_config",
        "transformers_weights",
        "trust_remote_code",
        "use_kernels",
        # Hydra's, which nothing here resolves either
        "_target_",
    }
)
_CODE_PREFIXES = ("_attn_implementation", "_experts_implementation")


class RemoteCodeError(ModelLoadError):
    """A model's JSON asks to run code that came with the model."""


def read_json(path: Path, *, unique_keys: bool = False) -> dict[str, object]:
    """The object in a JSON file, sanitised; ModelLoadError when it is too large, invalid, or not an object.

    Sanitised means: `auto_map` anywhere is refused (it names code of the model's author, which is never run), and
    keys that choose an attention implementation, kernels, files or trust are dropped at every depth. With
    `unique_keys` a key that stands twice in one object is an error; else the last one counts.
    """
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise ModelLoadError(f"{path}: {size} bytes of JSON, at most {MAX_JSON_BYTES} are read")
        pairs_hook = unique_object if unique_keys else None
        content = _sanitise(json.loads(path.read_bytes(), object_pairs_hook=pairs_hook), path)
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

    An entry of the folder itself may be a symbolic link: whoever made the folder put it there, and the Hugging Face
    cache is built of such links.
    """
    path = folder / plain_file_name(name, named_by=named_by)
    if not path.is_file():
        raise ModelLoadError(f"{path}: missing, though {named_by.name} names it; fetch the model again")
    return path


def plain_file_name(name: object, *, named_by: Path | str) -> str:
    """`name` itself when it is a bare file name; nothing that a model's files say may point out of their folder."""
    if not isinstance(name, str) or not _FILE_NAME.fullmatch(name) or name in {".", ".."}:
        raise ModelLoadError(
            f"{named_by}: names the file {name!r}; only plain names of letters, digits, '.', '_' and '-' in the same "
            "folder are read"
        )
    return name


def unique_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """For `object_pairs_hook`: ValueError for a key that stands in one object twice."""
    content = dict(pairs)
    if len(content) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"{counts.most_common(1)[0][0]!r} stands in it twice")
    return content


def _sanitise(value: object, path: Path) -> object:
    if isinstance(value, Mapping):
        if _names_code(value.get("auto_map")):
            raise RemoteCodeError(
                f"{path}: 'auto_map' asks to run code that came with the model, which is never done; if transformers "
                "has this architecture itself, remove the key from the file"
            )
        return {key: _sanitise(item, path) for key, item in value.items() if not _chooses_code(key)}
    if isinstance(value, list):
        return [_sanitise(item, path) for item in value]
    return value


def _names_code(auto_map: object) -> bool:
    """An integer is an id: in a vocabulary the word is a key like any other."""
    return bool(auto_map) and not isinstance(auto_map, int)


def _chooses_code(key: str) -> bool:
    return key in _CODE_KEYS or key.startswith(_CODE_PREFIXES)
