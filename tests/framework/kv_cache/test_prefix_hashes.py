"""Names of what requests begin with: equal where two requests begin alike, whether or not anything is cached."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_requests import FakeRequest, Manager, start
from tokenyard.kv_cache import PagedKVCacheManager, RadixKVCacheManager

MakeManager = Callable[..., Manager]
BOTH = pytest.mark.parametrize("make", [PagedKVCacheManager, RadixKVCacheManager], ids=["paged", "radix"])
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)


@BOTH
@settings(max_examples=60, deadline=None)
@given(one=TOKENS, other=TOKENS, block_size=st.sampled_from([1, 2, 4]), is_computed=st.booleans())
def test_names_are_equal_just_as_far_as_two_requests_begin_alike(
    make: MakeManager, one: list[int], other: list[int], block_size: int, is_computed: bool
) -> None:
    manager = make(num_blocks=64, block_size=block_size)
    first, second = FakeRequest("one", one), FakeRequest("other", other)
    if is_computed:
        start(manager, first)
    names = [manager.prefix_hashes(request) for request in (first, second)]
    assert [len(ids) for ids in names] == [(len(tokens) - 1) // block_size for tokens in (one, other)]
    for block, (left, right) in enumerate(zip(*names, strict=False)):
        end = (block + 1) * block_size
        assert (left == right) == (one[:end] == other[:end])


@BOTH
def test_names_do_not_change_when_a_request_runs_and_when_its_content_is_found(make: MakeManager) -> None:
    manager = make(num_blocks=16, block_size=4)
    request, later = FakeRequest("one", list(range(10))), FakeRequest("later", list(range(10)))
    before = list(manager.prefix_hashes(request))
    start(manager, request)
    assert list(manager.prefix_hashes(request)) == before == list(manager.prefix_hashes(later))
    assert manager.lookup(later).tokens == 4 * len(before) == 8


@BOTH
def test_requests_that_can_share_nothing_have_no_common_names(make: MakeManager) -> None:
    manager = make(num_blocks=16, block_size=4)
    tokens = list(range(10))
    own = manager.prefix_hashes(FakeRequest("one", tokens))
    salted = manager.prefix_hashes(FakeRequest("salted", tokens, cache_salt="tenant"))
    assert len(own) == len(salted) == 2
    assert not set(own) & set(salted)


@BOTH
def test_who_skips_the_prefix_cache_has_no_names(make: MakeManager) -> None:
    request = FakeRequest("one", list(range(10)), skip_prefix_cache=True)
    assert list(make(num_blocks=16, block_size=4).prefix_hashes(request)) == []
    without = make(num_blocks=16, block_size=4, enable_prefix_caching=False)
    assert list(without.prefix_hashes(FakeRequest("two", list(range(10))))) == []


@BOTH
def test_an_id_that_is_used_again_has_names_of_its_own(make: MakeManager) -> None:
    manager = make(num_blocks=16, block_size=4)
    first, second = FakeRequest("one", list(range(10))), FakeRequest("one", list(range(50, 60)))
    names = list(manager.prefix_hashes(first))
    start(manager, first)
    manager.free(first)
    assert not set(manager.prefix_hashes(second)) & set(names)
