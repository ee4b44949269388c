"""What a step of scheduling costs under each policy, beside fcfs in the same process.

    python benchmarks/policies.py [--policies priority sjf] [--sizes 32 256 1024] [--waiting 1000] [--steps 640]
        [--far 10000] [--json FILE] [--override KEY=VALUE ...]
        [--peer-script SCRIPT --peer-python PYTHON --peer-model FOLDER]

Two cases, both with a full batch and `--waiting` requests in line (see `tokenyard bench scheduler`): `decode`, in which
nobody enters, and `churn`, in which one request ends and one enters in each step, so that policies are asked. Two
schedulers take turns, 16 steps each; the figures are medians over the turns, microseconds a step, of everything that
is timed (in churn the adding of one request too). A static order may add 20 us or 20 % to fcfs, whichever is more; one
that is asked again and again is bounded by its window: `flat` is the ratio of its churn with `--far` in line to that
with `--waiting`. With a peer (see scheduler_cost.py) fcfs's steady decoding, nobody in line, is compared with its.

Prints tables in Markdown, and one JSON line last. Code 1: a bar is missed.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from policy_runs import refuse_unknown
from scheduler_cost import LIMITS, Figures, measure_ours, measure_peer, medians
from tokenyard.bench.churn import Churn
from tokenyard.bench.decode import SteadyBatch, decode_requests
from tokenyard.bench.headless import headless_scheduler
from tokenyard.bench.report import machine
from tokenyard.errors import CapacityError, TokenyardError
from tokenyard.interfaces import Scheduler
from tokenyard.launch.compose import load_engine_config
from tokenyard.launch.steering import make_steering
from tokenyard.plugins import load_catalogue
from tokenyard.scheduler.policy_calls import overridden

if TYPE_CHECKING:
    from tokenyard.bench.step_times import StepTimes

BASE = "fcfs"
PROMPT_LEN = 512
TURN = 16  # steps
MOST_ADDED_US, MOST_ADDED_SHARE = 20.0, 0.2
FLAT_SIZE, MOST_FLAT = 256, 1.25
DYNAMIC = frozenset(  # asked, or told, step after step
    {"waiting_order", "running_order", "token_budget", "prefill_budget", "chunk_size", "max_running", "on_step"}
)
ROOM = ("kv_cache.num_blocks=120000", "model.max_model_len=8192")
LATENCY = (  # for policies that ask how long a step takes
    "latency=linear",
    "latency.per_step=0.005",
    "latency.per_token=0.0001",
    "latency.per_context_token=0.00000001",
)


class Batch(Protocol):
    """A batch that a benchmark keeps busy."""

    def run(self, num_steps: int) -> StepTimes: ...


Case = Callable[[Scheduler, int, int], Batch]


def steady(scheduler: Scheduler, size: int, num_waiting: int) -> Batch:
    batch = SteadyBatch(scheduler, decode_requests(size + num_waiting, PROMPT_LEN))
    num_running = scheduler.stats().num_running
    if num_running != size:
        raise CapacityError(f"only {num_running} of {size} requests decode together")
    return batch


def churning(scheduler: Scheduler, size: int, num_waiting: int) -> Batch:
    return Churn(scheduler, size, num_waiting, PROMPT_LEN)


CASES: dict[str, Case] = {"decode": steady, "churn": churning}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A policy in one case at one size; microseconds a step, medians."""

    policy: str
    is_dynamic: bool
    case: str
    num_running: int
    num_waiting: int
    base_us: float | None = None
    policy_us: float | None = None
    added_us: float | None = None  # the median of the differences between turns that follow each other
    is_within: bool | None = None  # None: no bar
    why_not: str | None = None  # it could not be measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Flatness:
    """A policy's churn with more and more requests in line; microseconds a step, medians."""

    policy: str
    near_us: float
    far_us: float

    @property
    def ratio(self) -> float:
        return self.far_us / self.near_us


