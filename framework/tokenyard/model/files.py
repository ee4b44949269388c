"""Finding a model: its name, folder or .gguf file -> ModelFiles. Imports neither torch nor transformers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tokenyard.errors import ModelLoadError, did_you_mean
from tokenyard.model.default_model import DEFAULT_MODEL, ensure_default_model
from tokenyard.model.json_files import read_json, read_json_if_there

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_ALLOWED = f"give '{DEFAULT_MODEL}', a folder with config.json and safetensors, or a .gguf file"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PICKLES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})
_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx")
_DTYPES = ("float32", "bfloat16", "float16")
# Read only to be refused when they ask for remote code.
_OTHER_CONFIGS = ("tokenizer_config.json", "processor_config.json", "preprocessor_config.json")

_LONGEST = 2**30  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """A model on this machine. `config` has the form of Hugging Face's config.json, sanitised (see json_files)."""

    name: str  # as the user gave it
    path: Path  # the folder, or the .gguf file
    format: Literal["safetensors", "gguf"]
    config: Mapping[str, object]
    generation_config: Mapping[str, object]

    @property
    def architecture(self) -> str:
        """The class name that the config declares, such as LlamaForCausalLM."""
        architectures = self.config.get("architectures")
        if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
            raise ModelLoadError(f"{self.path}: the config names no architecture (key 'architectures')")
        return architectures[0]

    @property
    def max_model_len(self) -> int:
        """The longest prompt plus output, in tokens, that positions allow; RoPE scaling included."""
        lengths = [length for key in _LENGTH_KEYS if (length := _count(self.config.get(key))) is not None]
        if not lengths:
            raise ModelLoadError(f"{self.path}: the config has no length limit (key 'max_position_embeddings')")
        length = lengths[0]
        if length > _LONGEST:
            raise ModelLoadError(
                f"{self.path}: a length limit of {length} tokens is not believable; at most {_LONGEST}"
            )
        scaling = self.config.get("rope_scaling") or self.config.get("rope_parameters")
        return _scaled_length(length, scaling) if isinstance(scaling, Mapping) else length

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a generation: generation_config's where it has any, else config's; may be empty."""
        for source in (self.generation_config, self.config):
            if (value := source.get("eos_token_id")) is not None:
                return _token_ids(value, self.path)
        return ()

    @property
    def torch_dtype(self) -> str:
        """The checkpoint's dtype by name: float32 (also when not said), bfloat16 or float16."""
        value = self.config.get("dtype") or self.config.get("torch_dtype") or "float32"
        if value not in _DTYPES:
            raise ModelLoadError(f"{self.path}: dtype {value!r} cannot be run; allowed: {', '.join(_DTYPES)}")
        return str(value)


def resolve_model(name: str, on_progress: Callable[[str], None] | None = None) -> ModelFiles:
    """Find a model by the default model's name, a folder, or a .gguf file; never looks on the network otherwise.

    The default model is fetched and converted on first use, with a line to `on_progress` per stage. A folder of the
    default model's name is reached as ./NAME.
    """
    if name == DEFAULT_MODEL:
        return _from_folder(name, ensure_default_model(on_progress or _ignore))
    path = Path(name).expanduser() if name.startswith("~/") else Path(name)  # "~x" is a legal name of a folder
    try:
        is_folder, is_file = bool(name) and path.is_dir(), bool(name) and path.is_file()
    except OSError as error:  # such as a name that is too long: a prompt in the model's place
        raise ModelLoadError(f"'{name[:60]}...' is no path of a model ({error.strerror}); is it the prompt?") from error
    if is_folder:
        return _from_folder(name, path)
    if is_file:
        return _from_file(name, path)
    raise _not_found(name, path)


def _from_folder(name: str, folder: Path) -> ModelFiles:
    if not (folder / "config.json").is_file():
        raise ModelLoadError(f"{folder}: no config.json in this folder{_folder_hint(folder)}; {_ALLOWED}")
    config = read_json(folder / "config.json")
    _check_weights_there(folder)
    for other in _OTHER_CONFIGS:
        read_json_if_there(folder / other)
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        raise ModelLoadError(
            f"{folder}: the weights are quantised ({method}), which is not available in this version; give an "
            "unquantised checkpoint or a .gguf file"
        )
    generation_config = read_json_if_there(folder / "generation_config.json")
    return ModelFiles(name=name, path=folder, format="safetensors", config=config, generation_config=generation_config)


def _from_file(name: str, path: Path) -> ModelFiles:
    if path.suffix.lower() != ".gguf":
        raise ModelLoadError(f"{path}: a single file must be a .gguf file; {_ALLOWED}")
    # numpy, which listing or resolving a folder does not need
    from tokenyard.model.gguf_config import config_from_gguf
    from tokenyard.model.gguf_reader import read_gguf

    config, generation_config = config_from_gguf(read_gguf(path))
    return ModelFiles(name=name, path=path, format="gguf", config=config, generation_config=generation_config)


def _check_weights_there(folder: Path) -> None:
    if (folder / INDEX_FILE).is_file() or (folder / SINGLE_FILE).is_file():
        return
    pickles = sorted(entry.name for entry in folder.iterdir() if entry.suffix in _PICKLES)
    if pickles:
        raise ModelLoadError(
            f"{folder}: the weights are only there as {pickles[0]}, a pickle, which can run code and is never read; "
            "convert them to model.safetensors"
        )
    raise ModelLoadError(f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE} in this folder; fetch the model again")


def _folder_hint(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir())
    gguf = [name for name in names if name.lower().endswith(".gguf")]
    if gguf:
        return f", but {gguf[0]}: give that file itself"
    if "adapter_config.json" in names:
        return " (it holds a LoRA adapter, not a model)"
    return ""


def _not_found(name: str, path: Path) -> ModelLoadError:
    if _HUB_ID.fullmatch(name) and not path.parent.is_dir() and not name.endswith(".gguf"):
        return ModelLoadError(
            f"model {name!r}: no such folder here, and Hub ids are not available in this version: give a local folder "
            f"(hf download {name} --local-dir DIR)"
        )
    if "/" in name or name.startswith((".", "~")) or path.suffix == ".gguf":
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        return ModelLoadError(f"model {name!r}: no such file or folder{did_you_mean(path.name, siblings)}; {_ALLOWED}")
    return ModelLoadError(f"unknown model {name!r}{did_you_mean(name, [DEFAULT_MODEL])}; {_ALLOWED}")


def _scaled_length(length: int, scaling: Mapping[str, object]) -> int:
    if isinstance(per_layer_type := scaling.get("full_attention"), Mapping):
        scaling = per_layer_type
    kind = scaling.get("rope_type", scaling.get("type"))
    factor = scaling.get("factor")
    if kind not in {"linear", "dynamic", "yarn"} or not isinstance(factor, int | float) or factor <= 0:
        return length  # llama3 and longrope checkpoints already state the scaled length
    original = _count(scaling.get("original_max_position_embeddings")) if kind == "yarn" else None
    return int((original or length) * factor)


def _token_ids(value: object, path: Path) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in ids):
        raise ModelLoadError(f"{path}: eos_token_id is {value!r}; an id or a list of ids is expected")
    return tuple(dict.fromkeys(ids))


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _ignore(text: str) -> None:
    """Progress that nobody asked for."""
