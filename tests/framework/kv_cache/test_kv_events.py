"""What observers are told about the prefix cache."""

from __future__ import annotations

from itertools import pairwise

from kv_requests import FakeRequest, decode, start
from tokenyard.kv_cache import PagedKVCacheManager
from tokenyard.kv_cache.hashing import HashChain
from tokenyard.kv_events import BlockRemoved, BlockStored, CacheCleared


def recording(num_blocks: int = 8, group_windows: tuple[int | None, ...] = (None,)) -> PagedKVCacheManager:
    return PagedKVCacheManager(num_blocks=num_blocks, block_size=4, group_windows=group_windows, records_events=True)


def test_k23_a_stored_block_is_told_with_its_parent_its_tokens_and_its_size() -> None:
    manager = recording()
    request = FakeRequest("a", list(range(10)), lora_name="adapter")
    start(manager, request)
    first, second = HashChain(4).extend(request, 2)
    assert manager.take_events() == [
        BlockStored(block_hash=first, parent_hash=None, token_ids=(0, 1, 2, 3), block_size=4, lora_name="adapter"),
        BlockStored(block_hash=second, parent_hash=first, token_ids=(4, 5, 6, 7), block_size=4, lora_name="adapter"),
    ]
    assert list(manager.take_events()) == []


def test_k23_a_content_is_stored_once_and_removed_with_its_last_block() -> None:
    manager = recording(num_blocks=3)
    first, second = FakeRequest("a", [1] * 4), FakeRequest("b", [1] * 4, skip_prefix_cache=True)
    start(manager, first)
    (stored,) = manager.take_events()
    start(manager, second)
    assert list(manager.take_events()) == []
    manager.free(first)
    manager.free(second)
    third = FakeRequest("c", [2] * 5)
    manager.allocate(third, 5)  # blocks 3 and 1
    assert list(manager.take_events()) == []
    fourth = FakeRequest("d", [3])
    manager.allocate(fourth, 1)
    assert isinstance(stored, BlockStored)
    assert manager.take_events() == [BlockRemoved(block_hash=stored.block_hash)]
    manager.check_invariants()


def test_k23_generated_blocks_are_stored_when_they_are_complete() -> None:
    manager = recording()
    request = FakeRequest("a", [0, 1, 2])
    start(manager, request)
    assert list(manager.take_events()) == []
    decode(manager, request, 3, 4, 5, 6)
    assert [event.token_ids for event in manager.take_events() if isinstance(event, BlockStored)] == [(0, 1, 2, 3)]
    decode(manager, request, 7)
    assert [event.token_ids for event in manager.take_events() if isinstance(event, BlockStored)] == [(4, 5, 6, 7)]


def test_k23_a_reset_is_told_when_it_forgot_something() -> None:
    manager = recording()
    request = FakeRequest("a", list(range(8)))
    assert manager.reset()
    assert list(manager.take_events()) == []
    start(manager, request)
    assert not manager.reset()
    manager.free(request)
    assert manager.reset()
    assert manager.take_events()[-1] == CacheCleared()
    start(manager, FakeRequest("b", list(range(8))))
    assert [type(event) for event in manager.take_events()] == [BlockStored, BlockStored]


def test_k23_groups_are_told_apart() -> None:
    manager = recording(num_blocks=6, group_windows=(None, 4))
    request = FakeRequest("a", list(range(8)))
    start(manager, request)
    stored = [event for event in manager.take_events() if isinstance(event, BlockStored)]
    assert [(event.token_ids[0], event.group) for event in stored] == [(0, 0), (0, 1), (4, 0), (4, 1)]
    assert len({event.block_hash for event in stored}) == 2
    manager.free(request)
    manager.allocate(FakeRequest("b", [9] * 12), 12)
    removed = [event for event in manager.take_events() if isinstance(event, BlockRemoved)]
    assert {(event.block_hash, event.group) for event in removed} == {
        (event.block_hash, event.group) for event in stored
    }


def test_k23_parents_come_before_their_children() -> None:
    manager = recording(num_blocks=20)
    start(manager, FakeRequest("a", list(range(20))))
    events = [event for event in manager.take_events() if isinstance(event, BlockStored)]
    assert len(events) == 5
    for parent, child in pairwise(events):
        assert child.parent_hash == parent.block_hash


def test_k23_without_an_observer_nothing_is_recorded() -> None:
    manager = PagedKVCacheManager(num_blocks=4, block_size=4)
    request = FakeRequest("a", list(range(8)))
    start(manager, request)
    manager.free(request)
    manager.reset()
    assert manager.take_events() == ()


def test_k23_without_prefix_caching_there_is_nothing_to_tell() -> None:
    manager = PagedKVCacheManager(num_blocks=4, block_size=4, enable_prefix_caching=False, records_events=True)
    request = FakeRequest("a", list(range(8)))
    start(manager, request)
    manager.free(request)
    assert manager.reset()
    assert list(manager.take_events()) == []
