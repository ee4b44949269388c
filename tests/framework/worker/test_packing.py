"""Packing: what is put into a buffer comes out of it, each array at an aligned address."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from late_device import CPU, LateCalls
from tokenyard.worker.packing import Packing
from tokenyard.worker.stream import DeviceStream, HostStream, QueuedStream

ARRAYS = st.lists(
    st.sampled_from([np.int32, np.int64, np.float32, np.float64]).flatmap(
        lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=40))
    ),
    max_size=6,
)


@settings(deadline=None)
@given(ARRAYS)
def test_arrays_keep_their_values_types_and_shapes_and_overlap_nowhere(given_arrays: list[np.ndarray]) -> None:
    packing = Packing.of(given_arrays)
    buffer = torch.zeros(packing.num_bytes, dtype=torch.uint8)
    for place, array in zip(packing.arrays(buffer), given_arrays, strict=True):
        place[...] = array
    for tensor, array in zip(packing.tensors(buffer), given_arrays, strict=True):
        assert tensor.is_contiguous()
        assert (tensor.storage_offset() * tensor.element_size()) % 256 == 0
        np.testing.assert_array_equal(tensor.numpy(), array)
        assert tensor.numpy().dtype == array.dtype


@settings(deadline=None)
@given(ARRAYS.filter(lambda found: any(array.size for array in found)))
def test_an_upload_and_a_download_are_one_copy_each_and_change_nothing(given_arrays: list[np.ndarray]) -> None:
    calls = LateCalls()
    streams: list[DeviceStream] = [HostStream(), QueuedStream(CPU, calls)]
    for stream in streams:
        tensors = stream.upload(given_arrays)
        download = stream.download(tensors)
        assert download.is_done() is not stream.is_async
        for found, array in zip(download.arrays(), given_arrays, strict=True):
            np.testing.assert_array_equal(found, array)
        assert download.is_done()
    assert calls.log == ["up", "down", "wait"]


@settings(deadline=None)
@given(ARRAYS.filter(lambda found: any(array.size for array in found)))
def test_a_buffer_is_refilled_in_place(given_arrays: list[np.ndarray]) -> None:
    packing = Packing.of(given_arrays)
    for stream in (HostStream(), QueuedStream(CPU, LateCalls())):
        buffer = torch.zeros(packing.num_bytes + 300, dtype=torch.uint8)
        kept = packing.tensors(buffer)
        stream.refill(buffer, packing, given_arrays)
        for tensor, array in zip(kept, given_arrays, strict=True):
            np.testing.assert_array_equal(tensor.numpy(), array)
        assert not buffer[packing.num_bytes :].any()


def test_an_array_that_is_not_contiguous_is_uploaded_as_it_reads() -> None:
    array = np.arange(12, dtype=np.int32).reshape(3, 4).T
    for stream in (HostStream(), QueuedStream(CPU, LateCalls())):
        (tensor,) = stream.upload([array])
        assert tensor.is_contiguous()
        np.testing.assert_array_equal(tensor.numpy(), array)


def test_a_download_is_garbage_until_it_was_waited_for_and_shows_the_moment_it_was_queued() -> None:
    calls = LateCalls()
    stream = QueuedStream(CPU, calls)
    tensor = torch.arange(4)
    download = stream.download([tensor])
    tensor.fill_(7)
    later = stream.download([tensor])
    assert not download.is_done()
    assert download.arrays()[0].tolist() == [0, 1, 2, 3]
    assert not later.is_done()
    calls.catch_up()
    assert later.is_done()
    assert later.arrays()[0].tolist() == [7] * 4
    assert calls.log == ["down", "down", "wait"]
