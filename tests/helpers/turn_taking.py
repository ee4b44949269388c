"""Engines with one or a few places, step by step: who ran when, and who ended when."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from tokenyard.config import EngineConfig
from tokenyard.launch.compose import load_engine_config
from tokenyard.testing import EngineHarness


class Job(NamedTuple):
    """A request: `at` is the step before which it comes."""

    name: str
    num_outputs: int
    at: int = 0
    num_prompt: int = 1
    priority: int = 0
    session: str | None = None


def engine_of(policy: str, *overrides: str, places: int = 1, step_seconds: float | None = 1.0) -> EngineHarness:
    """One step a second, an oracle, no prefix cache."""
    own = (f"scheduler={policy}", f"scheduler.max_num_seqs={places}", "scheduler.predictor=oracle")
    return EngineHarness(
        config=_config((*own, "kv_cache.enable_prefix_caching=false", *overrides)), step_seconds=step_seconds
    )


@lru_cache(maxsize=64)  # composing a config takes longer than most tests
def _config(overrides: tuple[str, ...]) -> EngineConfig:
    return load_engine_config(overrides)[0]


def add(engine: EngineHarness, job: Job) -> None:
    number = len(engine.requests)
    engine.add(
        [1000 * number + position for position in range(job.num_prompt)],
        job.name,
        max_tokens=job.num_outputs,
        true_output_tokens=job.num_outputs,
        priority=job.priority,
        session=job.session,
    )


class Played(NamedTuple):
    """What became of some jobs."""

    ran: Sequence[Sequence[str]]  # of each step, who
    ended: Mapping[str, int]  # after how many steps

    @property
    def turns(self) -> list[str]:
        """`a6` = alone for six steps; `a+b2` = the two of them for two."""
        names = ["+".join(sorted(step)) for step in self.ran]
        return [f"{name}{len(list(steps))}" for name, steps in groupby(names)]


def play(engine: EngineHarness, jobs: Iterable[Job], *, limit: int = 1000) -> Played:
    """Until every job has ended."""
    left = sorted(jobs, key=lambda job: job.at)
    ran: list[list[str]] = []
    ended: dict[str, int] = {}
    while left or engine.has_requests:
        while left and left[0].at <= len(ran):
            add(engine, left.pop(0))
        outputs = engine.step()
        ran.append(sorted(engine.scheduled) if engine.last_outputs else [])
        ended |= {end.request_id: len(ran) for end in outputs.finished}
        if len(ran) > limit:
            raise AssertionError(f"not done after {limit} steps: {engine.stats}")
    engine.close()
    return Played(ran, ended)


def started(engine: EngineHarness, jobs: Iterable[Job]) -> list[str]:
    """Ids in the order in which they first run."""
    played = play(engine, jobs)
    return list(dict.fromkeys(name for step in played.ran for name in step))
