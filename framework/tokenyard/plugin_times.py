"""PluginTimes: what plugins cost of an engine's steps, by the mechanism's clock, and whether that is within budget."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from tokenyard.engine_outputs import PluginStats, PluginTime
from tokenyard.stopwatch import Stopwatch

if TYPE_CHECKING:
    from tokenyard.clock import Clock
    from tokenyard.stopwatch import Timer

logger = logging.getLogger(__name__)

PartT = TypeVar("PartT")

WINDOW = 100  # steps whose mean is compared with the budget
WARNING_INTERVAL = 60.0  # engine-clock seconds between two warnings
_REFRESH = 16  # steps between two looks at the tallies: a look costs some microseconds

CALLS: Mapping[str, tuple[str, ...]] = {
    "observer": ("on_step",),
    "kv_cache": (
        "lookup",
        "allocate",
        "allocate_next",
        "commit",
        "free",
        "take_events",
        "num_exclusive_blocks",
        "num_saved_blocks",
        "prefix_hashes",
        "swap_out",
        "forget_swapped",
        "take_transfers",
    ),
    "eviction": ("pop", "remove", "append", "on_written", "on_hit", "on_cleared"),
    "predictor": ("output_len", "quantile", "on_finish"),
    "latency": ("step_seconds",),
}
"""What is timed of a plugin by its kind; of a policy it is what it overrides."""

DETAILED_KINDS = frozenset({"kv_cache", "eviction", "predictor", "latency"})
"""Kinds that may be called for each request of a step: a timer around each such call is not for free."""


class PluginPoint(NamedTuple):
    """A method of a plugin that the mechanism, or another plugin, calls."""

    kind: str
    plugin: str
    point: str


class PluginTimes:
    """Of one engine, for its thread. Seconds that one plugin spends in another are the other's.

    A scheduler puts `timer` around its calls of a policy and `stats` into its own stats; an engine loop says
    `count_step` after each step. With `budget_us` or `is_detailed` the `DETAILED_KINDS` are timed too. `clock` is the
    engine's, and `now` the timer in seconds, None = perf_counter; `owner` names the distribution that a plugin came
    with, by its kind and name.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        budget_us: float | None = None,
        is_detailed: bool = False,
        owner: Callable[[str, str], str | None] = lambda kind, plugin: None,
        now: Callable[[], float] | None = None,
    ) -> None:
        self.stopwatch: Stopwatch[PluginPoint] = Stopwatch(now or perf_counter)
        self.is_detailed = is_detailed or budget_us is not None
        self._budget = None if budget_us is None else _Budget(clock, budget_us, owner)
        self._num_steps = 0
        self._step_seconds = 0.0
        self._stats = PluginStats()

    def timer(self, kind: str, plugin: str, point: str) -> Timer:
        """To be entered around each call of this point."""
        return self.stopwatch.timer(PluginPoint(kind, plugin, point))

    def watch(self, part: PartT, kind: str, plugin: str) -> PartT:
        """`part` itself, with timers as attributes around the `CALLS` of its kind, if that is timed."""
        if self.is_detailed or kind not in DETAILED_KINDS:
            for point in CALLS[kind]:
                label = PluginPoint(kind, plugin, point)
                # Past a `__setattr__` of its own: a part may be a frozen dataclass.
                object.__setattr__(part, point, self.stopwatch.timed(label, getattr(part, point)))
        return part

    def count_step(self, seconds: float) -> None:
        """A step has ended that took so long by the wall, everything included."""
        self._num_steps += 1
        self._step_seconds += seconds
        if self._num_steps % _REFRESH == 0:
            self._look()
        if self._budget is not None and self._num_steps % WINDOW == 0:
            self._budget.check(self._seconds())

    def stats(self, *, is_exact: bool = False) -> PluginStats:
        """What was counted since the start, as of at most 15 steps ago, or of now."""
        if is_exact:
            self._look()
        return self._stats

    def _look(self) -> None:
        self._stats = PluginStats(
            times=tuple(
                PluginTime(*label, tally.self_seconds, tally.num_calls)
                for label, tally in self.stopwatch.tallies().items()
                if tally.num_calls
            ),
            step_seconds=self._step_seconds,
            num_over_budget=0 if self._budget is None else self._budget.num_exceeded,
        )

    def _seconds(self) -> dict[PluginPoint, float]:
        return {label: tally.self_seconds for label, tally in self.stopwatch.tallies().items()}


class _Budget:
    """Compares windows of steps with what plugins may take, and warns."""

    def __init__(self, clock: Clock, budget_us: float, owner: Callable[[str, str], str | None]) -> None:
        self.num_exceeded = 0  # windows
        self._clock, self._budget_us, self._owner = clock, budget_us, owner
        self._before: Mapping[PluginPoint, float] = {}
        self._warned_at: float | None = None

    def check(self, seconds: Mapping[PluginPoint, float]) -> None:
        """`seconds` since the start, at the end of a window."""
        spent = {point: total - self._before.get(point, 0.0) for point, total in seconds.items()}
        self._before = seconds
        spent_us = _us_a_step(spent.values())
        if spent_us <= self._budget_us:
            return
        self.num_exceeded += 1
        now = self._clock.now()
        if self._warned_at is not None and now - self._warned_at < WARNING_INTERVAL:
            return
        self._warned_at = now
        point = max(spent, key=spent.__getitem__)
        owner = self._owner(point.kind, point.plugin)
        logger.warning(
            "plugins took %.0f us a step in the last %d steps, and plugins.budget_us=%g; the costliest is %s '%s'%s in "
            "%s, %.0f us a step",
            spent_us,
            WINDOW,
            self._budget_us,
            point.kind,
            point.plugin,
            "" if owner is None else f" of {owner}",
            point.point,
            _us_a_step([spent[point]]),
        )


def _us_a_step(seconds: Iterable[float]) -> float:
    return sum(seconds) / WINDOW * 1e6
