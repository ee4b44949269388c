"""lpm, dfs-weight and dlpm: what the order of a line does to the prefix cache, in figures."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenyard.errors import ConfigError
from tokenyard.interfaces import PolicyContext
from tokenyard.testing import EngineHarness, PolicyContract
from tokenyard_plugins.dfs_weight import DFSWeightOptions, DFSWeightPolicy

if TYPE_CHECKING:
    from tokenyard.interfaces import RequestView, SchedulerView

GROUPS, EACH, PREFIX, OWN = 8, 8, 64, 16  # groups of requests that begin alike, requests of each, tokens
BEST = GROUPS * (EACH - 1) * PREFIX  # hit tokens when each prefix is computed once


class TestLPM(PolicyContract):
    overrides = ("scheduler=lpm",)
    max_examples = 3


class TestDFSWeight(PolicyContract):
    overrides = ("scheduler=dfs-weight",)
    max_examples = 3


def engine_of(policy: str, *overrides: str, num_blocks: int = 24, max_num_seqs: int = 2) -> EngineHarness:
    """The smallest cache holds two of the requests below and a third's prefix, of eight prefixes."""
    return EngineHarness(
        [
            f"scheduler={policy}",
            f"scheduler.max_num_seqs={max_num_seqs}",
            "scheduler.max_num_batched_tokens=256",
            f"kv_cache.num_blocks={num_blocks}",
            *overrides,
        ],
        checks=False,
    )


def prompt(group: int, number: int) -> list[int]:
    return [*range(1000 * group, 1000 * group + PREFIX), *range(100_000 + 100 * number, 100_000 + 100 * number + OWN)]


def admitted(engine: EngineHarness) -> list[str]:
    """Run to the end; ids in the order in which they start."""
    order: list[str] = []
    while engine.has_requests:
        order += [one.request_id for one in engine.step().admitted]
    return order


def hits_of(policy: str, *overrides: str, num_clients: int = 1) -> int:
    """Hit tokens of all groups' requests, which come at once and interleaved: a, b, c, ..., a, b, c, ..."""
    with engine_of(policy, *overrides) as engine:
        for number in range(GROUPS * EACH):
            group = number % GROUPS
            engine.add(prompt(group, number), f"{number:03}", client=f"client {group % num_clients}", max_tokens=4)
        admitted(engine)
        return engine.stats.prefix_cache_hits


@pytest.mark.parametrize("kv_cache", ["paged", "radix"])
@pytest.mark.parametrize("policy", ["lpm", "dfs-weight"])
def test_it_keeps_the_hits_that_fcfs_loses_when_the_cache_is_smaller_than_the_set_of_prefixes(
    policy: str, kv_cache: str
) -> None:
    assert hits_of("fcfs", f"kv_cache={kv_cache}") < 0.15 * BEST
    assert hits_of(policy, f"kv_cache={kv_cache}") == BEST


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight"])
@pytest.mark.parametrize(
    "override",
    ["engine=overlap", "scheduler.max_num_batched_tokens=20", "scheduler.policy.patience=null"],
    ids=["overlap", "chunks", "no patience"],
)
def test_it_keeps_them_under_every_loop_and_with_chunks(policy: str, override: str) -> None:
    assert hits_of(policy, override) == BEST


# lpm


def test_lpm_a_duplicate_waits_for_the_prefix_that_another_computes() -> None:
    with engine_of("lpm", num_blocks=200, max_num_seqs=8) as engine:
        for number in range(8):
            engine.add(prompt(0, number), f"{number}", max_tokens=4)
        engine.step()
        assert engine.scheduled == {"0": PREFIX + OWN}
        engine.step()
        assert engine.scheduled == {"0": 1, **{f"{number}": OWN for number in range(1, 8)}}
        engine.run()