def scheduler_of(policy: str, size: int, overrides: Sequence[str]) -> Scheduler:
    """A scheduler that runs `size` requests at once."""
    limits = (f"scheduler.max_num_seqs={size}", f"scheduler.max_num_batched_tokens={max(8192, 2 * size + 1024)}")
    return headless_scheduler(*load_engine_config([f"scheduler={policy}", *limits, *ROOM, *LATENCY, *overrides]))


def is_dynamic(policy: str, overrides: Sequence[str]) -> bool:
    """Whether its order is asked for again in each step, by what it overrides."""
    steering = make_steering(*load_engine_config([f"scheduler={policy}", *LATENCY, *overrides]))
    return steering.policy is not None and bool(overridden(steering.policy) & DYNAMIC)


def turns(first: Batch, second: Batch, num_steps: int) -> list[tuple[float, float]]:
    """Microseconds a step of both, turn by turn; who begins changes, too."""
    gc.collect()
    gc.freeze()  # what the collector goes through is one scheduler's garbage, not the other's requests
    try:
        found = []
        for number in range(max(2, num_steps // TURN)):
            if number % 2:
                later = mean_us(second.run(TURN))
                found.append((mean_us(first.run(TURN)), later))
            else:
                found.append((mean_us(first.run(TURN)), mean_us(second.run(TURN))))
        return found
    finally:
        gc.unfreeze()


def mean_us(times: StepTimes) -> float:
    return statistics.fmean(times.sums) * 1e6


def measure(policy: str, case: str, size: int, num_waiting: int, num_steps: int, overrides: Sequence[str]) -> Row:
    """One row. A policy that leaves no batch to measure is told with the reason."""
    dynamic = is_dynamic(policy, overrides)
    try:
        base, other = (
            CASES[case](scheduler_of(name, size, given), size, num_waiting)
            for name, given in ((BASE, ()), (policy, overrides))
        )
        pairs = turns(base, other, num_steps)
    except TokenyardError as error:
        return Row(
            policy=policy, is_dynamic=dynamic, case=case, num_running=size, num_waiting=num_waiting, why_not=str(error)
        )
    base_us, added_us = (
        statistics.median(before for before, _ in pairs),
        statistics.median(after - before for before, after in pairs),
    )
    return Row(
        policy=policy,
        is_dynamic=dynamic,
        case=case,
        num_running=size,
        num_waiting=num_waiting,
        base_us=round(base_us, 1),
        policy_us=round(statistics.median(after for _, after in pairs), 1),
        added_us=round(added_us, 1),
        is_within=None if dynamic else added_us <= max(MOST_ADDED_US, MOST_ADDED_SHARE * base_us),
    )


def flatness(policy: str, near: int, far: int, num_steps: int, overrides: Sequence[str]) -> Flatness:
    """Whether a line that is ten times as long costs more."""
    batches = [churning(scheduler_of(policy, FLAT_SIZE, overrides), FLAT_SIZE, line) for line in (near, far)]
    pairs = turns(batches[0], batches[1], num_steps)
    medians_us = [round(statistics.median(column), 1) for column in zip(*pairs, strict=True)]
    return Flatness(policy=policy, near_us=medians_us[0], far_us=medians_us[1])


def print_rows(rows: Sequence[Row]) -> None:
    print("| policy | order | case | running | fcfs us | policy us | added us | bar |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        order = "dynamic" if row.is_dynamic else "static"
        names = f"| {row.policy} | {order} | {row.case} | {row.num_running} |"
        if row.why_not is not None:
            print(f"{names} not measured: {row.why_not} | | | |")
            continue
        bar = {True: "met", False: "MISSED", None: ""}[row.is_within]
        print(f"{names} {row.base_us} | {row.policy_us} | {row.added_us:+} | {bar} |")


def print_flatness(rows: Sequence[Flatness], near: int, far: int) -> None:
    print(f"\n| policy | {near} in line, us | {far} in line, us | flat |\n| --- | --- | --- | --- |")
    for row in rows:
        print(f"| {row.policy} | {row.near_us} | {row.far_us} | {row.ratio:.2f}{'' if is_flat(row) else ' MISSED'} |")


def is_flat(row: Flatness) -> bool:
    """Within the bar, or within what a static order may add."""
    return row.ratio <= MOST_FLAT or row.far_us - row.near_us <= MOST_ADDED_US


def compare_with_peer(command: Sequence[str], sizes: Sequence[int], rounds: int) -> dict[str, dict[str, float]]:
    """Steady decoding of fcfs against the peer's, in turns; means, microseconds a step."""
    ours: list[Figures] = []
    peers: list[Figures] = []
    for _ in range(rounds):
        ours.append(measure_ours(sizes))
        peers.append(measure_peer(command, sizes))
    mine, theirs = medians(ours), medians(peers)
    print("\n| running | fcfs us | peer us | ratio | bar |\n| --- | --- | --- | --- | --- |")
    found = {}
    for size in map(str, sizes):
        ratio = round(mine[size]["mean"] / theirs[size]["mean"], 3)
        found[size] = {"ours_us": mine[size]["mean"], "peer_us": theirs[size]["mean"], "ratio": ratio}
        limit = LIMITS.get(size)
        shown = "" if limit is None else f"{limit:.3f}{'' if ratio <= limit else ' MISSED'}"
        print(f"| {size} | {mine[size]['mean']} | {theirs[size]['mean']} | {ratio} | {shown} |")
    return found


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", help="default: all that are installed")
    parser.add_argument("--sizes", type=int, nargs="+", default=[32, 256, 1024])
    parser.add_argument("--waiting", type=int, default=1000)
    parser.add_argument("--far", type=int, default=10_000, help="0 = leave that out")
    parser.add_argument("--steps", type=int, default=640)
    parser.add_argument("--rounds", type=int, default=3, help="of the peer")
    parser.add_argument("--override", nargs="+", default=[], help="of the policies, not of fcfs")
    parser.add_argument("--json", type=Path, help="a file for the report")
    for name in ("script", "python", "model"):
        parser.add_argument(f"--peer-{name}")
    given = parser.parse_args()
    if min(*given.sizes, given.waiting, given.steps, given.rounds) < 1 or given.far < 0:
        parser.error("--sizes, --waiting, --steps and --rounds take numbers above 0, and --far 0 or more")
    refuse_unknown(parser, given.policies or ())
    given.policies = given.policies or [name for name in load_catalogue().names("policy") if name != BASE]
    given.peer = [given.peer_python, given.peer_script, given.peer_model]
    if any(given.peer) and not all(given.peer):
        parser.error("a peer needs all of --peer-script, --peer-python and --peer-model")
    return given


def main() -> int:
    given, around = parsed(), machine()
    rows = [
        measure(policy, case, size, given.waiting, given.steps, given.override)
        for policy in given.policies
        for case in CASES
        for size in given.sizes
    ]
    print_rows(rows)
    moving = [name for name in given.policies if given.far and is_dynamic(name, given.override)]
    flat = [flatness(name, given.waiting, given.far, given.steps, given.override) for name in moving]
    if flat:
        print_flatness(flat, given.waiting, given.far)
    peer = compare_with_peer(given.peer, given.sizes, given.rounds) if all(given.peer) else None
    report = {
        "rows": [asdict(row) for row in rows],
        "flatness": [{**asdict(row), "ratio": row.ratio} for row in flat],
        "peer": peer,
        "steps": given.steps,
        "overrides": given.override,
        **around,
    }
    if given.json is not None:
        given.json.write_text(json.dumps(report, indent=1), encoding="utf-8")
    print(json.dumps(report))
    is_peer_slow = any(one["ratio"] > LIMITS.get(size, 1e9) for size, one in (peer or {}).items())
    return int(any(row.is_within is False for row in rows) or not all(map(is_flat, flat)) or is_peer_slow)


if __name__ == "__main__":
    sys.exit(main())
