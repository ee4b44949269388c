"""Facts about the machine, and tables for people."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence


def machine() -> dict[str, object]:
    """What a figure depends on besides the code; `load` is of the last minute, None where the system does not tell."""
    load = round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
    return {"python": platform.python_version(), "load": load}


def table(rows: Sequence[Mapping[str, object]], columns: Sequence[str]) -> str:
    """The columns of the rows, numbers to the right."""
    cells = [list(columns), *([_text(row[name]) for name in columns] for row in rows)]
    is_text = [any(isinstance(row[name], str) for row in rows) for name in columns]
    widths = [max(len(line[at]) for line in cells) for at in range(len(columns))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if left else cell.rjust(width)
            for cell, width, left in zip(line, widths, is_text, strict=True)
        ).rstrip()
        for line in cells
    )


def _text(value: object) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)
