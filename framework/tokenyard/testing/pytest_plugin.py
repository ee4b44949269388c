"""pytest's part, found through the entry point group `pytest11`: the fixture `engine_harness`.

pytest imports this module in every project where Tokenyard is installed, so it imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Protocol

import pytest

if TYPE_CHECKING:
    from tokenyard.catalogue import Catalogue
    from tokenyard.clock import Clock
    from tokenyard.config import EngineConfig
    from tokenyard.launch.assemble import Decorate
    from tokenyard.testing.harness import EngineHarness
    from tokenyard.testing.inputs import StepSeconds


class MakeHarness(Protocol):
    """Makes an `EngineHarness`, with the arguments of its constructor."""

    def __call__(
        self,
        overrides: Sequence[str] | None = (),
        *,
        catalogue: Catalogue | None = ...,
        config: EngineConfig | None = ...,
        vocab_size: int = ...,
        eos_token_id: int | Sequence[int] | None = ...,
        group_windows: Sequence[int | None] = ...,
        clock: Clock | None = ...,
        step_seconds: StepSeconds = ...,
        decorate: Decorate = ...,
        checks: bool = ...,
    ) -> EngineHarness: ...


@pytest.fixture
def engine_harness() -> Iterator[MakeHarness]:
    """A function that makes an `EngineHarness`; each is checked once more and shut down when the test ends."""
    from tokenyard.testing.harness import EngineHarness  # only where the fixture is used

    made: list[EngineHarness] = []

    def make(overrides: Sequence[str] | None = (), **options: object) -> EngineHarness:
        made.append(EngineHarness(overrides, **options))  # type: ignore[arg-type]  # MakeHarness has the types
        return made[-1]

    with ExitStack() as stack:
        yield make
        for harness in made:
            stack.callback(harness.close)
