"""A GGUF file's tensors, dequantised, under Hugging Face's names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from gguf import dequantize
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from tokenyard.errors import ModelLoadError
from tokenyard.model.gguf_config import hf_names
from tokenyard.model.gguf_reader import GGUFTensor, read_gguf
from tokenyard.model.weights import WeightSource, unknown_tensor

if TYPE_CHECKING:
    from tokenyard.model.files import ModelFiles

SUPPORTED_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
_CHUNK_VALUES = 2**22  # dequantised at once: bounds the float32 copy beside the result


class GGUFWeights(WeightSource):
    """Dequantises a tensor when it is asked for; holds nothing but a memory map.

    llama.cpp stores the rows of Llama's Q and K so that the two values of a rotary pair are neighbours; they are put
    back into Hugging Face's order (halves) per head, with the number of query heads for Q and of K/V heads for K.
    """

    def __init__(self, files: ModelFiles) -> None:
        self._path = files.path
        self._tensors = hf_names(read_gguf(files.path))
        self._data: np.memmap[tuple[int], np.dtype[np.uint8]] | None = np.memmap(files.path, mode="r", dtype=np.uint8)
        self._heads = {
            "self_attn.q_proj": _head_count(files, "num_attention_heads"),
            "self_attn.k_proj": _head_count(files, "num_key_value_heads"),
        }
        for name, tensor in self._tensors.items():
            self._check(name, tensor)

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def get(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        if name not in self._tensors:
            raise unknown_tensor(self._path, name, self.names())
        tensor = self._tensors[name]
        values = self._dequantise(tensor, dtype)
        heads = self._heads_of(name)
        return values if heads is None else _halves_first(values, heads)

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
        ggml_type = GGMLQuantizationType[tensor.type_name]
        block_size, block_bytes = GGML_QUANT_SIZES[ggml_type]
        columns = tensor.shape[-1]
        rows = self._data[tensor.offset : tensor.offset + tensor.num_bytes].reshape(
            -1, columns // block_size * block_bytes
        )
        result = torch.zeros((rows.shape[0], columns), dtype=dtype)
        step = max(1, _CHUNK_VALUES // columns)
        for start in range(0, rows.shape[0], step):
            with np.errstate(all="ignore"):  # a broken scale gives inf or nan, as the file says
                chunk = dequantize(np.array(rows[start : start + step]), ggml_type)
            result[start : start + step] = torch.from_numpy(np.asarray(chunk, dtype=np.float32))
        return result.reshape(tensor.shape)


def _halves_first(values: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from pairs (a0 b0 a1 b1 ...) to halves (a0 a1 ... b0 b1 ...)."""
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, -1)
    return pairs.transpose(1, 2).reshape(values.shape)


def _head_count(files: ModelFiles, key: str) -> int:
    count = files.config.get(key)
    if not isinstance(count, int) or count < 1:
        raise ModelLoadError(f"{files.path}: the config has no {key!r}")
    return count
