"""Lengths of time as people write them."""

from __future__ import annotations

import re

from tokenyard.errors import ConfigError

UNITS = {"us": 1e6, "ms": 1e3, "s": 1.0}
"""How many of a unit make a second."""

LONGEST = 10**9  # seconds: more than thirty years
_DURATION = re.compile(r"([+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?|[+-]?inf|nan)\s*(\S*)", re.ASCII | re.IGNORECASE)


def parse_seconds(text: str | float, key: str) -> float:
    """ "500ms", "0.5 s", "200us" in seconds, above 0; raises ConfigError that names the `key` it was given for.

    A number without a unit is refused: seconds and milliseconds are both usual, and nobody would see the difference.
    """
    match = _DURATION.fullmatch(str(text).strip())
    if match is None:
        raise ConfigError(f"{key}={text!r} is not a length of time; write a number and its unit, such as 500ms or 2s")
    number, unit = match[1], match[2]
    if not unit:
        given = f"{text:g}" if isinstance(text, float) else text
        raise ConfigError(f"{key}={given} has no unit; write it like 500ms or 0.5s (units: {', '.join(UNITS)})")
    if unit not in UNITS:
        raise ConfigError(f"{key}={text!r} has an unknown unit '{unit}'; known: {', '.join(UNITS)}")
    seconds = float(number) / UNITS[unit]
    if not 0 < seconds <= LONGEST:  # also refuses NaN
        raise ConfigError(f"{key}={text!r} is not valid: it must be above 0 and at most {LONGEST} seconds")
    return seconds
