"""Finding a model: its name, folder, .gguf file or Hub id -> ModelFiles. Imports neither torch nor transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from tokenyard.errors import ModelLoadError, did_you_mean
from tokenyard.model import hub
from tokenyard.model.default_model import DEFAULT_MODEL, ensure_default_model
from tokenyard.model.json_files import RemoteCodeError, read_json, read_json_if_there
from tokenyard.model.rope_config import rope_type_of
from tokenyard.model.snapshot import INDEX_FILE as INDEX_FILE
from tokenyard.model.snapshot import SINGLE_FILE as SINGLE_FILE
from tokenyard.model.snapshot import SMALL_FILES, find_cached, find_snapshot, no_weights, weight_files

_ALLOWED = (
    f"give '{DEFAULT_MODEL}', a folder with config.json and safetensors, a .gguf file, or a Hub id such as OWNER/NAME"
)
_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx")
_MULTIPLIED = ("linear", "dynamic", "yarn")
_STATE_SCALED_LENGTH = ("gemma3",)  # model types whose max_position_embeddings includes the scaling, whatever its type
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # safetensors' names -> torch's
_LARGE_JSON = frozenset({"tokenizer.json", "vocab.json", INDEX_FILE})  # of these only numbers and names are used
_MOST_UNREAD_BYTES = 2**20  # of JSON that no part of a model is known by
_LONGEST = 2**30  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """A model on this machine. `config` has the form of Hugging Face's config.json, sanitised (see json_files)."""

    name: str  # as the user gave it
    path: Path  # the folder, or the .gguf file
    format: Literal["safetensors", "gguf"]
    config: Mapping[str, object]
    generation_config: Mapping[str, object]
    commit: str | None = None  # of a Hub repository: all files are of this one
    eos_token: str | None = None  # as the tokenizer's config spells it

    @property
    def architecture(self) -> str:
        """The class name that the config declares, such as LlamaForCausalLM."""
        architectures = self.config.get("architectures")
        if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
            raise ModelLoadError(f"{self.path}: the config names no architecture (key 'architectures')")
        return architectures[0]

    @property
    def text_config(self) -> Mapping[str, object]:
        """The text model's part of the config: of a model for more than text it may stand within."""
        nested = self.config.get("text_config")
        return nested if isinstance(nested, Mapping) else self.config

    @property
    def max_model_len(self) -> int:
        """The longest prompt plus output, in tokens, that positions allow; RoPE scaling included."""
        lengths = [length for key in _LENGTH_KEYS if (length := _count(self.text_config.get(key))) is not None]
        if not lengths:
            raise ModelLoadError(f"{self.path}: the config has no length limit (key 'max_position_embeddings')")
        length = lengths[0]
        if length > _LONGEST:
            raise ModelLoadError(
                f"{self.path}: a length limit of {length} tokens is not believable; at most {_LONGEST}"
            )
        return length if self._states_scaled_length else _scaled_length(length, self.text_config)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a generation: generation_config's where it has any, else the config's; may be empty."""
        for source in (self.generation_config, self.config, self.text_config):
            if (value := source.get("eos_token_id")) is not None and value != []:
                return _token_ids(value, self.path)
        return ()

    @property
    def torch_dtype(self) -> str:
        """The checkpoint's float32, bfloat16 or float16: what the config says, else what the first tensor has."""
        stated = [config.get(key) for config in (self.config, self.text_config) for key in ("dtype", "torch_dtype")]
        value = next((name for name in stated if name), None) or _stored_dtype(self)
        if value not in _DTYPES.values():
            allowed = ", ".join(_DTYPES.values())
            raise ModelLoadError(f"{self.path}: dtype {value!r} cannot be run; allowed: {allowed}")
        return str(value)

    @property
    def _states_scaled_length(self) -> bool:
        return str(self.config.get("model_type")).startswith(_STATE_SCALED_LENGTH)


def resolve_model(
    name: str,
    on_progress: hub.Progress | None = None,
    *,
    revision: str | None = None,
    token: hub.Token = None,
    weights: bool = True,
) -> ModelFiles:
    """Find a model by the default model's name, a folder, a .gguf file or a Hub id; `on_progress` gets lines of text.

    What is there under that name wins over a Hub id; a folder of the default model's name is reached as ./NAME. A Hub
    id is fetched when the local cache has it not complete; `revision` (a branch, tag or commit) and `token` are for it
    alone, and `weights=False` leaves its weights out. The default model is fetched and converted on first use.
    """
    on_progress = on_progress or _ignore
    if revision is not None:
        hub.check_revision(revision)
    if name == DEFAULT_MODEL:
        _refuse_revision(name, revision)
        return _from_folder(name, ensure_default_model(on_progress))
    path = Path(name).expanduser() if name.startswith("~/") else Path(name)  # "~x" is a legal name of a folder
    if _is_there(name, path):
        _refuse_revision(name, revision)
        return _from_folder(name, path) if path.is_dir() else _from_file(name, path)
    if (hub_id := hub.parse_hub_id(name)) is not None:
        found = find_snapshot(
            hub_id, revision=revision, token=token, on_progress=on_progress, weights=weights, check=_read_configs
        )
        return _from_snapshot(name, found, hub_id.file, weights=weights)
    if hub.is_plain_name(name) and (in_cache := find_cached(name, revision)) is not None:
        return _from_snapshot(name, in_cache, None, weights=True)
    raise _not_found(name, path)


def _is_there(name: str, path: Path) -> bool:
    try:
        return bool(name) and (path.is_dir() or path.is_file())
    except OSError as error:  # such as a name that is too long: a prompt in the model's place
        raise ModelLoadError(f"'{name[:60]}...' is no path of a model ({error.strerror}); is it the prompt?") from error


