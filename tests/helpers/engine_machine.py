"""A Hypothesis state machine over the real loop, scheduler and K/V manager; the harness checks section 9 throughout."""

from __future__ import annotations

import dataclasses
from collections import Counter
from functools import cache
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tokenyard.config import EngineConfig
from tokenyard.interfaces import ExtraKey, PauseMode
from tokenyard.launch.compose import load_engine_config
from tokenyard.request import Retention
from tokenyard.testing import EngineHarness
from tokenyard.testing.parts import catalogue_with

MAX_MODEL_LEN = 40
EOS, STOP = 9, 8
PREFIXES = ([1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5], [1, 2, 3, 4, 7, 7, 7, 7], [5] * 20, [])  # they collide in part


@cache
def base_config(loop: str, policy: str) -> EngineConfig:
    config, _ = load_engine_config([f"engine={loop}", f"scheduler={policy}", f"model.max_model_len={MAX_MODEL_LEN}"])
    return config


@st.composite
def configs(draw: st.DrawFn) -> EngineConfig:
    """Small pools, small budgets: everything that is scarce runs out often."""
    base = base_config(draw(st.sampled_from(["sync", "overlap"])), draw(st.sampled_from(["fcfs", "priority"])))
    seqs = draw(st.sampled_from([1, 2, 3, 3, 4]))
    budget = draw(st.integers(seqs, 16) | st.just(64))
    chunked = budget < MAX_MODEL_LEN or draw(st.booleans())
    return dataclasses.replace(
        base,
        scheduler=dataclasses.replace(
            base.scheduler,
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            enable_chunked_prefill=chunked,
            long_prefill_token_threshold=draw(st.sampled_from([0, 0, 3])) if chunked else 0,
        ),
        kv_cache=dataclasses.replace(
            base.kv_cache,
            num_blocks=draw(st.integers(4, 12)),
            block_size=draw(st.sampled_from([1, 2, 3, 4])),
            enable_prefix_caching=draw(st.booleans()),
            eviction=draw(st.sampled_from(["lru", "fifo"])),
        ),
    )


