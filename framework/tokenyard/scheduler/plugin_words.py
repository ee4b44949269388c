"""What a plugin handed over, in words: it may be anything, and must not break the message about it."""

from __future__ import annotations

_LONGEST = 200  # characters


def shown(value: object, *, as_text: bool = False) -> str:
    """`repr(value)`, or `str(value)`, cut; its type where even that fails."""
    try:
        text = str(value) if as_text else repr(value)
    except (Exception, SystemExit):
        return f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
