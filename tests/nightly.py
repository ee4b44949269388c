"""State machines at nightly size: `python tests/nightly.py [RULES]`, 100,000 rules each unless told otherwise."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import TypeAlias

sys.path.insert(0, str(Path(__file__).parent / "helpers"))

from engine_machine import EngineMachine
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from kv_machine import ManagerMachine
from kv_pool_machine import PoolMachine

Machine: TypeAlias = type[EngineMachine] | type[ManagerMachine] | type[PoolMachine]
MACHINES: tuple[Machine, ...] = (PoolMachine, ManagerMachine, EngineMachine)


def run(machine: Machine, num_rules: int) -> None:
    """Run until at least `num_rules` rules have run; a broken invariant raises with the shortest trace."""
    started = time.perf_counter()
    profile = settings(
        max_examples=1000, stateful_step_count=50, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    while machine.seen["rules"] < num_rules:
        run_state_machine_as_test(machine, settings=profile)
    told = ", ".join(f"{count} {name}" for name, count in machine.seen.items())
    print(f"{machine.__name__}: {told}; {time.perf_counter() - started:.0f} s; all invariants hold", flush=True)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    for machine in MACHINES:
        run(machine, int(sys.argv[1]) if len(sys.argv) > 1 else 100_000)
