"""Prompt tokens that the prefix cache saves when it is smaller than the set of prefixes: a policy's order against fcfs.

    python benchmarks/prefix_hits.py [--policy lpm] [--base fcfs] [--share 0.25 0.5 0.75 1.5] [--seeds 0 1 2]
        [--groups 32] [--prompts 16] [--prefix 512] [--suffix 64] [--json FILE] [--override KEY=VALUE ...]

`--groups` prefixes of `--prefix` tokens, each with `--prompts` prompts that add a suffix of their own, all in line at
once in random order. The cache has room for `--share` of the prefixes, beside what the running requests need for
themselves; the best possible rate of hits is (prompts - 1) / prompts of the prefixes.

Prints a table in Markdown, means over the seeds, and one JSON line last. Code 1: with a cache below the set of prefixes
the policy had no more hits than the base.
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
from policy_runs import Work, random_prompt, refuse_unknown, request, run
from tokenyard.bench.report import machine

BLOCK_SIZE = 16
NUM_RUNNING = 8
NUM_OUTPUT_TOKENS = 16
LIMITS = (
    f"scheduler.max_num_seqs={NUM_RUNNING}",
    "scheduler.max_num_batched_tokens=2048",
    f"kv_cache.block_size={BLOCK_SIZE}",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The prompts; tokens."""

    groups: int
    prompts: int  # a group
    prefix: int
    suffix: int

    @property
    def best_rate(self) -> float:
        """Hits by all prompt tokens, had each prefix been computed once."""
        whole = self.prefix // BLOCK_SIZE * BLOCK_SIZE
        return (self.prompts - 1) * whole / (self.prompts * (self.prefix + self.suffix))

    def num_blocks(self, share: float) -> int:
        """Room for a share of the prefixes, and for what each running request has for itself."""
        own = -(-(self.prefix + self.suffix + NUM_OUTPUT_TOKENS) // BLOCK_SIZE)
        return NUM_RUNNING * own + int(share * self.groups * (self.prefix // BLOCK_SIZE))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Rates of hits at one size of the cache, means over the seeds."""

    share: float
    num_blocks: int
    base_rate: float
    policy_rate: float
    best_rate: float


def shared_prefixes(seed: int, shape: Shape) -> list[Work]:
    """All there from the beginning, in random order."""
    rng = np.random.default_rng(seed)
    prefixes = [random_prompt(rng, shape.prefix) for _ in range(shape.groups)]
    order = rng.permutation(shape.groups * shape.prompts).tolist()
    return [
        Work(
            0,
            request(
                number,
                np.concatenate([prefixes[which % shape.groups], random_prompt(rng, shape.suffix)]),
                NUM_OUTPUT_TOKENS,
            ),
        )
        for number, which in enumerate(order)
    ]


def measure(share: float, shape: Shape, works: Sequence[list[Work]], names: Sequence[str], more: Sequence[str]) -> Row:
    """The base and the policy, by these names, on the same prompts."""
    num_blocks = shape.num_blocks(share)
    rates = [
        statistics.fmean(run(work, num_blocks, [f"scheduler={name}", *LIMITS, *more]).hit_rate for work in works)
        for name in names
    ]
    return Row(share=share, num_blocks=num_blocks, base_rate=rates[0], policy_rate=rates[1], best_rate=shape.best_rate)


def print_rows(rows: Sequence[Row], base: str, policy: str) -> None:
    print(f"| room for prefixes | blocks | {base} | {policy} | best |\n| --- | --- | --- | --- | --- |")
    for row in rows:
        print(
            f"| {row.share:.0%} | {row.num_blocks} | {row.base_rate:.1%} | {row.policy_rate:.1%}"
            f"{'' if is_better(row) else ' MISSED'} | {row.best_rate:.1%} |"
        )


def is_better(row: Row) -> bool:
    """Or there was room for all prefixes."""
    return row.share >= 1 or row.policy_rate > row.base_rate


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="lpm")
    parser.add_argument("--base", default="fcfs")
    parser.add_argument("--share", type=float, nargs="+", default=[0.25, 0.5, 0.75, 1.5])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    for name, value in (("groups", 32), ("prompts", 16), ("prefix", 512), ("suffix", 64)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--override", nargs="+", default=[])
    parser.add_argument("--json", type=Path, help="a file for the report")
    given = parser.parse_args()
    if min(given.groups, given.prompts, given.prefix, given.suffix) < 1 or min(*given.share, *given.seeds) < 0:
        parser.error("--groups, --prompts, --prefix and --suffix take numbers above 0, --share and --seeds 0 or more")
    refuse_unknown(parser, (given.base, given.policy))
    return given


def main() -> int:
    given = parsed()
    shape = Shape(groups=given.groups, prompts=given.prompts, prefix=given.prefix, suffix=given.suffix)
    works = [shared_prefixes(seed, shape) for seed in given.seeds]
    rows = [measure(share, shape, works, (given.base, given.policy), given.override) for share in given.share]
    print_rows(rows, given.base, given.policy)
    settings = {name: value for name, value in vars(given).items() if name != "json"}
    report = {"rows": [asdict(row) for row in rows], **settings, **machine()}
    if given.json is not None:
        given.json.write_text(json.dumps(report, indent=1), encoding="utf-8")
    print(json.dumps(report))
    return int(not all(map(is_better, rows)))


if __name__ == "__main__":
    sys.exit(main())
