"""A GGUF file's tensors, dequantised, under Hugging Face's names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from gguf import dequantize
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from tokenyard.errors import ModelLoadError
from tokenyard.model.gguf_architectures import architecture_of, hf_names
from tokenyard.model.gguf_blocks import BLOCK_DECODERS, decode_block
from tokenyard.model.gguf_metadata import Metadata
from tokenyard.model.gguf_reader import GGUFTensor, read_gguf
from tokenyard.model.weights import WeightSource, unknown_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import TypeAlias

    from tokenyard.model.files import ModelFiles

    Bytes: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]"

SUPPORTED_TYPES = ("F32", "F16", "BF16", *BLOCK_DECODERS)
_CHUNK_VALUES = 2**22  # dequantised at once: bounds the float32 copy beside the result


class GGUFWeights(WeightSource):
    """Dequantises a tensor when it is asked for; holds nothing but a memory map.

    llama.cpp stores the rows of Llama's Q and K so that the two values of a rotary pair are neighbours; they are put
    back into Hugging Face's order (halves) per head, with the number of query heads for Q and of K/V heads for K.
    """

    def __init__(self, files: ModelFiles) -> None:
        header = read_gguf(files.path)
        architecture = architecture_of(Metadata(header))
        self._path = files.path
        self._tensors = hf_names(header, architecture)
        self._data: np.memmap[tuple[int], np.dtype[np.uint8]] | None = np.memmap(files.path, mode="r", dtype=np.uint8)
        heads = {"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"}
        self._heads = {part: _head_count(files, key) for part, key in heads.items()} if architecture.interleaved else {}
        for name, tensor in self._tensors.items():
            self._check(name, tensor)

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def get(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        if name not in self._tensors:
            raise unknown_tensor(self._path, name, self.names())
        tensor = self._tensors[name]
        values = self._dequantise(tensor, dtype).reshape(tensor.shape)
        heads = self._heads_of(name)
        return values if heads is None else _halves_first(values, heads)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._tensors:
            raise unknown_tensor(self._path, name, self.names())
        return tuple(self._tensors[name].shape)

    def get_part(self, name: str, dtype: torch.dtype, axis: int, part: slice) -> torch.Tensor:
        """Cut from the dequantised tensor: its blocks may lie across the cut, and so may its order of rows."""
        whole = self.get(name, dtype)
        return (whole[part] if axis == 0 else whole[..., part]).clone()

    def close(self) -> None:
        self._data = None

    def _check(self, name: str, tensor: GGUFTensor) -> None:
        if tensor.type_name not in SUPPORTED_TYPES:
            raise ModelLoadError(
                f"{self._path}: tensor {tensor.name!r} is quantised as {tensor.type_name}, which is not available; "
                f"allowed: {', '.join(SUPPORTED_TYPES)}"
            )
        heads = self._heads_of(name)
        if heads is not None and tensor.shape[0] % (2 * heads):
            raise ModelLoadError(
                f"{self._path}: tensor {tensor.name!r} of shape {tensor.shape} does not divide into {heads} heads"
            )

    def _heads_of(self, name: str) -> int | None:
        parts = name.split(".")
        return self._heads.get(".".join(parts[-3:-1]))

    def _dequantise(self, tensor: GGUFTensor, dtype: torch.dtype) -> torch.Tensor:
        if self._data is None:
            raise ModelLoadError(f"{self._path}: the weights were closed")
        block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[tensor.type_name]]
        columns = tensor.shape[-1]
        packed = self._data[tensor.offset : tensor.offset + tensor.num_bytes]
        rows = packed.reshape(-1, columns // block_size * block_bytes)
        result = torch.zeros((rows.shape[0], columns), dtype=dtype)
        for part in row_slices(rows.shape[0], columns):
            dequantise_rows(rows[part], tensor.type_name, result[part])
        if not is_dequantised(rows, tensor.type_name, result):
            raise ModelLoadError(
                f"{self._path}: tensor {tensor.name!r} of type {tensor.type_name} does not dequantise to what its "
                "format says; update the package gguf, and report this if it stays"
            )
        return result


def row_slices(num_rows: int, columns: int) -> Iterator[slice]:
    """Slices that cover all rows, of about _CHUNK_VALUES values each."""
    step = max(1, _CHUNK_VALUES // columns)
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def dequantise_rows(rows: Bytes, type_name: str, result: torch.Tensor) -> None:
    """Write the values of packed rows [R, bytes] into `result` [R, columns]."""
    with np.errstate(all="ignore"):  # a broken scale gives inf or nan, as the file says
        values = dequantize(np.array(rows), GGMLQuantizationType[type_name])
    result.copy_(torch.from_numpy(np.asarray(values, dtype=np.float32)))


def is_dequantised(rows: Bytes, type_name: str, result: torch.Tensor) -> bool:
    """Whether the first and the last block of `rows` are in `result` as the format's definition has them."""
    if type_name not in BLOCK_DECODERS:
        return True
    block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    samples = (rows[0, :block_bytes], result[0, :block_size]), (rows[-1, -block_bytes:], result[-1, -block_size:])
    return all(_is_close(got, decode_block(type_name, block.tobytes())) for block, got in samples)


def _is_close(got: torch.Tensor, expected: list[float]) -> bool:
    rounded = torch.tensor(expected, dtype=torch.float64).float().to(got.dtype).double()
    largest = float(rounded[rounded.isfinite()].abs().max()) if bool(rounded.isfinite().any()) else 0.0
    return torch.allclose(got.double(), rounded, rtol=1e-2, atol=1e-5 * largest, equal_nan=True)


def _halves_first(values: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from pairs (a0 b0 a1 b1 ...) to halves (a0 a1 ... b0 b1 ...)."""
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, -1)
    return pairs.transpose(1, 2).reshape(values.shape)


def _head_count(files: ModelFiles, key: str) -> int:
    count = files.config.get(key)
    if not isinstance(count, int) or count < 1:
        raise ModelLoadError(f"{files.path}: the config has no {key!r}")
    return count
