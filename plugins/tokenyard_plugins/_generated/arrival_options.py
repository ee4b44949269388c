"""Options of arrivals, which the generated workloads share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

_LEAST_RATE, _MOST_RATE = 1e-9, 1e9
_LEAST_BURSTINESS = 1e-3  # below, nearly all intervals are 0 and the others last for ever
_MOST_SECONDS = 1e9
_NEEDS: Mapping[str, tuple[str, ...]] = {
    "constant": (),
    "on_off": ("on_time", "off_time"),
    "ramp": ("final_rate", "ramp_time"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """How the rate changes. What a `kind` does not know must be left out, or null."""

    kind: Literal["constant", "on_off", "ramp"] = "constant"
    on_time: float | None = None  # on_off: seconds for which the rate holds, from the start; then
    off_time: float | None = None  # on_off: seconds without requests, and so on
    final_rate: float | None = None  # ramp: the rate grows or shrinks evenly from `rate` to this one
    ramp_time: float | None = None  # ramp: in so many seconds; then it stays

    def __post_init__(self) -> None:
        given = {
            "on_time": self.on_time,
            "off_time": self.off_time,
            "final_rate": self.final_rate,
            "ramp_time": self.ramp_time,
        }
        needs = _NEEDS[self.kind]
        for name, value in given.items():
            if name in needs and value is None:
                raise ValueError(f"kind={self.kind} needs {' and '.join(needs)}; {name} is not given")
            if name not in needs and value is not None:
                raise ValueError(f"kind={self.kind} does not know {name}; leave it out, or set it to null")
            if value is not None and name != "final_rate":
                check_seconds(name, value)
        if self.final_rate is not None:
            check_rate("final_rate", self.final_rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalOptions:
    """Options that stand beside a workload's own."""

    rate: float = 1.0  # arrivals per second
    burstiness: float = 1.0  # 1 = a Poisson process; less = burstier, more = more even, inf = at equal intervals
    profile: ProfileOptions = field(default_factory=ProfileOptions)  # how the rate changes over time

    def __post_init__(self) -> None:
        check_rate("rate", self.rate)
        check_burstiness(self.burstiness)


def check_rate(name: str, rate: float) -> None:
    """Raises ValueError."""
    if not _LEAST_RATE <= rate <= _MOST_RATE:  # also refuses NaN
        raise ValueError(f"{name}={rate} is not valid: it must be from {_LEAST_RATE:g} to {_MOST_RATE:g} per second")


def check_burstiness(burstiness: float) -> None:
    """Raises ValueError."""
    if not burstiness >= _LEAST_BURSTINESS:
        raise ValueError(f"burstiness={burstiness} is not valid: it must be at least {_LEAST_BURSTINESS}, or inf")


def check_seconds(name: str, seconds: float, *, may_be_zero: bool = False) -> None:
    """Raises ValueError."""
    if not (0 < seconds <= _MOST_SECONDS or (may_be_zero and seconds == 0)):
        least = "at least 0" if may_be_zero else "above 0"
        raise ValueError(f"{name}={seconds} is not valid: it must be seconds, {least} and at most {_MOST_SECONDS:g}")


def check_count(name: str, count: int, most: int = 10**9) -> None:
    """Raises ValueError."""
    if not 1 <= count <= most:
        raise ValueError(f"{name}={count} is not valid: it must be from 1 to {most}")


def check_deadline(deadline: float | None) -> None:
    """Raises ValueError."""
    if deadline is not None and not 0 < deadline < math.inf:
        raise ValueError(f"deadline={deadline} is not valid: it must be a number of seconds above 0")
