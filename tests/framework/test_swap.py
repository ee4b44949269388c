"""`scheduler.preempt_mode=swap`: tokens of who was swapped out and came back are those of who never left."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import window_models
from tokenyard import LLM, SamplingParams
from tokenyard.config import EngineConfig, KVCacheConfig
from tokenyard.errors import CapacityError, ConfigError
from tokenyard.interfaces.kv_cache import KVCacheUsage
from tokenyard.kv_cache import PagedKVCacheManager
from tokenyard.launch.host_memory import check_host_memory
from tokenyard.outputs import RequestOutput
from tokenyard.plugins import load_catalogue
from tokenyard.scheduler_output import HostTransfer
from tokenyard.testing import EngineHarness, catalogue_with
from window_models import prompt_of, transformers_greedy

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True)
SHARED = prompt_of(9, seed=50)
PROMPTS = [
    *(prompt_of(3 + seed, seed=seed) for seed in range(5)),
    *(SHARED + prompt_of(seed, seed=seed) for seed in (1, 3)),
]
SWAP = ("scheduler.preempt_mode=swap", "kv_cache.host_memory=1MiB")


class Copies:
    """Blocks that a manager had copied each way, and the manager."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: Counter[str] = Counter()
        self.managers: list[PagedKVCacheManager] = []
        take = PagedKVCacheManager.take_transfers

        def counted(manager: PagedKVCacheManager) -> Sequence[HostTransfer]:
            transfers = take(manager)
            for transfer in transfers:
                self.counts["out" if transfer.to_host else "in"] += len(transfer.block_ids)
            if manager not in self.managers:
                self.managers.append(manager)
            return transfers

        monkeypatch.setattr(PagedKVCacheManager, "take_transfers", counted)

    def host(self) -> KVCacheUsage:
        return self.managers[-1].inspect().host


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    return Copies(monkeypatch)


def generate(
    folder: Path, params: SamplingParams | Sequence[SamplingParams], *overrides: str
) -> tuple[list[RequestOutput], int]:
    """All prompts at once; also how many preemptions it took. Nothing is left behind."""
    with LLM(folder, dtype="float32", max_model_len=64, overrides=list(overrides)) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        stats = llm.engine.core.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_blocks == stats.num_total_blocks
    return outputs, stats.num_preemptions


