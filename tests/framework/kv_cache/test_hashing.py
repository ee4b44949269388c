"""The chain of digests: what separates blocks, and what does not."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_requests import FakeRequest
from tokenyard.arrays import IntArray
from tokenyard.interfaces.kv_cache import ExtraKey
from tokenyard.kv_cache.hashing import (
    HashChain,
    RememberedChains,
    SharedBeginnings,
    extras_by_block,
    hash_blocks,
    root_hash,
)


def digests(request: FakeRequest, block_size: int = 3) -> list[bytes]:
    return HashChain(block_size).extend(request, request.num_tokens // block_size)


def test_u3_a_block_is_hashed_with_its_parent_its_tokens_and_its_extra_keys() -> None:
    request = FakeRequest("a", [0, 1, 2, 3, 4, 5], extra_keys=[ExtraKey("img", 4, 6)])
    tokens = np.arange(6, dtype=np.int32).tobytes()
    first = hashlib.sha256(root_hash(None, None) + tokens[:12]).digest()
    extra = (3).to_bytes(8, "little") + b"img" + (2).to_bytes(8, "little") + (1).to_bytes(8, "little")
    assert digests(request) == [first, hashlib.sha256(first + tokens[12:] + extra).digest()]


def test_u3_other_images_give_other_hashes_from_their_block_on() -> None:
    plain = FakeRequest("a", list(range(12)))
    image = FakeRequest("b", list(range(12)), extra_keys=[ExtraKey("x", 4, 5)])
    other = FakeRequest("c", list(range(12)), extra_keys=[ExtraKey("y", 4, 5)])
    moved = FakeRequest("d", list(range(12)), extra_keys=[ExtraKey("x", 5, 6)])
    chains = [digests(request) for request in (plain, image, other, moved)]
    assert len({chain[0] for chain in chains}) == 1
    for index in (1, 2, 3):
        assert len({chain[index] for chain in chains}) == 4


def test_u4_the_root_depends_on_salt_and_adapter_alone_so_that_it_is_the_same_in_every_process() -> None:
    code = "from tokenyard.kv_cache.hashing import root_hash; print(root_hash('s', None).hex())"
    found = {
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
        for _ in range(2)
    }
    assert found == {root_hash("s", None).hex()}


def test_g1_no_name_of_a_block_comes_from_pythons_own_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does any other digest than the whole sha256: what collides there, collides nowhere else."""

    class Salt(str):
        def __hash__(self) -> int:
            raise AssertionError("hash() of a salt")

    def refuse(value: object) -> int:
        raise AssertionError(f"hash() of {value!r}")

    monkeypatch.setattr("tokenyard.kv_cache.hashing.hash", refuse, raising=False)
    request = FakeRequest("a", [1, 2, 3, 4, 5, 6], cache_salt=Salt("s"), extra_keys=[ExtraKey("x", 4, 6)])
    chain = digests(request)
    assert [len(digest) for digest in chain] == [hashlib.sha256().digest_size] * 2
    assert chain[0] == hashlib.sha256(root_hash("s", None) + request.token_ids[:3].tobytes()).digest()


def test_k24_no_two_roots_are_equal() -> None:
    parts = [None, "", "x", "y", "xy", "\0", "\1x"]
    assert len({root_hash(salt, lora) for salt in parts for lora in parts}) == len(parts) ** 2


def test_a_block_hash_depends_on_everything_before_the_block() -> None:
    same_end = [FakeRequest(str(first), [first, 1, 2, 7, 8, 9]) for first in (0, 5)]
    assert digests(same_end[0])[1] != digests(same_end[1])[1]
    assert digests(FakeRequest("a", [7, 8, 9, 7, 8, 9]))[0] != digests(FakeRequest("a", [7, 8, 9, 7, 8, 9]))[1]


def test_without_extra_keys_the_digest_is_that_of_a_request_that_has_no_such_field() -> None:
    class OldRequest:
        """As a scheduler for plugin API 1.1 has it."""

        request_id, cache_salt, lora_name, skip_prefix_cache, num_tokens = "a", None, None, False, 6
        token_ids = np.arange(6, dtype=np.int32)

    chain = HashChain(3).extend(OldRequest(), 2)  # type: ignore[arg-type]
    assert chain == digests(FakeRequest("a", list(range(6))))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=20), st.integers(1, 5), st.lists(st.integers(0, 20)))
