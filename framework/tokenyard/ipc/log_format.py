"""How log lines look, which children learn from their parents: all lines of a log look alike."""

from __future__ import annotations

import logging

_DEFAULT = "%(levelname)s: %(message)s"


def own_log_format() -> str:
    """That of this process's root logger, as `logging.basicConfig` takes it."""
    formatters = (handler.formatter for handler in logging.getLogger().handlers)
    return next((found._fmt for found in formatters if found is not None and found._fmt), _DEFAULT)