def _refuse_revision(name: str, revision: str | None) -> None:
    if revision is not None:
        raise ModelLoadError(
            f"model.revision={revision} is for Hub ids, and {name!r} is on this machine; leave the revision out"
        )


def _from_snapshot(name: str, snapshot: hub.Snapshot, file: str | None, *, weights: bool) -> ModelFiles:
    folder = snapshot.folder
    files = _from_folder(name, folder, weights=weights) if file is None else _from_file(name, folder / file)
    return replace(files, commit=snapshot.commit)


def _from_folder(name: str, folder: Path, *, weights: bool = True) -> ModelFiles:
    if not (folder / "config.json").is_file():
        raise ModelLoadError(f"{folder}: no config.json in this folder{_folder_hint(folder)}; {_ALLOWED}")
    if weights:
        _check_weights_there(folder)
    config = _read_configs(folder)
    generation_config = read_json_if_there(folder / "generation_config.json")
    return ModelFiles(
        name=name,
        path=folder,
        format="safetensors",
        config=config,
        generation_config=generation_config,
        eos_token=_eos_token(folder),
    )


def _read_configs(folder: Path) -> dict[str, object]:
    """config.json, once no JSON of the folder asks for remote code and the weights are none that cannot be read."""
    config = read_json(folder / "config.json")
    _refuse_code(folder)
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        raise ModelLoadError(
            f"{folder}: the weights are quantised ({method}), which is not available in this version; give an "
            "unquantised checkpoint or a .gguf file"
        )
    return config


def _refuse_code(folder: Path) -> None:
    """Refuse every JSON file that names code, whoever would read it; what nobody reads need not be valid."""
    for path in sorted(folder.glob("*.json")):
        is_read = path.name in SMALL_FILES
        if path.name in _LARGE_JSON or not path.is_file() or (not is_read and path.stat().st_size > _MOST_UNREAD_BYTES):
            continue
        try:
            read_json(path)
        except RemoteCodeError:
            raise
        except ModelLoadError:
            if is_read:
                raise


def _eos_token(folder: Path) -> str | None:
    merged = {
        **read_json_if_there(folder / "special_tokens_map.json"),
        **read_json_if_there(folder / "tokenizer_config.json"),
    }
    value = merged.get("eos_token")
    value = value.get("content") if isinstance(value, Mapping) else value
    return value if isinstance(value, str) and value else None


def _from_file(name: str, path: Path) -> ModelFiles:
    if path.suffix.lower() != ".gguf":
        raise ModelLoadError(f"{path}: a single file must be a .gguf file; {_ALLOWED}")
    # numpy, which listing or resolving a folder does not need
    from tokenyard.model.gguf_config import config_from_gguf
    from tokenyard.model.gguf_reader import read_gguf

    config, generation_config = config_from_gguf(read_gguf(path))
    return ModelFiles(name=name, path=path, format="gguf", config=config, generation_config=generation_config)


def _check_weights_there(folder: Path) -> None:
    if not (folder / INDEX_FILE).is_file() and not (folder / SINGLE_FILE).is_file():
        raise no_weights(folder, [entry.name for entry in folder.iterdir()])


def _folder_hint(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir())
    gguf = [name for name in names if name.lower().endswith(".gguf")]
    if gguf:
        return f", but {gguf[0]}: give that file itself"
    if "adapter_config.json" in names:
        return " (it holds a LoRA adapter, not a model)"
    return ""


def _not_found(name: str, path: Path) -> ModelLoadError:
    if "/" in name or name.startswith((".", "~")) or path.suffix == ".gguf":
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        return ModelLoadError(f"model {name!r}: no such file or folder{did_you_mean(path.name, siblings)}; {_ALLOWED}")
    return ModelLoadError(f"unknown model {name!r}{did_you_mean(name, [DEFAULT_MODEL])}; {_ALLOWED}")


def _scaled_length(length: int, config: Mapping[str, object]) -> int:
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if isinstance(scaling, Mapping) and isinstance(scaling.get("full_attention"), Mapping):
        scaling = scaling["full_attention"]  # of several kinds of layers, those that see everything
    if not isinstance(scaling, Mapping):
        return length
    kind, factor = rope_type_of(scaling), scaling.get("factor")
    if kind not in _MULTIPLIED or not isinstance(factor, int | float) or not 0 < factor < _LONGEST:
        return length  # llama3 and longrope checkpoints already state the scaled length
    outer = config.get("original_max_position_embeddings")
    original = _count(outer or scaling.get("original_max_position_embeddings")) if kind == "yarn" else None
    return int((original or length) * factor)


def _stored_dtype(files: ModelFiles) -> str:
    """The dtype of the first floating-point tensor; float32 where that cannot be told yet."""
    if files.format != "safetensors":
        return "float32"
    paths = [files.path / name for name in weight_files(files.path)]
    from safetensors import SafetensorError, safe_open  # only for a config that says nothing

    for path in (path for path in paths if path.is_file()):
        try:
            with safe_open(path, framework="numpy") as tensors:
                kinds = [tensors.get_slice(name).get_dtype() for name in list(tensors.keys())]
        except (SafetensorError, OSError):
            return "float32"  # loading says what is wrong with it
        if found := [_DTYPES[kind] for kind in kinds if kind in _DTYPES]:
            return found[0]
    return "float32"


def _token_ids(value: object, path: Path) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in ids):
        raise ModelLoadError(f"{path}: eos_token_id is {value!r}; an id or a list of ids is expected")
    return tuple(dict.fromkeys(ids))


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _ignore(text: str) -> None:
    """Progress that nobody asked for."""