class EngineMachine(RuleBasedStateMachine):
    """Requests of any shape come, run, are preempted, paused, aborted and overdue, under both loops."""

    seen: ClassVar[Counter[str]] = Counter()  # over all examples: how much happened

    @initialize(
        config=configs(),
        windows=st.sampled_from([(None,), (None,), (None,), (5,), (None, 3), (2, None, 6)]),
        has_tree=st.booleans(),
    )
    def start(self, config: EngineConfig, windows: tuple[int | None, ...], has_tree: bool) -> None:
        if has_tree and windows == (None,):
            kv_cache = dataclasses.replace(config.kv_cache, name="radix", eviction="lru")
            config = dataclasses.replace(config, kv_cache=kv_cache)
        self.engine = EngineHarness(
            config=config, catalogue=catalogue_with(), group_windows=windows, vocab_size=64, eos_token_id=EOS
        )
        self.undisturbed: set[str] = set()  # nobody interferes with their tokens

    @rule(
        prefix=st.sampled_from(PREFIXES),
        tail=st.lists(st.integers(1, 3), min_size=1, max_size=8),
        max_tokens=st.integers(1, 24),
        min_tokens=st.integers(0, 4),
        priority=st.integers(-1, 1),
        salt=st.sampled_from([None, None, None, "tenant"]),
        image=st.sampled_from([None, None, None, "a", "b"]),
        deadline=st.sampled_from([None, None, None, None, None, 1, 3, 20]),
        skips_cache=st.sampled_from([False, False, False, True]),
        retention=st.sampled_from(["low", "normal", "normal", "high"]),
        logprobs=st.sampled_from([None, None, 0, 2]),
        prompt_logprobs=st.sampled_from([None, None, None, 0, 1]),
        uses_an_old_id=st.sampled_from([False, False, True]),
    )
    def add(
        self,
        prefix: list[int],
        tail: list[int],
        max_tokens: int,
        min_tokens: int,
        priority: int,
        salt: str | None,
        image: str | None,
        deadline: int | None,
        skips_cache: bool,
        retention: Retention,
        logprobs: int | None,
        prompt_logprobs: int | None,
        uses_an_old_id: bool,
    ) -> None:
        prompt = [*prefix, *tail]
        if len(prompt) >= MAX_MODEL_LEN or len(prompt) > self.engine.kv_cache_manager.capacity_tokens():
            return
        ended = [name for name, record in self.engine.requests.items() if record.is_finished]
        name = self.engine.add(
            prompt,
            ended[-1] if ended and uses_an_old_id else None,
            priority=priority,
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens),
            stop_token_ids=[STOP],
            cache_salt=salt,
            extra_keys=[ExtraKey(image, 0, len(prompt) // 2)] if image and len(prompt) > 1 else (),
            deadline=None if deadline is None else self.engine.clock.now() + deadline,
            skip_prefix_cache=skips_cache,
            retention=retention,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )
        self.undisturbed.discard(name)
        if deadline is None:
            self.undisturbed.add(name)

    @rule(count=st.integers(1, 8), resumes=st.sampled_from([True, True, False]))
    def step(self, count: int, resumes: bool) -> None:
        if resumes:
            self.resume()
        for _ in range(count):
            self.engine.step()

    @rule(tokens=st.lists(st.integers(1, 9), max_size=3), parity=st.integers(0, 1))
    def step_with_a_script(self, tokens: list[int], parity: int) -> None:
        """Nothing, several tokens, stops: for every second request."""
        live = [name for name in (*self.engine.running, *self.engine.waiting) if int(name) % 2 == parity]
        self.undisturbed -= set(live)
        self.engine.step(dict.fromkeys(live, tokens))

    @rule(data=st.data())
    def fail_one(self, data: st.DataObject) -> None:
        if live := self.engine.running:
            name = data.draw(st.sampled_from(live))
            self.undisturbed.discard(name)
            self.engine.step(errors={name: "its logits are not finite"})

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        live = [*self.engine.running, *self.engine.waiting]
        names = data.draw(st.lists(st.sampled_from(live), max_size=3)) if live else []
        self.undisturbed -= set(names)
        self.engine.finish([*names, "nobody"])

    @rule()
    def reset(self) -> None:
        self.engine.reset_prefix_cache()

    @rule(mode=st.sampled_from(PauseMode))
    def pause(self, mode: PauseMode) -> None:
        self.undisturbed -= set(self.engine.pause(mode))

    @rule()
    def resume(self) -> None:
        self.engine.resume()

    @rule(seconds=st.integers(1, 5))
    def wait(self, seconds: int) -> None:
        self.engine.advance(seconds)

    @invariant()
    def everything_fits_together(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check_invariants()
            self.seen["rules"] += 1

    def teardown(self) -> None:
        """Whatever happened, everything ends, nothing is left, and tokens are those of a run alone."""
        if not hasattr(self, "engine"):
            return
        self.engine.resume()
        tokens = sum(record.max_total_tokens for record in self.engine.requests.values())
        self.engine.run(limit=10 + 3 * tokens * (1 + len(self.engine.requests)))
        self.engine.check_idle()
        self.seen["requests"] += len(self.engine.requests)
        self.seen["steps"] += self.engine.stats.num_steps
        self.seen["preemptions"] += self.engine.stats.num_preemptions
        self.seen["hits"] += self.engine.stats.prefix_cache_hits
        self.seen["compared alone"] += len(self.undisturbed)
        for name in self.undisturbed:
            assert self.engine.request(name).output_token_ids == self.alone(name), f"request {name}"
        self.engine.close()

    def alone(self, name: str) -> list[int]:
        """The output of the same request with an engine to itself."""
        record = self.engine.request(name)
        base = base_config("sync", "fcfs")
        roomy = dataclasses.replace(
            base, kv_cache=dataclasses.replace(base.kv_cache, num_blocks=100, enable_prefix_caching=False)
        )
        engine = EngineHarness(config=roomy, catalogue=catalogue_with(), vocab_size=64, eos_token_id=EOS)
        engine.add_request(dataclasses.replace(record.core, arrival_time=0.0))
        engine.run()
        output = engine.request(name).output_token_ids
        engine.close()
        # The small pool may have ended it earlier, by length.
        limit = record.max_total_tokens - len(record.core.prompt_token_ids)
        return output[:limit]