def test_lpm_without_it_all_of_them_compute_it() -> None:
    with engine_of("lpm", "scheduler.policy.duplicate_tokens=null", num_blocks=200, max_num_seqs=8) as engine:
        for number in range(3):
            engine.add(prompt(0, number), f"{number}", max_tokens=4)
        engine.step()
        assert engine.scheduled == {f"{number}": PREFIX + OWN for number in range(3)}
        engine.run()


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight"])
@pytest.mark.parametrize("loop", ["sync", "overlap"])
def test_a_duplicate_waits_until_the_last_chunk_of_the_shared_prefix_is_there(policy: str, loop: str) -> None:
    overrides = ("scheduler.max_num_batched_tokens=24", f"engine={loop}", "scheduler.policy.duplicate_tokens=1")
    with engine_of(policy, *overrides, num_blocks=200, max_num_seqs=8) as engine:
        for number in range(4):
            engine.add(prompt(0, number), f"{number}", max_tokens=4)
        engine.add(prompt(1, 9), "other", max_tokens=4)
        engine.run()
        assert engine.stats.prefix_cache_hits == 3 * PREFIX


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight"])
def test_a_duplicate_goes_on_when_the_one_it_waits_for_is_ended(policy: str) -> None:
    with engine_of(policy, "scheduler.max_num_batched_tokens=24", num_blocks=200, max_num_seqs=8) as engine:
        for number in range(2):
            engine.add(prompt(0, number), f"{number}", max_tokens=1)
        engine.step()
        assert engine.running == ["0"]
        engine.finish("0")
        engine.step()
        assert engine.running == ["1"]
        engine.run()


def test_lpm_less_than_the_threshold_is_not_waited_for() -> None:
    with engine_of("lpm", "scheduler.policy.duplicate_tokens=65", num_blocks=200, max_num_seqs=8) as engine:
        for number in range(2):
            engine.add(prompt(0, number), f"{number}", max_tokens=4)
        engine.step()
        assert engine.scheduled == {"0": PREFIX + OWN, "1": PREFIX + OWN}
        engine.run()


@pytest.mark.parametrize(("num_between", "first"), [(2, "hot"), (3, "cold")])
def test_lpm_a_hit_overtakes_as_far_as_patience_goes(num_between: int, first: str) -> None:
    with engine_of("lpm", "scheduler.policy.patience=2", num_blocks=200, max_num_seqs=1) as engine:
        engine.add(prompt(0, 0), "warm", max_tokens=1)
        engine.run()
        # 64 cached tokens are worth 128: 2 prompts of 50 tokens between the arrivals, but not 3.
        for number in range(num_between):
            engine.add(range(5000 * (number + 1), 5000 * (number + 1) + 50), f"between {number}", max_tokens=1)
        engine.add(range(9000, 9050), "cold", max_tokens=1)
        for _ in range(num_between):
            engine.step()
        engine.add(range(50, 60), "busy", max_tokens=2)
        engine.add(prompt(0, 1), "hot", max_tokens=1)
        order = admitted(engine)
    assert next(one for one in order if one in ("hot", "cold")) == first


def test_lpm_beyond_the_window_the_line_is_in_order_of_arrival() -> None:
    with engine_of("lpm", num_blocks=1000, max_num_seqs=1) as engine:
        engine.add(prompt(0, 0), "warm", max_tokens=1)
        engine.run()
        for number in range(129):
            engine.add(range(5000 + 50 * number, 5040 + 50 * number), f"{number:03}", max_tokens=1)
        engine.add(prompt(0, 1), "zz hot", max_tokens=1)
        assert admitted(engine)[:4] == ["000", "001", "zz hot", "002"]


# dfs-weight


def test_dfs_weight_walks_the_heaviest_branch_first_and_whole() -> None:
    blocks = {name: [number] * 16 for number, name in enumerate("ABCDE")}
    prompts = {"b1": "BD", "a1": "AC", "b2": "BE", "a2": "AD", "lone": "E", "a3": "AC"}
    with engine_of("dfs-weight", num_blocks=200, max_num_seqs=1) as engine:
        for number, (name, path) in enumerate(prompts.items()):
            tokens = [token for letter in path for token in blocks[letter]]
            engine.add([*tokens, 1000 + number], name, max_tokens=1, arrival=float(number))
        # A has three requests, two of them below C; B has two.
        assert admitted(engine) == ["a1", "a3", "a2", "b1", "b2", "lone"]


