"""least-computed and cost-aware: whose blocks are taken, and what has to be computed again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

import pytest
from tokenyard.errors import ConfigError
from tokenyard.testing import EngineHarness, PolicyContract

POOLS = (42, 50, 60, 75)  # blocks of 4 tokens; the longest request takes 40
SEEDS = (0, 1, 2)
NO_CACHE = "kv_cache.enable_prefix_caching=false"  # it may keep what a victim had


class TestLeastComputed(PolicyContract):
    overrides = ("scheduler=least-computed",)
    max_examples = 3


class TestCostAware(PolicyContract):
    overrides = ("scheduler=cost-aware", "scheduler.policy.spare_within=3")
    max_examples = 3


def pooled(policy: str, num_blocks: int, *overrides: str, checks: bool = True) -> EngineHarness:
    return EngineHarness(
        [
            f"scheduler={policy}",
            f"kv_cache.num_blocks={num_blocks}",
            "kv_cache.block_size=4",
            "scheduler.max_num_seqs=16",
            *overrides,
        ],
        checks=checks,
    )


# What is computed again


@dataclass(frozen=True, kw_only=True)
class Job:
    step: int
    prompt: Sequence[int]
    num_outputs: int


def mixed_jobs(seed: int) -> list[Job]:
    """Of 8 to 160 tokens, mostly short ones."""
    draw = Random(seed)

    def length() -> int:
        return round(min(80.0, max(4.0, draw.lognormvariate(3.0, 0.8))))

    return [
        Job(step=2 * number, prompt=[draw.randrange(1 << 20) for _ in range(length())], num_outputs=length())
        for number in range(60)
    ]


def recomputed(policy: str, num_blocks: int, jobs: Sequence[Job], *overrides: str) -> int:
    """Tokens that were computed for a second or further time."""
    computed, coming = 0, list(reversed(jobs))
    with pooled(policy, num_blocks, *overrides, checks=False) as engine:
        for step in range(10_000):
            while coming and coming[-1].step <= step:
                job = coming.pop()
                engine.add(job.prompt, max_tokens=job.num_outputs, ignore_eos=True)
            if not coming and not engine.has_requests:
                break
            engine.step()
            computed += sum(int(output.num_scheduled_tokens.sum()) for output in engine.last_outputs)
    # The last output token is never computed.
    return computed - sum(len(job.prompt) + job.num_outputs - 1 for job in jobs)


@pytest.mark.parametrize("caching", [NO_CACHE, "kv_cache.enable_prefix_caching=true"])
@pytest.mark.parametrize("seed", SEEDS)
def test_least_computed_wastes_fewer_tokens_than_last_in_first_out_at_every_pool_size(seed: int, caching: str) -> None:
    jobs = mixed_jobs(seed)
    policies = ("fcfs", "least-computed")
    wasted = {policy: [recomputed(policy, pool, jobs, caching) for pool in POOLS] for policy in policies}
    assert all(wasted["fcfs"])
    assert all(ours < theirs for ours, theirs in zip(wasted["least-computed"], wasted["fcfs"], strict=True)), wasted


def test_cost_aware_wastes_fewer_tokens_than_last_in_first_out_where_blocks_are_large() -> None:
    # A score that counts how full blocks are says little where four tokens fill one.
    overrides = (NO_CACHE, "kv_cache.block_size=16", "scheduler.policy.spare_within=2")
    for seed in (0, 1):
        jobs = mixed_jobs(seed)
        assert recomputed("cost-aware", 18, jobs, *overrides) < recomputed("fcfs", 18, jobs, *overrides[:2])


def test_victims_alone_waste_less_only_where_no_cache_keeps_what_they_had() -> None:
    jobs = mixed_jobs(0)
    bare = ("scheduler.policy.headroom=0", NO_CACHE)
    assert recomputed("least-computed", 60, jobs, *bare) < recomputed("fcfs", 60, jobs, NO_CACHE)
    assert recomputed("least-computed", 60, jobs, NO_CACHE) < recomputed("least-computed", 60, jobs, *bare)


@pytest.mark.parametrize(("headroom", "num_running"), [(0, 5), (1, 4), (3, 2), (100, 1)])
def test_whoever_enters_leaves_so_many_blocks_for_each_that_runs(headroom: int, num_running: int) -> None:
    overrides = (f"scheduler.policy.headroom={headroom}", NO_CACHE)
    with pooled("least-computed", 11, *overrides) as engine:
        for number in range(6):  # of 2 blocks each
            engine.add(range(100 * number, 100 * number + 7), str(number), max_tokens=2, ignore_eos=True)
        engine.step()
        assert len(engine.scheduler.snapshot().running) == num_running
        engine.run()


def test_a_headroom_below_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"headroom=-1.* is not valid: it must be a number of blocks, 0 or more"):
        pooled("least-computed", 40, "scheduler.policy.headroom=-1")


# Who is chosen


def preempted(engine: EngineHarness) -> Iterator[str]:
    """Ids as they lose their blocks."""
    counts: dict[str, int] = {}
    while engine.has_requests:
        engine.step()
        for request_id, record in engine.requests.items():
            if record.num_preemptions > counts.get(request_id, 0):
                counts[request_id] = record.num_preemptions
                yield request_id


def first_victim(policy: str, lengths: dict[str, int], num_blocks: int, *overrides: str) -> str:
    """All enter in one step."""
    with pooled(policy, num_blocks, NO_CACHE, *overrides) as engine:
        for number, (request_id, length) in enumerate(lengths.items()):
            engine.add(range(100 * number, 100 * number + length), request_id, max_tokens=30, ignore_eos=True)
        victims = list(preempted(engine))
    return victims[0]


def test_the_least_computed_is_taken_wherever_it_came() -> None:
    lengths = {"a: long": 20, "b: short": 7, "c: middle": 12}
    # They take 5 + 2 + 3 blocks of 11, and the first and the last want one more at once.
    assert first_victim("least-computed", lengths, 11) == "b: short"
    assert first_victim("fcfs", lengths, 11) == "c: middle"


def test_of_equals_the_one_that_came_last_is_taken() -> None:
    assert first_victim("least-computed", dict.fromkeys("abc", 8), 6, "scheduler.policy.headroom=0") == "c"
    assert first_victim("cost-aware", dict.fromkeys("abc", 8), 6) == "c"


def test_cost_aware_takes_the_blocks_that_hold_fewest_tokens() -> None:
    # When "full" needs its fifth block it has 16 tokens in 4; "half" has 9 in 3, which is 3 a block.
    assert first_victim("cost-aware", {"half": 9, "full": 16}, 7) == "half"


def test_cost_aware_spares_who_is_about_to_end() -> None:
    lengths, chosen = {"half": 9, "full": 16}, []
    for spare in (0, 5):
        overrides = ("kv_cache.enable_prefix_caching=false", f"scheduler.policy.spare_within={spare}")
        with pooled("cost-aware", 7, *overrides) as engine:
            for request_id, length in lengths.items():
                outputs = 5 if request_id == "half" else 30
                engine.add(range(length), request_id, max_tokens=outputs, ignore_eos=True)
            chosen.append(next(preempted(engine)))
            engine.run()
    assert chosen == ["half", "full"]


def test_cost_aware_does_not_count_what_others_hold_too() -> None:
    with pooled("cost-aware", 12) as engine:
        engine.add(range(17), "one", max_tokens=30, ignore_eos=True)
        engine.step()
        engine.add(range(17), "other", max_tokens=30, ignore_eos=True)
        engine.add(range(100, 117), "own", max_tokens=30, ignore_eos=True)
        # 16 tokens are in four blocks that two share. When a block is missing, "one" has 5 tokens in 2 blocks of its
        # own, "other" 4 in 1, and "own" 20 in 5. With what is shared "one" would have 21 for 2: more than any.
        assert next(preempted(engine)) == "one"
        engine.run()


def test_cost_aware_does_not_count_blocks_that_have_left_a_window() -> None:
    sizes = "kv_cache.block_size=4", "kv_cache.num_blocks=240"
    with EngineHarness(["scheduler=cost-aware", *sizes], group_windows=(None, 16)) as engine:
        # All hold as many blocks of the second group, so a block of a short one is worth fewer tokens than one of
        # "long". With what has left the window, which is most of "long", it would seem to cost next to nothing.
        engine.add(range(400), "long", max_tokens=70, ignore_eos=True)
        for number in range(1, 6):
            prompt = range(1000 * number, 1000 * number + 40)
            engine.add(prompt, f"short {number}", max_tokens=70, ignore_eos=True)
        assert next(preempted(engine)).startswith("short")
        engine.run()


def test_cost_aware_a_negative_number_of_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"spare_within=-1 .* 0 or more"):
        pooled("cost-aware", 60, "scheduler.policy.spare_within=-1")
