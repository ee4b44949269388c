"""What scheduling costs: `tokenyard bench scheduler`, and a peer's scheduler in the same sitting, interleaved.

    python benchmarks/scheduler_cost.py [--rounds 3] [--sizes 32 256 1024]
        [--peer-script SCRIPT --peer-python PYTHON --peer-model FOLDER]

Without a peer only ours is measured. A peer is a script that prints one JSON line last, measured as ours is:
`PYTHON SCRIPT FOLDER 32 256` prints {"32": {"schedule_us": .., "update_us": .., "sum_p99_us": ..}, ..}, and
`PYTHON SCRIPT FOLDER admit` prints {"make_and_hash_ms": .., "add_and_schedule_ms": .., "scheduled_tokens": ..}.
Prints a table of medians over the rounds, and one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence

OURS = [sys.executable, "-c", "from tokenyard.cli import main; main()", "bench", "scheduler", "--json"]
LIMITS = {"32": 1 / 3, "256": 0.1, "1024": 0.1, "admit": 0.5}
"""What ours may cost, as a share of the peer's, for the sizes that were agreed on."""

Figures = dict[str, dict[str, float]]


def last_json(command: Sequence[str]) -> object:
    """The JSON in the last line that a process prints."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure_ours(sizes: Sequence[int]) -> Figures:
    """A round of ours: us a step by size, and ms under `admit`."""
    rows = last_json([*OURS, f"bench.num_requests=[{','.join(map(str, sizes))}]"])
    admit = last_json([*OURS, "bench.mode=admit"])
    if not isinstance(rows, list) or not isinstance(admit, Mapping):
        raise TypeError("`tokenyard bench scheduler` printed something else than rows")
    figures = {str(row["num_requests"]): {"mean": mean(row), "p99": row["sum_p99_us"]} for row in rows}
    return {**figures, "admit": {"mean": admit["total_ms"], "scheduled_tokens": admit["scheduled_tokens"]}}


def measure_peer(command: Sequence[str], sizes: Sequence[int]) -> Figures:
    """A round of the peer in the same form."""
    rows, admit = last_json([*command, *map(str, sizes)]), last_json([*command, "admit"])
    if not isinstance(rows, Mapping) or not isinstance(admit, Mapping):
        raise TypeError("the peer's script printed something else than a JSON object")
    figures = {size: {"mean": mean(row), "p99": row["sum_p99_us"]} for size, row in rows.items()}
    total = admit["make_and_hash_ms"] + admit["add_and_schedule_ms"]
    return {**figures, "admit": {"mean": total, "scheduled_tokens": admit["scheduled_tokens"]}}


def mean(row: Mapping[str, float]) -> float:
    return row["schedule_us"] + row["update_us"]


def medians(rounds: Sequence[Figures]) -> Figures:
    """The median over the rounds of each figure."""
    return {
        case: {name: round(statistics.median(figures[case][name] for figures in rounds), 1) for name in rounds[0][case]}
        for case in rounds[0]
    }


def print_table(ours: Figures, peer: Figures | None) -> None:
    """Microseconds a step, and milliseconds for the admission."""
    print(f"{'case':<8}{'ours':>10}{'p99':>10}{'peer':>10}{'p99':>10}{'ratio':>8}{'limit':>8}")
    for case, figures in ours.items():
        line = f"{case:<8}{cells(figures)}"
        if peer is not None:
            limit = f"{LIMITS[case]:>8.3f}" if case in LIMITS else ""
            line += f"{cells(peer[case])}{figures['mean'] / peer[case]['mean']:>8.3f}{limit}"
        print(line)


def cells(figures: Mapping[str, float]) -> str:
    p99 = f"{figures['p99']:.1f}" if "p99" in figures else "-"
    return f"{figures['mean']:>10.1f}{p99:>10}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", type=int, nargs="+", default=[32, 256, 1024])
    for name in ("script", "python", "model"):
        parser.add_argument(f"--peer-{name}")
    given = parser.parse_args()
    peer_command = [given.peer_python, given.peer_script, given.peer_model]
    if any(peer_command) and not all(peer_command):
        parser.error("a peer needs all of --peer-script, --peer-python and --peer-model")
    load, ours, peer = os.getloadavg()[0], [], []
    for _ in range(given.rounds):
        ours.append(measure_ours(given.sizes))
        if all(peer_command):
            peer.append(measure_peer(peer_command, given.sizes))
    our_medians, peer_medians = medians(ours), medians(peer) if peer else None
    print_table(our_medians, peer_medians)
    report = {"ours": our_medians, "peer": peer_medians, "rounds": given.rounds, "load": [load, os.getloadavg()[0]]}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