NAMES = st.lists(st.lists(st.sampled_from([b"x", b"y"]), max_size=4), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(paths=NAMES, cached=st.lists(st.integers(0, 4), min_size=12, max_size=12), patience=st.sampled_from([None, 2.0]))
def test_dfs_weight_requests_that_begin_alike_are_next_to_each_other(
    paths: list[list[bytes]], cached: list[int], patience: float | None
) -> None:
    """Names are of a block and all before it; a duplicate of what is before it waits, so each path has but one."""
    names = [tuple(b"".join(path[: end + 1]) for end in range(len(path))) for path in paths]
    view = SimpleNamespace(
        block_size=16,
        prefills=(),
        prefix_hashes=lambda one: one.names,
        hit_tokens=lambda one: 16 * min(one.num_cached, len(one.names)),
    )
    window = [
        SimpleNamespace(request_id=f"{number:02}", names=path, num_cached=num_cached, arrival_tokens=number)
        for number, (path, num_cached) in enumerate(zip(names, cached, strict=False))
    ]
    context = PolicyContext(seed=0, max_num_seqs=4, max_num_batched_tokens=64)
    policy = DFSWeightPolicy(DFSWeightOptions(patience=patience, duplicate_tokens=16 * 10), context)
    order = policy.waiting_order(cast("Sequence[RequestView]", window), cast("SchedulerView", view))
    assert sorted(one.request_id for one in order) == [one.request_id for one in window]
    ordered = [dict(zip((one.request_id for one in window), names, strict=True))[one.request_id] for one in order]
    for beginning in {name for path in names for name in path}:
        places = [place for place, path in enumerate(ordered) if beginning in path]
        assert places == list(range(places[0], places[0] + len(places)))


# dlpm: the hits of lpm, and the shares of vtc


def share_and_hits(policy: str, *overrides: str, num_steps: int = 900) -> tuple[float, float]:
    """Client f's part of the service, and hits by prompt tokens.

    f has 200 requests in line and g has 20, of four prefixes each; the cache holds those of one client. Service is what
    was computed of prompts, and twice the output tokens.
    """
    with engine_of(policy, *overrides) as engine:
        open_by_client: dict[str, set[str]] = {"f": set(), "g": set()}
        service = dict.fromkeys(open_by_client, 0)
        owner: dict[str, str] = {}
        for _ in range(num_steps):
            for client, depth in (("f", 200), ("g", 20)):
                while len(open_by_client[client]) < depth:
                    number = len(owner)
                    tokens = prompt(number % 4 + (4 if client == "g" else 0), number)
                    owner[engine.add(tokens, f"{number:05}", client=client, max_tokens=4, ignore_eos=True)] = client
                    open_by_client[client].add(f"{number:05}")
            outputs = engine.step()
            for one in outputs.admitted:
                service[owner[one.request_id]] += PREFIX + OWN - one.num_cached_tokens
            for request_id, num_tokens in zip(outputs.request_ids, outputs.num_tokens.tolist(), strict=True):
                service[owner[request_id]] += 2 * num_tokens
            for end in outputs.finished:
                open_by_client[owner[end.request_id]].discard(end.request_id)
        hits, queries = engine.stats.prefix_cache_hits, engine.stats.prefix_cache_queries
        engine.finish(list(owner))
        engine.run()
    return service["f"] / sum(service.values()), hits / queries


def test_dlpm_has_nearly_the_hits_of_lpm_and_the_shares_that_lpm_has_not() -> None:
    lpm_share, lpm_hits = share_and_hits("lpm", num_steps=300)
    _, vtc_hits = share_and_hits("vtc", num_steps=300)
    share, hits = share_and_hits("dlpm", "scheduler.policy.quantum=256")
    assert lpm_share > 0.95
    assert 0.49 <= share <= 0.51
    assert hits > 0.9 * lpm_hits > 2 * vtc_hits


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight", "dlpm"])
def test_ties_go_by_arrival_and_id_whatever_the_order_in_which_requests_came(policy: str) -> None:
    names = ["d", "b", "a", "c"]
    for ordering in (names, names[::-1]):
        with engine_of(policy, max_num_seqs=1) as engine:
            for name in ordering:
                engine.add(range(ord(name) * 100, ord(name) * 100 + 40), name, client=name, max_tokens=1)
            assert admitted(engine) == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("policy", "option", "message"),
    [
        ("lpm", "patience=-1", "patience=-1.0 is not valid: it must be a number, 0 or more, or null"),
        ("lpm", "duplicate_tokens=0", "duplicate_tokens=0 is not valid: it must be 1 or more, or null"),
        ("dfs-weight", "patience=nan", "patience=nan is not valid: it must be a number, 0 or more, or null"),
        ("dfs-weight", "duplicate_tokens=0", "duplicate_tokens=0 is not valid: it must be 1 or more"),
    ],
)
def test_options_that_mean_nothing_are_refused_at_launch(policy: str, option: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineHarness([f"scheduler={policy}", f"scheduler.policy.{option}"])
