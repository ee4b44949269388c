"""Amounts of memory as people write them."""

from __future__ import annotations

import re

from tokenyard.errors import ConfigError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(text: str | int, key: str = "kv_cache.memory") -> int:
    """4096, "512MiB", "2 GB", ... in bytes; raises ConfigError that names the `key` it was given for."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", str(text).lower())
    if match is None or int(float(match[1]) * _UNITS[match[2] or ""]) < 1:
        raise ConfigError(f"{key}={text!r} is not an amount of memory; write bytes, or text such as '512MiB'")
    return int(float(match[1]) * _UNITS[match[2] or ""])