def tokens(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("engine", ["sync", "overlap"])
@pytest.mark.parametrize("caching", ["true", "false"])
@pytest.mark.parametrize(("block_size", "num_blocks"), [(1, 70), (4, 18), (16, 4)])
def test_tokens_do_not_depend_on_swapping(
    tiny_llama_dir: Path, copies: Copies, engine: str, caching: str, block_size: int, num_blocks: int
) -> None:
    params = [GREEDY, SEEDED] * 3 + [GREEDY]
    expected, num_preemptions = generate(tiny_llama_dir, params)
    assert num_preemptions == 0
    tight = (f"engine={engine}", f"kv_cache.enable_prefix_caching={caching}", f"kv_cache.block_size={block_size}")
    found, num_preemptions = generate(tiny_llama_dir, params, *tight, f"kv_cache.num_blocks={num_blocks}", *SWAP)
    assert tokens(found) == tokens(expected)
    assert num_preemptions > 0
    assert copies.counts["out"] > 0
    assert copies.counts["in"] > 0
    assert copies.host().num_free_blocks == copies.host().num_total_blocks > 0


def test_what_comes_back_is_what_the_tokens_rest_on(
    tiny_llama_dir: Path, copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the test above can fail: copies that are not made change tokens."""
    tight = ("kv_cache.enable_prefix_caching=false", "kv_cache.block_size=4", "kv_cache.num_blocks=18", *SWAP)
    expected, _ = generate(tiny_llama_dir, GREEDY, *tight)
    monkeypatch.setattr("tokenyard.worker.host_blocks.HostBlocks.transfer", lambda self, transfers: None)
    assert tokens(generate(tiny_llama_dir, GREEDY, *tight)[0]) != tokens(expected)


@pytest.mark.parametrize("family", window_models.FAMILIES)
@pytest.mark.parametrize(("engine", "caching"), [("sync", "false"), ("overlap", "true"), ("overlap", "false")])
def test_window_models_come_back_with_what_their_windows_read(
    family: str, engine: str, caching: str, window_model: Callable[[str], Path], copies: Copies
) -> None:
    groups = {"mistral": 1, "qwen2": 2, "gemma3_text": 6, "gpt_oss": 2}[family]
    tight = (f"engine={engine}", f"kv_cache.enable_prefix_caching={caching}", "kv_cache.block_size=4")
    found, _ = generate(window_model(family), GREEDY, *tight, f"kv_cache.num_blocks={9 * groups}", *SWAP)
    assert tokens(found) == [transformers_greedy(window_model(family), prompt, 20) for prompt in PROMPTS]
    assert copies.counts["in"] > 0


@pytest.mark.parametrize("engine", ["sync", "overlap"])
def test_who_finds_host_memory_full_is_computed_again(tiny_llama_dir: Path, copies: Copies, engine: str) -> None:
    """512 bytes a token: three blocks of four."""
    expected, _ = generate(tiny_llama_dir, GREEDY)
    tight = ("kv_cache.enable_prefix_caching=false", "kv_cache.block_size=4", "kv_cache.num_blocks=18")
    memory = ("scheduler.preempt_mode=swap", f"kv_cache.host_memory={3 * 4 * 512}")
    found, num_preemptions = generate(tiny_llama_dir, GREEDY, *tight, *memory, f"engine={engine}")
    assert tokens(found) == tokens(expected)
    assert copies.host() == (3, 3)
    assert 0 < copies.counts["out"] < 3 * num_preemptions


def test_prompt_logprobs_are_told_once_and_are_the_same(tiny_llama_dir: Path, copies: Copies) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, prompt_logprobs=1)
    expected, _ = generate(tiny_llama_dir, params)
    tight = ("kv_cache.block_size=4", "kv_cache.num_blocks=14", "scheduler.max_num_batched_tokens=8")
    found, _ = generate(tiny_llama_dir, params, *tight, "scheduler.max_num_seqs=8", *SWAP)
    assert tokens(found) == tokens(expected)
    assert copies.counts["in"] > 0
    for one, other in zip(found, expected, strict=True):
        for rows in zip(one.prompt_logprobs or (), other.prompt_logprobs or (), strict=True):
            values = [sorted((key, value.logprob) for key, value in (row or {}).items()) for row in rows]
            np.testing.assert_allclose(np.array(values[0]), np.array(values[1]), atol=1e-5)


def test_an_aborted_request_leaves_nothing_in_host_memory() -> None:
    harness = EngineHarness([*SWAP, "kv_cache.num_blocks=4", "kv_cache.block_size=2"], vocab_size=100)
    first, second = harness.add([1, 2, 3], max_tokens=9), harness.add([4, 5, 6], max_tokens=9)
    while not harness.request(second).num_preemptions:
        harness.step()
    assert (
        harness.kv_cache_manager.inspect().host.num_free_blocks
        < harness.kv_cache_manager.inspect().host.num_total_blocks
    )
    harness.finish(second)
    assert harness.kv_cache_manager.inspect().host == KVCacheUsage(2**20 // 2, 2**20 // 2)
    harness.run()
    assert harness.request(first).is_finished


def test_what_comes_from_host_memory_is_no_hit_of_the_prefix_cache(copies: Copies) -> None:
    harness = EngineHarness([*SWAP, "kv_cache.num_blocks=6", "kv_cache.block_size=2"], vocab_size=100)
    for first in range(3):
        harness.add([first, 2, 3], max_tokens=9)
    num_resumed_with = 0
    while harness.has_requests:
        harness.step()
        num_resumed_with += sum(
            start.num_computed_tokens for output in harness.last_outputs for start in output.resumed
        )
    assert copies.counts["in"] > 0
    hits = harness.stats.preempted_prefix_cache_hits
    assert num_resumed_with - 2 * copies.counts["in"] == hits
    harness.check_idle()


def test_swapping_needs_host_memory_and_that_needs_room_for_a_block(tiny_llama_dir: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^scheduler\.preempt_mode=swap needs kv_cache\.host_memory to swap to, such as"
    ):
        generate(tiny_llama_dir, GREEDY, "scheduler.preempt_mode=swap")
    with pytest.raises(
        CapacityError, match=r"^kv_cache\.host_memory=100 is less than one block of 16 tokens, which takes 8192"
    ):
        generate(tiny_llama_dir, GREEDY, "kv_cache.host_memory=100")
    with pytest.raises(ConfigError, match=r"kv_cache\.host_memory='much' is not an amount of memory"):
        generate(tiny_llama_dir, GREEDY, "kv_cache.host_memory=much")
    with pytest.raises(CapacityError, match=r"^kv_cache\.host_memory: .* and this machine has .* free; lower it$"):
        generate(tiny_llama_dir, GREEDY, "kv_cache.host_memory=1000TiB")


@pytest.mark.parametrize(("kind", "name"), [("scheduler", "batch"), ("kv_cache", "paged"), ("executor", "inproc")])
def test_parts_that_were_written_before_there_was_host_memory_are_refused_with_it(kind: str, name: str) -> None:
    config = EngineConfig(kv_cache=KVCacheConfig(host_memory="1MiB"))
    check_host_memory(config, catalogue_with())
    old = dataclasses.replace(load_catalogue().get(kind, name).descriptor, api_version=(1, 5))
    with pytest.raises(
        ConfigError, match=rf"needs parts for plugin API 1\.6; {kind} '{name}' was written for 1\.5; leave"
    ):
        check_host_memory(config, catalogue_with(old))
    check_host_memory(EngineConfig(), catalogue_with(old))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["sync", "overlap"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_rank_copies_its_own_part(tiny_llama_dir: Path, copies: Copies, engine: str, num_ranks: int) -> None:
    expected, _ = generate(tiny_llama_dir, GREEDY, "attention=torch_native")
    ranks = ("executor=multiproc", f"executor.tensor_parallel_size={num_ranks}", "executor.num_threads=1")
    tight = ("kv_cache.enable_prefix_caching=false", "kv_cache.block_size=4", "kv_cache.num_blocks=18", *SWAP)
    found, _ = generate(tiny_llama_dir, GREEDY, "attention=torch_native", f"engine={engine}", *ranks, *tight)
    assert tokens(found) == tokens(expected)
    assert copies.counts["in"] > 0
