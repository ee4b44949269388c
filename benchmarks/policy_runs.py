"""Whole runs of a scheduler without a model: requests come and go by the step, and tokens are counted."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from tokenyard.bench.headless import VOCAB_SIZE, headless_scheduler, sampled
from tokenyard.launch.compose import load_engine_config
from tokenyard.plugins import load_catalogue
from tokenyard.request import EngineCoreRequest
from tokenyard.sampling_params import SamplingParams

MAX_MODEL_LEN = 4096
MOST_STEPS = 1_000_000


class Work(NamedTuple):
    """A request and the step before which it comes."""

    step: int
    request: EngineCoreRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run took. Tokens."""

    num_steps: int
    num_preemptions: int
    computed: int  # by all steps
    needed: int  # had every token that no prefix hit saved been computed once
    hits: int  # of the prompts' tokens, at the first admission of each
    queries: int

    @property
    def recomputed(self) -> int:
        """Tokens that were computed for a second or further time."""
        return self.computed - self.needed

    @property
    def hit_rate(self) -> float:
        return self.hits / self.queries if self.queries else 0.0


def refuse_unknown(parser: argparse.ArgumentParser, policies: Sequence[str]) -> None:
    """End the script where one of these is not installed."""
    known = load_catalogue().names("policy")
    if unknown := sorted(set(policies) - set(known)):
        parser.error(f"no such policy: {', '.join(unknown)}; there are: {', '.join(known)}")


def run(work: Sequence[Work], num_blocks: int, overrides: Sequence[str]) -> Outcome:
    """Run everything to its end. Nothing but `max_tokens` ends a request."""
    fixed = (f"kv_cache.num_blocks={num_blocks}", f"model.max_model_len={MAX_MODEL_LEN}")
    scheduler = headless_scheduler(*load_engine_config([*fixed, *overrides]))
    coming, computed, num_steps = list(reversed(work)), 0, 0
    while coming or scheduler.has_requests():
        while coming and coming[-1].step <= num_steps:
            scheduler.add_request(coming.pop().request)
        output = scheduler.schedule()
        num_steps += 1
        if num_steps > MOST_STEPS:
            raise RuntimeError(f"requests are left after {MOST_STEPS} steps: does the policy starve them?")
        if output is not None:
            computed += output.total_num_scheduled_tokens
            scheduler.update_from_output(output, sampled(output))
    stats = scheduler.stats()
    return Outcome(
        num_steps=num_steps,
        num_preemptions=stats.num_preemptions,
        computed=computed,
        needed=sum(_num_needed(one.request) for one in work) - stats.prefix_cache_hits,
        hits=stats.prefix_cache_hits,
        queries=stats.prefix_cache_queries,
    )


def _num_needed(request: EngineCoreRequest) -> int:
    """The last output token is never computed."""
    return len(request.prompt_token_ids) + _max_tokens(request) - 1


def _max_tokens(request: EngineCoreRequest) -> int:
    params = request.params
    if not isinstance(params, SamplingParams) or params.max_tokens is None:
        raise TypeError("requests of these runs end by max_tokens")
    return params.max_tokens


def request(
    number: int, prompt: np.ndarray[tuple[int], np.dtype[np.int32]], num_output_tokens: int
) -> EngineCoreRequest:
    """Greedy, and ended by its length."""
    return EngineCoreRequest(
        request_id=f"r{number:06}",
        prompt_token_ids=prompt,
        params=SamplingParams(max_tokens=num_output_tokens, ignore_eos=True, temperature=0.0),
        arrival_time=float(number),
    )


def random_prompt(rng: np.random.Generator, length: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return rng.integers(0, VOCAB_SIZE, length, dtype=np.int32)
