"""The compiled kernels as Python sees them: the structs of job.h, and the functions that take them."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch

_INTEGER, _POINTER = ctypes.c_int64, ctypes.c_void_p
_STATUS = {1: "a slot of this step", 2: "a block of this step's tables"}


class Setup(ctypes.Structure):
    """A backend's sizes, threads and work space."""

    _fields_: ClassVar[Sequence[tuple[str, type]]] = [
        ("num_heads", _INTEGER),
        ("num_kv_heads", _INTEGER),
        ("head_dim", _INTEGER),
        ("v_head_dim", _INTEGER),
        ("block_size", _INTEGER),
        ("element_type", _INTEGER),  # 0 float32, 1 bfloat16, 2 float16
        ("num_threads", _INTEGER),
        ("parallel", _POINTER),
        ("scratch", _POINTER),
        ("scratch_bytes", _INTEGER),
    ]


class Step(ctypes.Structure):
    """A step of one KV group. What it points to must outlive it."""

    _fields_: ClassVar[Sequence[tuple[str, type]]] = [
        ("num_sequences", _INTEGER),
        ("num_tokens", _INTEGER),
        ("table_stride", _INTEGER),
        ("query_start", _POINTER),
        ("seq_lens", _POINTER),
        ("block_table", _POINTER),
        ("slots", _POINTER),
        ("order", _POINTER),
        ("first_split", _POINTER),
        ("first_task", _POINTER),
        ("finished", _POINTER),
        ("partials", _POINTER),
    ]


class Layer(ctypes.Structure):
    """One layer's tensors and constants; strides in elements."""

    _fields_: ClassVar[Sequence[tuple[str, type]]] = [
        ("query", _POINTER),
        ("key", _POINTER),
        ("value", _POINTER),
        ("key_cache", _POINTER),
        ("value_cache", _POINTER),
        ("out", _POINTER),
        ("lse", _POINTER),
        ("sinks", _POINTER),
        ("query_stride", _INTEGER),
        ("key_stride", _INTEGER),
        ("value_stride", _INTEGER),
        ("num_blocks", _INTEGER),
        ("window", _INTEGER),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
    ]


class Kernels:
    """A loaded library. Raises OSError if the file does not load, AttributeError if it is another library."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        library.tokenyard_isa.restype = ctypes.c_char_p
        library.tokenyard_split_tokens.restype = _INTEGER
        library.tokenyard_row_elements.restype = _INTEGER
        library.tokenyard_scratch_bytes.restype = _INTEGER
        library.tokenyard_scratch_bytes.argtypes = [ctypes.POINTER(Setup)]
        library.tokenyard_attend.restype = ctypes.c_int32
        library.tokenyard_attend.argtypes = [ctypes.POINTER(Setup), ctypes.POINTER(Step), ctypes.POINTER(Layer)]
        self.library = library
        self.isa: str = library.tokenyard_isa().decode()
        self.split_tokens: int = library.tokenyard_split_tokens()
        self.row_elements: int = library.tokenyard_row_elements()
        self._attend = library.tokenyard_attend

    def scratch_bytes(self, setup: Setup) -> int:
        """Work space of one thread."""
        return int(self.library.tokenyard_scratch_bytes(setup))

    def attend(self, setup: Setup, step: Step, layer: Layer) -> None:
        """Write a layer's K and V, and attend. Raises IndexError, before it reads or writes outside of the cache."""
        if status := self._attend(setup, step, layer):
            raise IndexError(f"{_STATUS[status]} lies outside of the K/V cache of {layer.num_blocks} blocks")


def torch_thread_pool() -> int | None:
    """Address of GOMP_parallel in the OpenMP runtime that torch itself runs on; None where it has none.

    Looked up through torch's own library, so that a second runtime in the process, with threads that would fight
    torch's for the cores, is never loaded or used. GNU's runtime has this function, LLVM's and Intel's have it too.
    """
    suffix = "dylib" if sys.platform == "darwin" else "so"
    try:
        function = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / f"libtorch_cpu.{suffix}")).GOMP_parallel
    except (OSError, AttributeError):
        return None
    return ctypes.cast(function, _POINTER).value
