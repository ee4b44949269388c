"""The fixture of the public behaviours: 16 requests, 8192 tokens a step, 10000 blocks of 16, no prefix cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from tokenyard.testing import EngineHarness

FIXTURE = [
    "scheduler.max_num_seqs=16",
    "scheduler.max_num_batched_tokens=8192",
    "kv_cache.enable_prefix_caching=false",
    "kv_cache.num_blocks=10000",
]

MakeHarness = Callable[..., EngineHarness]


@pytest.fixture
def harness() -> Iterator[MakeHarness]:
    """Makes harnesses with the fixture's config and further overrides; checks their invariants at the end."""
    made: list[EngineHarness] = []

    def make(*overrides: str, **arguments: object) -> EngineHarness:
        keys = {override.partition("=")[0] for override in overrides}
        base = [override for override in FIXTURE if override.partition("=")[0] not in keys]
        made.append(EngineHarness([*base, *overrides], **arguments))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.close()
