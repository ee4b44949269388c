"""Where Tokenyard decides otherwise than its peers: see docs/explanation/differences.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from tokenyard import PolicyDescriptor
from tokenyard.config import NoOptions
from tokenyard.interfaces import RequestView, SchedulerView, SchedulingPolicy, WaitReason
from tokenyard.testing import EngineHarness, catalogue_with

MakeHarness = Callable[..., EngineHarness]

LOOPS = pytest.mark.parametrize("loop", ["sync", "overlap"])


class OldestGivesWay(SchedulingPolicy):
    """Preempts in order of arrival, where the default preempts the last one first."""

    def victim(self, candidates: Sequence[RequestView], num_blocks_needed: int, view: SchedulerView) -> RequestView:
        return candidates[0]


@LOOPS
def test_a_prompt_gets_all_its_blocks_at_its_first_chunk(harness: MakeHarness, loop: str) -> None:
    engine = harness(f"engine={loop}", "scheduler.max_num_batched_tokens=64", "kv_cache.num_blocks=20")
    engine.add(range(200), request_id="long")
    engine.add(range(500, 620), request_id="next", max_tokens=1)
    engine.step()
    assert engine.scheduled["long"] <= 64
    assert len(engine.blocks("long")) == 13  # 200 tokens in blocks of 16
    while engine.request("long").num_computed < 200:
        engine.step()
    engine.step()  # the budget would allow it now, the blocks do not, though "next" needs few for a first chunk
    assert engine.request("next").wait_reason is WaitReason.KV_BLOCKS
    engine.run()
    engine.check_idle()


@LOOPS
def test_equal_prompts_share_from_the_step_after_the_one_that_computes_them(harness: MakeHarness, loop: str) -> None:
    engine = harness(f"engine={loop}", "kv_cache.enable_prefix_caching=true")
    first, second = engine.add(range(64)), engine.add(range(64))
    engine.step()
    assert (engine.request(first).num_cached, engine.request(second).num_cached) == (0, 0)
    assert not set(engine.blocks(first)) & set(engine.blocks(second))
    third = engine.add(range(64))
    engine.step()
    engine.step()
    assert engine.request(third).num_cached == 48
    engine.run()
    engine.check_idle()


def test_preempted_requests_wait_in_front_by_arrival_whatever_the_order_of_their_preemption() -> None:
    descriptor: PolicyDescriptor[NoOptions] = PolicyDescriptor(
        name="oldest_gives_way", api_version=(1, 3), factory=lambda options, context: OldestGivesWay()
    )
    engine = EngineHarness(
        [
            "scheduler=oldest_gives_way",
            "kv_cache.num_blocks=7",
            "kv_cache.block_size=4",
            "kv_cache.enable_prefix_caching=false",
            "model.max_model_len=28",
        ],
        catalogue=catalogue_with(descriptor),
    )
    names = [engine.add([100 * i, 1, 2], max_tokens=24, arrival=float(i)) for i in range(3)]
    while engine.stats.num_preemptions < 2:
        engine.step()
    assert engine.waiting == names[:2]
    engine.run()
    assert all(len(engine.request(name).output_token_ids) == 24 for name in names)
    engine.check_idle()
    engine.close()
