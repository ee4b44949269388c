"""Packages frozen at an older plugin API run in this one, in both loops, as they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenyard import LLM, SamplingParams
from tokenyard.errors import UnsupportedError
from tokenyard.interfaces import PauseMode
from tokenyard.plugins import load_catalogue
from tokenyard.testing import EngineHarness

Install = Callable[..., None]

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = ["the cat sat on the mat", "one two", "the cat sat on the"]

LOOPS = pytest.mark.parametrize("loop", ["sync", "overlap"])


@pytest.fixture(autouse=True)
def frozen(install: Install) -> None:
    install("frozen_v1_0", "frozen_v1_1")


def test_they_say_what_they_were_written_for() -> None:
    found = {entry.name: entry.descriptor.api_version for entry in load_catalogue().entries() if "frozen" in entry.name}
    assert found == {"frozen_shortest_prompt": (1, 0), "frozen_urgent_first": (1, 1), "frozen_one_by_one": (1, 1)}


@LOOPS
@pytest.mark.parametrize("policy", ["frozen_shortest_prompt", "frozen_urgent_first"])
def test_a_policy_steers_an_engine_that_preempts(policy: str, loop: str) -> None:
    engine = EngineHarness(
        [
            f"scheduler={policy}",
            f"engine={loop}",
            "kv_cache.num_blocks=5",
            "kv_cache.block_size=4",
            "model.max_model_len=20",
        ]
    )
    names = [engine.add([100 * i + j for j in range(6)], priority=-i, max_tokens=12) for i in range(3)]
    engine.run()
    assert engine.stats.num_preemptions
    assert [len(engine.request(name).output_token_ids) for name in names] == [12, 12, 12]
    engine.check_idle()
    engine.close()


@LOOPS
def test_a_scheduler_gives_the_tokens_of_the_built_in_one(tiny_llama_dir: Path, loop: str) -> None:
    def tokens(scheduler: str) -> list[list[int]]:
        overrides = [f"model.name={tiny_llama_dir}", "kv_cache.num_blocks=64", "kv_cache.block_size=4"]
        with LLM.from_config([*overrides, f"scheduler={scheduler}", f"engine={loop}", "model.dtype=float32"]) as llm:
            outputs = [*llm.generate(PROMPTS, GREEDY), *llm.generate(PROMPTS[0], GREEDY)]
        return [output.outputs[0].token_ids for output in outputs]

    assert tokens("frozen_one_by_one") == tokens("fcfs")


@LOOPS
def test_a_scheduler_without_the_later_methods_is_paused_by_keep_and_abort_and_refuses_the_rest(loop: str) -> None:
    engine = EngineHarness(["scheduler=frozen_one_by_one", f"engine={loop}", "kv_cache.block_size=4"], checks=False)
    first, second = engine.add([1, 2, 3], max_tokens=5), engine.add([1, 2, 3], max_tokens=5)
    engine.step()
    for unknown in (lambda: engine.core.pause(PauseMode.WAIT), engine.scheduler.snapshot):
        with pytest.raises(UnsupportedError):
            unknown()
    engine.pause("keep")
    engine.step()
    engine.resume()
    engine.run()
    assert [len(engine.request(name).output_token_ids) for name in (first, second)] == [5, 5]
    last = engine.add([1, 2, 3], max_tokens=5)
    assert engine.pause("abort") == [last]
    assert engine.kv.num_free == engine.kv.num_total
    engine.close()
