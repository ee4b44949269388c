"""Weights by Hugging Face parameter name, from safetensors (single or sharded) or GGUF."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

from tokenyard.errors import ModelLoadError, did_you_mean
from tokenyard.model.json_files import file_in_folder, unique_object
from tokenyard.model.snapshot import INDEX_FILE, SINGLE_FILE, read_weight_map

if TYPE_CHECKING:
    from types import EllipsisType, TracebackType

    import torch

    from tokenyard.model.files import ModelFiles


class WeightSource(ABC):
    """A checkpoint's tensors. A context manager; tensors that were got stay valid after close."""

    @abstractmethod
    def names(self) -> frozenset[str]:
        """All parameter names in the checkpoint, as Hugging Face's modeling code calls them."""

    @abstractmethod
    def get(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """One tensor on the CPU. It may share memory with the file: do not write to it."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, which is not read."""

    @abstractmethod
    def get_part(self, name: str, dtype: torch.dtype, axis: int, part: slice) -> torch.Tensor:
        """`part` of one tensor along its first axis (0) or its last (-1); what is beyond need not stay in memory."""

    @abstractmethod
    def close(self) -> None:
        """Release the files; may be called again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def open_weights(files: ModelFiles) -> WeightSource:
    """Open a model's weights: every file is found and its header read here, so that nothing is missing later."""
    if files.format == "safetensors":
        return SafetensorsWeights(files.path)
    from tokenyard.model.gguf_weights import GGUFWeights  # numpy and gguf, which safetensors do not need

    return GGUFWeights(files)


def unknown_tensor(path: Path, name: str, names: frozenset[str]) -> ModelLoadError:
    """The error for a name that the checkpoint does not have."""
    return ModelLoadError(f"{path}: no tensor {name!r} in the checkpoint{did_you_mean(name, names)}")


class _OpenShard(Protocol):
    """What safetensors' open file offers and is used of it."""

    def keys(self) -> list[str]: ...

    def get_tensor(self, name: str) -> torch.Tensor: ...

    def get_slice(self, name: str) -> _OpenTensor: ...


class _OpenTensor(Protocol):
    """A tensor of an open file, read where it is indexed."""

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, index: tuple[slice | EllipsisType, ...]) -> torch.Tensor: ...


class SafetensorsWeights(WeightSource):
    """Memory-mapped; a tensor is copied only when its dtype differs from what is asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._shards: dict[str, _OpenShard] = {}  # parameter name -> the one shard that has it
        try:
            if (folder / INDEX_FILE).is_file():
                self._open_index(folder / INDEX_FILE)
            else:
                shard = self._open(folder / SINGLE_FILE)
                self._shards = dict.fromkeys(shard.keys(), shard)
        except BaseException:
            self._stack.close()
            raise

    def names(self) -> frozenset[str]:
        return frozenset(self._shards)

    def get(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return self._converted(name, self.get_stored(name), dtype)

    def get_stored(self, name: str) -> torch.Tensor:
        """One tensor in the file's own dtype, of whatever kind; it shares memory with the file."""
        return self._shard(name).get_tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._shard(name).get_slice(name).get_shape())

    def get_part(self, name: str, dtype: torch.dtype, axis: int, part: slice) -> torch.Tensor:
        stored = self._shard(name).get_slice(name)
        return self._converted(name, stored[(part, ...) if axis == 0 else (..., part)], dtype)

    def close(self) -> None:
        self._shards = {}
        self._stack.close()

    def _shard(self, name: str) -> _OpenShard:
        if name not in self._shards:
            raise unknown_tensor(self._folder, name, self.names())
        return self._shards[name]

    def _converted(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if not tensor.is_floating_point():
            raise ModelLoadError(
                f"{self._folder}: tensor {name!r} holds {tensor.dtype}, not floating-point numbers; quantised "
                "weights are not available in this version"
            )
        return tensor.to(dtype)

    def _open_index(self, index: Path) -> None:
        """The index decides: what a shard holds beyond its share is not looked at."""
        opened: dict[str, tuple[_OpenShard, frozenset[str]]] = {}
        for name, file_name in read_weight_map(index).items():
            path = file_in_folder(self._folder, file_name, named_by=index)
            if path.name not in opened:
                shard = self._open(path)
                opened[path.name] = shard, frozenset(shard.keys())
            shard, has = opened[path.name]
            if name not in has:
                raise ModelLoadError(f"{path}: tensor {name!r} is not in it, though {index.name} says so")
            self._shards[name] = shard

    def _open(self, path: Path) -> _OpenShard:
        from safetensors import SafetensorError, safe_open

        if path.suffix != ".safetensors":
            raise ModelLoadError(f"{path}: weights are read from .safetensors files only")
        try:
            shard: _OpenShard = self._stack.enter_context(safe_open(path, framework="pt"))
            _check_unique(path)
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{path}: not a complete safetensors file ({error}); fetch the model again") from error
        return shard


def _check_unique(path: Path) -> None:
    """Of a name that stands twice in the header, the library would take the last."""
    with path.open("rb") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
    try:
        json.loads(header, object_pairs_hook=unique_object)
    except ValueError as error:
        raise ModelLoadError(f"{path}: {error}; fetch the model again") from error
