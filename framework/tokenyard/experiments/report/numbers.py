"""Numbers as people read them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenyard.experiments.report.statistics import Estimate

_DIGITS = 3


def number_text(value: float | None, *, is_signed: bool = False) -> str:
    """Three digits that count, whole numbers whole; n/a for what is not known."""
    if value is None or not math.isfinite(value):
        return "n/a"
    decimals = 0 if value == 0 else max(0, _DIGITS - 1 - math.floor(math.log10(abs(value))))
    decimals = 0 if value == int(value) else min(decimals, 6)
    # What rounds to nothing is neither above nor below.
    return f"{round(value, decimals) or 0.0:{'+' if is_signed else ''},.{decimals}f}"


def estimate_text(value: Estimate | None, *, is_signed: bool = False) -> str:
    """`12.3 ± 0.4`, without the interval where there is none."""
    if value is None:
        return "n/a"
    text = number_text(value.mean, is_signed=is_signed)
    return text if value.half_width is None else f"{text} ± {number_text(value.half_width)}"


def percent_text(share: float | None) -> str:
    """`+12.3 %`; zero has no sign."""
    if share is None:
        return "n/a"
    percent = round(100 * share, 1)
    return "0.0 %" if percent == 0 else f"{percent:+,.1f} %"


def ratio_text(ratio: tuple[float, float | None, float | None] | None) -> str:
    """`0.50 (0.44 to 0.57)`."""
    if ratio is None:
        return "n/a"
    mean, low, high = ratio
    return number_text(mean) if low is None else f"{number_text(mean)} ({number_text(low)} to {number_text(high)})"
