from __future__ import annotations

import pickle
import random
from typing import get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as np_st
from tokenyard.ipc.codec import Array, Codec, TypeName


class Apple(msgspec.Struct, tag="apple", frozen=True):
    weight: int
    seeds: Array | None = None


class Pear(msgspec.Struct, tag="pear", frozen=True):
    names: list[str]


def fruit() -> Codec[Apple | Pear]:
    return Codec((Apple, Pear))


@given(
    st.sampled_from(get_args(TypeName)).flatmap(
        lambda name: np_st.arrays(np.dtype(name), np_st.array_shapes(min_dims=0, max_dims=3, min_side=0))
    )
)
def test_every_array_comes_back_as_it_was(values: np.ndarray) -> None:
    codec = fruit()
    message = codec.decode(codec.encode(Apple(1, Array.of(values))))
    assert isinstance(message, Apple)
    assert message.seeds is not None
    back = message.seeds.values(values.dtype.type, values.ndim)
    assert back.dtype == values.dtype
    assert np.array_equal(back, values, equal_nan=values.dtype.kind == "f")


def test_an_array_of_a_type_that_is_not_listed_is_refused() -> None:
    with pytest.raises(TypeError, match="object"):
        Array.of(np.array([object()]))


@pytest.mark.parametrize(
    "broken",
    [
        Array("int32", (2,), b"1234"),
        Array("int32", (-1, -1), b"1234"),
        Array("int64", (1,), b"12345678"),
        Array("int32", (1, 1), b"1234"),
        Array("int32", (2**62, 4), b""),
    ],
)
def test_an_array_that_does_not_fit_its_bytes_or_its_place_is_a_value_error(broken: Array) -> None:
    with pytest.raises(ValueError, match="array"):
        broken.values(np.int32, 1)


class Writes:
    """Writes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (open, (self.path, "w"))


def test_a1_a_pickle_is_dropped_and_counted_and_not_run(tmp_path) -> None:  # type: ignore[no-untyped-def]
    planted = tmp_path / "planted"
    codec = fruit()
    assert codec.decode(pickle.dumps(Writes(str(planted)))) is None
    assert codec.num_dropped == 1
    assert not planted.exists()


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"type": "melon", "weight": 1}),
        msgspec.msgpack.encode({"type": "apple", "weight": "heavy"}),
        msgspec.msgpack.encode({"weight": 1}),
        msgspec.msgpack.encode([1, 2, 3]),
        b"\x81\xa4type" + b"\x91" * 100_000,
        msgspec.msgpack.encode({"type": "pear"})[:-1] + b"\xdd\xff\xff\xff\xff",
        b"\x82\xa4type\xa4pear\xa5names\xdd\xff\xff\xff\xff",
        b"\x82\xa4type\xa4pear\xa5names\x91\xa2\xff\xfe",
    ],
    ids=["empty", "no msgpack", "unknown tag", "wrong type", "no tag", "list", "deep", "cut", "huge", "no UTF-8"],
)
def test_2_3_21_a_frame_that_is_no_message_is_dropped_and_counted(frame: bytes) -> None:
    codec = fruit()
    assert codec.decode(frame) is None
    assert codec.num_dropped == 1


@given(st.integers(0, 2**32), st.integers(1, 8))
def test_a_mutated_frame_is_a_message_or_dropped_and_never_raises(seed: int, num_changes: int) -> None:
    codec, rng = fruit(), random.Random(seed)
    frame = bytearray(codec.encode(Apple(7, Array.of(np.arange(5, dtype=np.int32)))))
    for _ in range(num_changes):
        frame[rng.randrange(len(frame))] = rng.randrange(256)
    message = codec.decode(bytes(frame[: rng.randrange(len(frame) + 1)] if rng.random() < 0.3 else frame))
    assert message is None or isinstance(message, Apple | Pear)
    assert codec.num_dropped == (message is None)
