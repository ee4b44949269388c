"""Tokens that are computed again after preemptions: one choice of victims against another, on the same requests.

    python benchmarks/recompute.py [--policy least-computed] [--base fcfs] [--blocks 200 300 400 500 600]
        [--seeds 0 1 2 3 4] [--requests 200] [--rate 0.2] [--json FILE] [--override KEY=VALUE ...]

The base takes blocks from who was admitted last, and gives first place back to it. Prompts and outputs are of mixed
lengths (log-normal, medians of 150 and 100 tokens); `--rate` requests come with each step (Poisson). Nothing is shared
between prompts. Without a prefix cache a victim loses all that it has computed. With one it may find its own blocks
again when it comes back, and whoever has just lost them has the best chance.

Prints a table in Markdown, means over the seeds, and one JSON line last. Code 1: at some number of blocks, with a
prefix cache or without, the policy made at least as many tokens be computed again as the base.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from policy_runs import Outcome, Work, random_prompt, refuse_unknown, request, run
from tokenyard.bench.report import machine

MEDIAN_PROMPT, MEDIAN_OUTPUT, SPREAD = 150, 100, 0.8
LONGEST = 1024  # tokens of a prompt, and of an output
BLOCK_SIZE = 16
LIMITS = ("scheduler.max_num_seqs=64", f"kv_cache.block_size={BLOCK_SIZE}")
LEAST_BLOCKS = 2 * LONGEST // BLOCK_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Both at one number of blocks; tokens are means over the seeds."""

    num_blocks: int
    prefix_caching: bool
    base_recomputed: float
    policy_recomputed: float
    base_tax: float  # recomputed by all computed tokens
    policy_tax: float
    base_preemptions: float
    policy_preemptions: float
    base_steps: float
    policy_steps: float
    num_better: int  # seeds on which the policy made fewer tokens be computed again

    @property
    def saved(self) -> float:
        """The share of the base's recomputed tokens that the policy saves."""
        return 1 - self.policy_recomputed / self.base_recomputed if self.base_recomputed else 0.0


def mixed_requests(seed: int, count: int, rate: float) -> list[Work]:
    """The same for every policy and every number of blocks."""
    rng = np.random.default_rng(seed)
    steps = np.floor(np.cumsum(rng.exponential(1 / rate, count))).astype(int).tolist()
    prompts, outputs = (_lengths(rng, median, count) for median in (MEDIAN_PROMPT, MEDIAN_OUTPUT))
    return [
        Work(steps[number], request(number, random_prompt(rng, prompts[number]), outputs[number]))
        for number in range(count)
    ]


def _lengths(rng: np.random.Generator, median: int, count: int) -> list[int]:
    lengths = rng.lognormal(np.log(median), SPREAD, count)
    return [int(length) for length in np.clip(lengths, 1, LONGEST)]


def measure(
    works: Sequence[list[Work]], num_blocks: int, prefix_caching: bool, names: Sequence[str], more: Sequence[str]
) -> Row:
    """The base and the policy, by these names, on the same requests."""
    limits = (*LIMITS, f"kv_cache.enable_prefix_caching={prefix_caching}", *more)
    base, policy = ([run(work, num_blocks, [f"scheduler={name}", *limits]) for work in works] for name in names)
    return compared(num_blocks, prefix_caching, base, policy)


def compared(num_blocks: int, prefix_caching: bool, base: Sequence[Outcome], policy: Sequence[Outcome]) -> Row:
    """Outcomes in the order of the seeds."""
    return Row(
        num_blocks=num_blocks,
        prefix_caching=prefix_caching,
        base_recomputed=statistics.fmean(one.recomputed for one in base),
        policy_recomputed=statistics.fmean(one.recomputed for one in policy),
        base_tax=statistics.fmean(one.recomputed / one.computed for one in base),
        policy_tax=statistics.fmean(one.recomputed / one.computed for one in policy),
        base_preemptions=statistics.fmean(one.num_preemptions for one in base),
        policy_preemptions=statistics.fmean(one.num_preemptions for one in policy),
        base_steps=statistics.fmean(one.num_steps for one in base),
        policy_steps=statistics.fmean(one.num_steps for one in policy),
        num_better=sum(ours.recomputed < theirs.recomputed for theirs, ours in zip(base, policy, strict=True)),
    )


def is_within_bar(row: Row) -> bool:
    """Fewer tokens again than the base, where that has any."""
    return row.policy_recomputed < row.base_recomputed or row.base_recomputed == row.policy_recomputed == 0


def print_rows(rows: Sequence[Row], base: str, policy: str, num_seeds: int) -> None:
    print(f"| prefix cache | blocks | {base}: again | {policy}: again | saved | tax | preemptions | steps | better |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        cells = (
            "on" if row.prefix_caching else "off",
            row.num_blocks,
            f"{row.base_recomputed:.0f}",
            f"{row.policy_recomputed:.0f}",
            f"{row.saved:.1%}",
            f"{row.base_tax:.1%}, {row.policy_tax:.1%}",
            f"{row.base_preemptions:.0f}, {row.policy_preemptions:.0f}",
            f"{row.base_steps:.0f}, {row.policy_steps:.0f}",
            f"{row.num_better} of {num_seeds}{'' if is_within_bar(row) else ' MISSED'}",
        )
        print(f"| {' | '.join(map(str, cells))} |")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="least-computed")
    parser.add_argument("--base", default="fcfs")
    parser.add_argument("--blocks", type=int, nargs="+", default=[200, 300, 400, 500, 600])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rate", type=float, default=0.2, help="requests a step")
    parser.add_argument("--override", nargs="+", default=[])
    parser.add_argument("--json", type=Path, help="a file for the report")
    given = parser.parse_args()
    if min(given.blocks) < LEAST_BLOCKS or given.requests < 1 or not given.rate > 0 or min(given.seeds) < 0:
        parser.error(f"--blocks takes {LEAST_BLOCKS} or more, --requests and --rate numbers above 0, --seeds 0 or more")
    refuse_unknown(parser, (given.base, given.policy))
    return given


def main() -> int:
    given = parsed()
    work = [mixed_requests(seed, given.requests, given.rate) for seed in given.seeds]
    names = (given.base, given.policy)
    rows = [
        measure(work, num_blocks, prefix_caching, names, given.override)
        for prefix_caching in (False, True)
        for num_blocks in given.blocks
    ]
    print_rows(rows, given.base, given.policy, len(given.seeds))
    settings = {name: value for name, value in vars(given).items() if name != "json"}
    report = {"rows": [{**asdict(row), "saved": row.saved} for row in rows], **settings, **machine()}
    if given.json is not None:
        given.json.write_text(json.dumps(report, indent=1), encoding="utf-8")
    print(json.dumps(report))
    return int(not all(map(is_within_bar, rows)))


if __name__ == "__main__":
    sys.exit(main())
