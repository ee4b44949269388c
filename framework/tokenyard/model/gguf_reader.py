"""Reading a GGUF file's header, with every count, size and offset checked before it is used.

The `gguf` package's own reader trusts the file; this one reads the same layout from a memory map and raises
ModelLoadError for anything that does not hold. Numbers are Python integers, so no product can wrap. Layout, all
little-endian: magic, version, tensor count, key count, key-value pairs, tensor infos, padding, tensor data.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TypeAlias

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from tokenyard.errors import ModelLoadError

GGUFValue: TypeAlias = "int | float | bool | str | list[int | float | bool | str]"

MAX_ENTRIES = 100_000  # keys, and tensors
MAX_STRING_BYTES = 16 * 2**20
MAX_ARRAY_ITEMS = 4_000_000
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 2**20
_MAX_NAME_BYTES = 2**16
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFTensor:
    """Where a tensor's bytes are. `shape` is in the usual order, rows first (the file stores it reversed)."""

    name: str
    shape: tuple[int, ...]
    type_name: str  # of ggml, such as Q4_1
    offset: int  # from the start of the file
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFHeader:
    """What a GGUF file says about itself."""

    path: Path
    metadata: Mapping[str, GGUFValue]
    tensors: Mapping[str, GGUFTensor]


def read_gguf(path: Path) -> GGUFHeader:
    """The header of a GGUF file of version 2 or 3; ModelLoadError for any file that is not a sound one."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _HeaderReader(path, data).read()
    except (OSError, ValueError) as error:  # an empty file cannot be mapped: ValueError
        if isinstance(error, ModelLoadError):
            raise
        raise ModelLoadError(f"{path}: cannot be read as GGUF ({error})") from error


class _HeaderReader:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._at = 0

    def read(self) -> GGUFHeader:
        if self._data[:4] != b"GGUF":
            raise self._broken("the file does not begin with 'GGUF'")
        self._at = 4
        version = self._number("I")
        if version not in (2, 3):
            raise self._broken(f"GGUF version {version}; versions 2 and 3, little-endian, are read")
        num_tensors, num_keys = self._count("tensors"), self._count("keys")
        metadata = self._metadata(num_keys)
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = self._alignment(metadata)
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, dimensions, type_id, offset in infos:
            if name in tensors:
                raise self._broken(f"tensor {name!r} is there twice")
            tensors[name] = self._tensor(name, dimensions, type_id, start, offset, alignment)
        return GGUFHeader(path=self._path, metadata=metadata, tensors=tensors)

    def _metadata(self, num_keys: int) -> dict[str, GGUFValue]:
        metadata: dict[str, GGUFValue] = {}
        for _ in range(num_keys):
            key = self._string(_MAX_NAME_BYTES)
            if key in metadata:
                raise self._broken(f"key {key!r} is there twice")
            metadata[key] = self._value(int(self._number("I")), key)
        return metadata

    def _value(self, type_id: int, key: str) -> GGUFValue:
        if type_id == _STRING:
            return self._string(MAX_STRING_BYTES)
        if type_id == _ARRAY:
            return self._array(key)
        if type_id in _SCALARS:
            return self._number(_SCALARS[type_id])
        raise self._broken(f"key {key!r} has the unknown value type {type_id}")

    def _array(self, key: str) -> list[int | float | bool | str]:
        item_type, length = int(self._number("I")), int(self._number("Q"))
        if length > MAX_ARRAY_ITEMS:
            raise self._broken(f"key {key!r} is an array of {length} items; at most {MAX_ARRAY_ITEMS} are read")
        if item_type == _STRING:
            return list(self._strings(length))
        if item_type not in _SCALARS:
            raise self._broken(f"key {key!r} is an array of type {item_type}; numbers and strings are read")
        code = f"<{length}{_SCALARS[item_type]}"
        return list(struct.unpack(code, self._bytes(struct.calcsize(code))))

    def _tensor_info(self) -> tuple[str, list[int], int, int]:
        name = self._string(_MAX_NAME_BYTES)
        num_dimensions = int(self._number("I"))
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self._broken(f"tensor {name!r} has {num_dimensions} dimensions; 1 to {MAX_DIMENSIONS} are read")
        dimensions = [int(self._number("Q")) for _ in range(num_dimensions)]
        return name, dimensions, int(self._number("I")), int(self._number("Q"))

    def _tensor(
        self, name: str, dimensions: list[int], type_id: int, start: int, offset: int, alignment: int
    ) -> GGUFTensor:
        try:
            ggml_type = GGMLQuantizationType(type_id)
            block_size, block_bytes = GGML_QUANT_SIZES[ggml_type]
        except (ValueError, KeyError):
            raise self._broken(f"tensor {name!r} has the unknown type {type_id}") from None
        if dimensions[0] % block_size or min(dimensions) < 1:
            raise self._broken(f"tensor {name!r} of shape {dimensions} does not divide into blocks of {block_size}")
        num_bytes = prod(dimensions) // block_size * block_bytes
        if offset % alignment or start + offset + num_bytes > self._size:
            raise self._broken(f"tensor {name!r} lies outside of the file of {self._size} bytes; is it complete?")
        return GGUFTensor(
            name=name,
            shape=tuple(reversed(dimensions)),
            type_name=ggml_type.name,
            offset=start + offset,
            num_bytes=num_bytes,
        )

    def _alignment(self, metadata: Mapping[str, GGUFValue]) -> int:
        value = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        is_power = isinstance(value, int) and 0 < value <= MAX_ALIGNMENT and value & (value - 1) == 0
        if not isinstance(value, int) or not is_power:
            raise self._broken(f"general.alignment is {repr(value)[:40]}; a power of two up to {MAX_ALIGNMENT} is read")
        return value

    def _count(self, what: str) -> int:
        count = int(self._number("Q"))
        if count > MAX_ENTRIES:
            raise self._broken(f"it declares {count} {what}; at most {MAX_ENTRIES} are read")
        return count

    def _string(self, max_bytes: int) -> str:
        length = int(self._number("Q"))
        if length > max_bytes:
            raise self._broken(f"a string of {length} bytes; at most {max_bytes} are read")
        try:
            return self._bytes(length).decode("utf-8")
        except UnicodeDecodeError:
            raise self._broken(f"the string at byte {self._at - length} is not UTF-8") from None

    def _strings(self, count: int) -> Iterator[str]:
        """Strings in a row, as `_string` reads one: vocabularies have hundreds of thousands."""
        data, size, unpack = self._data, self._size, _LENGTH.unpack_from
        for _ in range(count):
            start = self._at + _LENGTH.size
            if start <= size:
                (length,) = unpack(data, self._at)
                if length <= MAX_STRING_BYTES and start + length <= size:
                    try:
                        text = data[start : start + length].decode("utf-8")
                    except UnicodeDecodeError:
                        raise self._broken(f"the string at byte {start} is not UTF-8") from None
                    self._at = start + length
                    yield text
                    continue
            yield self._string(MAX_STRING_BYTES)  # says what is wrong

    def _number(self, code: str) -> int | float | bool:
        (value,) = struct.unpack("<" + code, self._bytes(struct.calcsize("<" + code)))
        if isinstance(value, int | float):
            return value
        raise self._broken(f"no number at byte {self._at}")

    def _bytes(self, length: int) -> bytes:
        end = self._at + length
        if end > self._size:
            raise self._broken(f"the file ends at byte {self._size}, inside its header; is it complete?")
        piece = self._data[self._at : end]
        self._at = end
        return piece

    def _broken(self, reason: str) -> ModelLoadError:
        return ModelLoadError(f"{self._path}: {reason}")
