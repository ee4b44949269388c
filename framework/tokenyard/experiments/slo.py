"""SLO: what a request must meet to be good."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenyard.durations import parse_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tokenyard.config import SLOConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SLO:
    """The most seconds that each may take; None = any."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    @property
    def limits(self) -> Mapping[str, float]:
        """Those that are set, by metric."""
        limits = {"ttft": self.ttft, "tpot": self.tpot, "e2e": self.e2e}
        return {name: seconds for name, seconds in limits.items() if seconds is not None}


def parse_slo(config: SLOConfig) -> SLO:
    """Raises ConfigError for what is not a length of time with its unit."""
    return SLO(ttft=_seconds(config.ttft, "ttft"), tpot=_seconds(config.tpot, "tpot"), e2e=_seconds(config.e2e, "e2e"))


def _seconds(text: str | float | None, name: str) -> float | None:
    return None if text is None else parse_seconds(text, f"experiment.slo.{name}")
