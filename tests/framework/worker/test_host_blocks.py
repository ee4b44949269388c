"""HostBlocks: the bytes of every block come back, in order, on a CPU and on a device that works behind the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from late_device import CPU, LateCalls
from tokenyard.errors import CapacityError, PluginError
from tokenyard.scheduler_output import HostTransfer
from tokenyard.worker import host_blocks as module
from tokenyard.worker.host_blocks import HostBlocks, make_host_blocks
from tokenyard.worker.stream import DeviceStream, HostStream, QueuedStream

NUM_BLOCKS, NUM_HOST = 9, 13
Caches = list[tuple[torch.Tensor, torch.Tensor]]
Copy = tuple[bool, int, list[tuple[int, int]]]  # to the host; group; (block, host block)


def caches(num_tensors: int = 3, dtype: torch.dtype = torch.float32) -> Caches:
    """Keys of 3 and values of 2 numbers a head, all different."""
    shapes = (NUM_BLOCKS, 4, 2, 3), (NUM_BLOCKS, 4, 2, 2)
    made = []
    for index in range(num_tensors):
        key, value = (
            torch.arange(np.prod(shape)).view(shape) + 1000 * index + half for half, shape in enumerate(shapes)
        )
        made.append((key.to(dtype), value.to(dtype) + 500))
    return made


def transfer(to_host: bool, group: int, pairs: Sequence[tuple[int, int]]) -> HostTransfer:
    device, host = (np.array(ids, dtype=np.int32) for ids in zip(*pairs, strict=True))
    return HostTransfer(device, host, to_host, group)


def stream_of(kind: Literal["cpu", "late"]) -> DeviceStream:
    return HostStream() if kind == "cpu" else QueuedStream(CPU, LateCalls())


@st.composite
def copy_lists(draw: st.DrawFn) -> list[list[Copy]]:
    """Steps of copies; within one copy no block is a target twice."""

    def one() -> Copy:
        count = draw(st.integers(1, 6))
        blocks = draw(st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=count, max_size=count, unique=True))
        start = draw(st.integers(0, NUM_HOST - count))
        hosts = draw(st.permutations(range(NUM_HOST)) if draw(st.booleans()) else st.just(range(start, start + count)))
        return draw(st.booleans()), draw(st.integers(0, 1)), list(zip(blocks, hosts, strict=False))

    return [[one() for _ in range(draw(st.integers(1, 3)))] for _ in range(draw(st.integers(1, 4)))]


@pytest.mark.parametrize("kind", ["cpu", "late"])
@settings(max_examples=150, deadline=None)
@given(steps=copy_lists(), per_slab=st.integers(1, 5), num_staged=st.integers(1, 4))
def test_copies_are_made_in_order_however_memory_is_cut(
    kind: Literal["cpu", "late"], steps: list[list[Copy]], per_slab: int, num_staged: int
) -> None:
    """Against plain assignments: slabs and staging that hold a few blocks, groups that use 3 and 2 of the tensors."""
    found, expected = caches(), caches()
    stays = [(torch.zeros(NUM_HOST, 24), torch.zeros(NUM_HOST, 16)) for _ in expected]
    block_bytes = 3 * (24 + 16) * 4
    host = HostBlocks(
        NUM_HOST,
        found,
        (3, 2),
        stream_of(kind),
        slab_bytes=per_slab * block_bytes,
        staging_bytes=num_staged * block_bytes,
    )
    written: set[tuple[int, int]] = set()
    for step in steps:
        transfers = []
        for to_host, group, pairs in step:
            pairs = [(block, slot) for block, slot in pairs if to_host or (group, slot) in written]
            if not pairs:
                continue
            transfers.append(transfer(to_host, group, pairs))
            for block, slot in pairs:
                if to_host:
                    written.discard((1 - group, slot))
                    written.add((group, slot))
                for tensors, backup in zip(expected[: (3, 2)[group]], stays, strict=False):
                    for cache, saved in zip(tensors, backup, strict=True):
                        if to_host:
                            saved[slot] = cache[block].flatten()
                        else:
                            cache[block] = saved[slot].view_as(cache[block])
        host.transfer(transfers)
        for pair in found:  # a step writes over what was copied
            for cache in pair:
                cache[1] += 1
        for pair in expected:
            for cache in pair:
                cache[1] += 1
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bytes_come_back_as_they_were_also_those_that_are_no_number(dtype: torch.dtype) -> None:
    tensors = caches(dtype=dtype)
    tensors[0][0][2] = torch.nan
    before = [(key.clone(), value.clone()) for key, value in tensors]
    host = HostBlocks(2, tensors, (3,), HostStream())
    host.transfer([transfer(True, 0, [(2, 1), (5, 0)])])
    for pair in tensors:
        for cache in pair:
            cache.zero_()
    host.transfer([transfer(False, 0, [(7, 0), (8, 1)])])
    for old, new in zip(before, tensors, strict=True):
        for was, now in zip(old, new, strict=True):
            assert torch.equal(was[[5, 2]].view(torch.uint8), now[[7, 8]].view(torch.uint8))


def test_neighbours_are_one_copy_between_device_and_host() -> None:
    calls = LateCalls()
    host = HostBlocks(NUM_HOST, caches(), (3,), QueuedStream(CPU, calls))
    host.transfer([transfer(True, 0, [(1, 4), (8, 5), (3, 6), (2, 9)])])
    assert calls.log == ["down", "down"]  # 4 to 6, and 9
    host.transfer([transfer(False, 0, [(1, 4), (8, 5), (3, 6)])])
    assert calls.log[2:] == ["up"]
    assert calls.num_passed == 0  # nobody waited


def made(
    num_blocks: int, tensors: Caches, *, num_ranks: int = 1, num_device_blocks: int = NUM_BLOCKS
) -> HostBlocks | None:
    return make_host_blocks(
        num_blocks,
        tensors,
        (3,),
        HostStream(),
        num_ranks=num_ranks,
        backend_name="odd",
        num_device_blocks=num_device_blocks,
    )


def test_no_blocks_are_no_memory() -> None:
    assert made(0, caches()) is None


def test_more_than_the_machine_has_is_refused_with_what_it_has_for_all_ranks_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "free_ram", lambda: 2 * 2**20)  # 480 bytes a block
    assert made(4000, caches()) is not None
    with pytest.raises(
        CapacityError, match=r"5000 host blocks of 480 bytes take 2 MiB, and this machine has 2 MiB free"
    ):
        made(5000, caches())
    with pytest.raises(CapacityError, match=r"4000 host blocks of 480 bytes for each of 2 ranks take 4 MiB, and"):
        made(4000, caches(), num_ranks=2)


def test_memory_that_cannot_be_had_is_a_capacity_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: HostStream, num_bytes: int) -> torch.Tensor:
        raise RuntimeError("cannot lock pages\nat 0x1")

    monkeypatch.setattr(HostStream, "host_memory", refuse)
    with pytest.raises(CapacityError, match=r"kv_cache\.host_memory: 2 host .* do not fit .* \(cannot lock pages\)$"):
        made(2, caches())


def test_a_cache_that_does_not_lie_block_by_block_cannot_be_copied() -> None:
    with pytest.raises(PluginError, match="attention 'odd' does not lay out its cache block by block"):
        made(2, caches(), num_device_blocks=NUM_BLOCKS + 1)
