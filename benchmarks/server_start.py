"""From the command `tokenyard serve` to the first answer of /startupz and to 200 of /readyz: medians of several starts.

    python benchmarks/server_start.py [--runs 5] [MODEL] [flags and overrides of `tokenyard serve`]

Times are wall clock, seen from outside, from the creation of the process; the model (the default one without MODEL) is
in the cache of files already. CPU seconds are of the API process and the engine's, each with all its threads, and
change less than wall time on a machine that others use too. One more start lists what the API process imports, by
package. Prints tables and one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from server_process import ServerProcess, launched, use_of
from tokenyard.bench.report import machine, table
from tokenyard.model.default_model import ensure_default_model

BARS = {"startupz": 1.5, "readyz": 5.0}
NEVER = ("torch", "transformers")
"""What the API process must not import."""
SHOWN = 16  # packages
_IMPORT = re.compile(r"import time:\s+(\d+) \|\s+\d+ \| +([\w.]+)")
_POLL = 0.01  # seconds


class Start(NamedTuple):
    """One start. Seconds from the creation of the process, but for `end`."""

    startupz: float  # the first answer, whatever it says
    readyz: float  # the first 200
    phases: dict[str, float]  # when /startupz was first seen to tell them
    api_cpu_to_startupz: float
    cpu: dict[str, float]  # at `readyz`, by process
    rss: dict[str, float]  # MiB at `readyz`, by process
    end: float  # from SIGTERM to the end of the process


def timed_start(arguments: Sequence[str]) -> Start:
    began = time.monotonic()
    with launched(arguments) as server:
        phases = {_phase(server): time.monotonic() - began}
        startupz = time.monotonic() - began
        cpu = use_of(server.members()["api"]).cpu
        while not server.is_ready():
            phases.setdefault(_phase(server), time.monotonic() - began)
            time.sleep(_POLL)
        readyz, use = time.monotonic() - began, server.use()
        code, seconds, left = server.stop()
        if code or left:
            raise SystemExit(f"the server ended with code {code} and left {left}:\n{server.log()[-2000:]}")
    of = {name: one for name, one in use.items() if name in ("api", "engine")}
    cpus = {name: one.cpu for name, one in of.items()}
    return Start(startupz, readyz, phases, cpu, cpus, {name: one.rss for name, one in of.items()}, seconds)


def _phase(server: ServerProcess) -> str:
    """What /startupz says, as soon as it says something."""
    while True:
        try:
            return str(json.loads(server.get("/startupz")[1])["phase"])
        except OSError:
            if server.process.poll() is not None:
                raise SystemExit(f"the server did not start:\n{server.log()[-2000:]}") from None
            time.sleep(_POLL)


def imports(arguments: Sequence[str]) -> dict[str, float]:
    """Milliseconds that the API process spends in the modules of each package, by -X importtime, the longest first."""
    with launched(arguments, flags=("-X", "importtime")) as server:
        server.wait_ready()
        server.stop()
        return by_package(server.log())


def by_package(log: str) -> dict[str, float]:
    """Milliseconds by the packages in the lines of -X importtime; what else a log has is passed over."""
    spent: defaultdict[str, float] = defaultdict(float)
    for microseconds, module in _IMPORT.findall(log):
        spent[module.partition(".")[0]] += int(microseconds) / 1000
    return dict(sorted(spent.items(), key=lambda one: -one[1]))


def median(starts: Sequence[Start]) -> dict[str, object]:
    """Of each figure."""
    return {
        "startupz_s": _median([one.startupz for one in starts]),
        "readyz_s": _median([one.readyz for one in starts]),
        "phases_s": _medians([one.phases for one in starts]),
        "api_cpu_to_startupz_s": _median([one.api_cpu_to_startupz for one in starts]),
        "cpu_s": _medians([one.cpu for one in starts]),
        "rss_mib": _medians([one.rss for one in starts]),
        "end_s": _median([one.end for one in starts]),
    }


def _median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 3)


def _medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each name, over the rows that have it: a short phase is not always seen."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: _median([row[name] for row in rows if name in row]) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    given, arguments = parser.parse_known_args()
    if given.runs < 1:
        parser.error("--runs takes a number above 0")
    if not arguments or arguments[0].startswith("-") or "=" in arguments[0]:
        ensure_default_model(print)
    around = machine()
    starts = [timed_start(arguments) for _ in range(given.runs)]
    packages = imports(arguments)
    found = median(starts)
    print(table([{"second": at, "phase": phase} for phase, at in _phases(found).items()], ("second", "phase")))
    top = list(packages.items())[:SHOWN]
    print(table([{"import ms": round(ms, 1), "package": name} for name, ms in top], ("import ms", "package")))
    ranges = {bar: [round(min(seen), 2), round(max(seen), 2)] for bar, seen in _seen(starts).items()}
    meets = {bar: statistics.median(seen) <= BARS[bar] for bar, seen in _seen(starts).items()}
    forbidden = [name for name in NEVER if name in packages]
    imported = {"imports_ms": round(sum(packages.values())), "must_not_be_imported": forbidden}
    print(json.dumps({**found, "range_s": ranges, "meets_bar": meets, **imported, "runs": given.runs, **around}))


def _phases(found: Mapping[str, object]) -> dict[str, float]:
    phases = found["phases_s"]
    return dict(phases) if isinstance(phases, dict) else {}


def _seen(starts: Sequence[Start]) -> dict[str, list[float]]:
    return {"startupz": [one.startupz for one in starts], "readyz": [one.readyz for one in starts]}


if __name__ == "__main__":
    main()
