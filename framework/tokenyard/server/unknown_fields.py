"""UnknownFields: tells the log which fields requests have that no endpoint reads, each once."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from tokenyard.sampling_checks import short

logger = logging.getLogger(__name__)

_MAX_KNOWN = 256  # names that are remembered; there are no warnings beyond
_MAX_NAME = 64  # characters


class UnknownFields:
    """Of one server. Bounded, whatever names clients think of."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def note(self, fields: Iterable[str]) -> None:
        """Warn of those that were not told yet."""
        for name in fields:
            if len(self._told) >= _MAX_KNOWN:
                return
            name = name[:_MAX_NAME]
            if name not in self._told:
                self._told.add(name)
                logger.warning("requests have the field %s, which nothing reads; it is ignored", short(name))
