"""How long torch's threads wait for each other before they give up their core."""

from __future__ import annotations

from collections.abc import MutableMapping

SPIN_COUNT = "2000"  # tens of microseconds: longer than a step's operators keep each other waiting on idle cores


def share_cores(environment: MutableMapping[str, str]) -> None:
    """Let torch's threads wait briefly for each other, and then give up their core; must precede `import torch`.

    libgomp's own default is to spin for as long as it takes. With another process on one of two cores that made a
    start 8 times and decoding 20 times as slow (docs/explanation/threads.md). What the user has set is kept.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
