"""Times of a scheduler's steps, and what they come to."""

from __future__ import annotations

from typing import NamedTuple


class StepTimes(NamedTuple):
    """Seconds; of each step but `loop`, which is the wall time of all of them, the benchmark's own part included."""

    schedule: list[float]  # [num_steps]
    update: list[float]  # [num_steps]
    loop: float
    add: list[float] | None = None  # [num_steps] where requests are added

    @property
    def sums(self) -> list[float]:
        """All that is timed of each step."""
        columns = [self.schedule, self.update, *([] if self.add is None else [self.add])]
        return [sum(step) for step in zip(*columns, strict=True)]


class StepFigures(NamedTuple):
    """Microseconds a step: means, except where the name says otherwise."""

    schedule_us: float
    update_us: float
    sum_median_us: float
    sum_p99_us: float
    loop_us: float
    timed_share: float  # of loop_us that is timed


def figures_of(times: StepTimes) -> StepFigures:
    """Percentiles are steps that were measured (nearest rank)."""
    num_steps, both = len(times.schedule), sorted(times.sums)
    return StepFigures(
        schedule_us=mean_us(times.schedule),
        update_us=mean_us(times.update),
        sum_median_us=us(both[num_steps // 2]),
        sum_p99_us=us(both[int(num_steps * 0.99)]),
        loop_us=us(times.loop / num_steps),
        timed_share=round(sum(both) / times.loop, 3),
    )


def mean_us(seconds: list[float]) -> float:
    return us(sum(seconds) / len(seconds))


def us(seconds: float) -> float:
    return round(seconds * 1e6, 1)
