"""How many compiled operators oneDNN and torch keep for each thread: one for every shape that they have met."""

from __future__ import annotations

from collections.abc import MutableMapping

CAPACITY = "128"
_VARIABLES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")  # oneDNN's own, and torch's on top of it


def bound_primitive_caches(environment: MutableMapping[str, str]) -> None:
    """Bound them; must precede `import torch`. What the user has set is kept.

    Their own bound of 1024 is far off: an engine meets another number of tokens in almost every step, and grows for
    thousands of requests (docs/explanation/threads.md).
    """
    for name in _VARIABLES:
        environment.setdefault(name, CAPACITY)