def test_a_chain_does_not_depend_on_how_it_was_extended(tokens: list[int], size: int, steps: list[int]) -> None:
    keys = [ExtraKey("x", 1, 4), ExtraKey("y", 3, 9)]
    whole = digests(FakeRequest("a", tokens, extra_keys=keys), size)
    request, chain = FakeRequest("a", tokens[:1], extra_keys=keys), HashChain(size)
    for step in [*sorted(steps), len(tokens)]:
        request.tokens = tokens[: max(1, min(step, len(tokens)))]
        chain.extend(request, request.num_tokens // size)
    assert chain.digests == whole


def make_key(key: str, start: int, length: int) -> ExtraKey:
    return ExtraKey(key, start, start + length)


KEYS = st.lists(st.builds(make_key, st.text("ab\0", max_size=3), st.integers(0, 7), st.integers(0, 4)), max_size=3)


@given(KEYS, KEYS)
def test_k24_blocks_mix_in_every_key_that_overlaps_them_and_its_place(
    first: list[ExtraKey], second: list[ExtraKey]
) -> None:
    def seen(keys: list[ExtraKey], block: int) -> list[ExtraKey]:
        return [key for key in keys if max(key.start, block * 4) < min(key.end, block * 4 + 4)]

    mixed = [extras_by_block(keys, 4) for keys in (first, second)]
    for block in range(4):
        is_equal = seen(first, block) == seen(second, block)
        assert (mixed[0].get(block) == mixed[1].get(block)) == is_equal


def test_an_empty_range_and_one_that_ends_at_the_edge_touch_no_further_block() -> None:
    assert extras_by_block([ExtraKey("x", 4, 4)], 4) == {}
    assert list(extras_by_block([ExtraKey("x", 3, 8)], 4)) == [0, 1]
    assert list(extras_by_block([ExtraKey("x", 4, 5)], 4)) == [1]


def test_blocks_hashed_later_find_their_own_extras() -> None:
    tokens, extras = np.arange(8, dtype=np.int32), {1: b"x"}
    both = hash_blocks(b"p", tokens, 4, extras=extras)
    assert hash_blocks(both[0], tokens[4:], 4, first_block=1, extras=extras) == both[1:]
    assert both != hash_blocks(b"p", tokens, 4)


def test_tokens_that_are_not_there_or_not_int32_are_never_hashed() -> None:
    with pytest.raises(RuntimeError, match="request a: its tokens 0 to 8 are to be hashed as int32"):
        HashChain(4).extend(FakeRequest("a", list(range(7))), 2)

    class Wide(FakeRequest):
        @property
        def token_ids(self) -> np.ndarray:
            return np.array(self.tokens, dtype=np.int64)

    with pytest.raises(RuntimeError, match="int64"):
        HashChain(4).extend(Wide("a", list(range(8))), 2)


def test_a_remembered_chain_belongs_to_one_request_object() -> None:
    chains = RememberedChains(4)
    first, second = FakeRequest("a", [1] * 8), FakeRequest("a", [2] * 8)
    chain = chains.get(first)
    assert chains.get(first) is chain
    assert chains.get(second) is not chain
    assert chains.take(first) is not chain
    assert len(chains) == 0


def test_chains_that_nobody_drops_are_bounded() -> None:
    chains = RememberedChains(4, limit=3)
    requests = [FakeRequest(str(number), [1] * 8) for number in range(5)]
    kept = [chains.get(request) for request in requests]
    assert len(chains) == 3
    is_kept = [chains.take(request) is chain for request, chain in zip(requests, kept, strict=True)]
    assert is_kept == [False, False, True, True, True]


def test_distinct_prompts_have_distinct_digests() -> None:
    chains = [digests(FakeRequest("a", [a, b]), 1) for a in range(4) for b in range(4)]
    for one, other in combinations(chains, 2):
        assert one[1] != other[1]


PROMPTS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 14), st.lists(st.integers(0, 1), max_size=14)), max_size=12
)


@given(PROMPTS, st.integers(1, 4), st.integers(1, 3), st.integers(1, 12))
def test_digests_do_not_depend_on_what_was_hashed_before(
    prompts: list[tuple[int, int, list[int]]], size: int, limit: int, longest: int
) -> None:
    beginnings = SharedBeginnings(limit=limit, longest=longest)
    for fill, length, tail in prompts:
        request = FakeRequest("a", [*[fill] * length, *tail, 5])
        num_blocks = request.num_tokens // size
        assert HashChain(size, beginnings).extend(request, num_blocks) == digests(request, size)


def test_prompts_that_begin_alike_are_hashed_only_where_they_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    beginnings, hashed = SharedBeginnings(), []

    def counted(parent: bytes, token_ids: IntArray, block_size: int, **more: object) -> list[bytes]:
        hashed.append(len(token_ids) // block_size)
        return hash_blocks(parent, token_ids, block_size)

    monkeypatch.setattr("tokenyard.kv_cache.hashing.hash_blocks", counted)
    for tail, expected in ((7, 25), (8, 6), (8, 1)):
        hashed.clear()
        request = FakeRequest("a", [*range(80), *[tail] * 20])
        HashChain(4, beginnings).extend(request, 25)
        assert sum(hashed) == expected
