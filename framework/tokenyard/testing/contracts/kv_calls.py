"""Random calls of a K/V manager: requests with beginnings that many share come, grow, are swapped out and go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from tokenyard.request import RETENTION_LEVELS
from tokenyard.testing.contracts.base import seeded
from tokenyard.testing.contracts.kv_driver import DrivenRequest, KVDriver

if TYPE_CHECKING:
    from random import Random

    from tokenyard.request import Retention

_MIXES: Sequence[Mapping[str, int]] = (
    MappingProxyType({"admit": 5, "compute": 6, "decode": 6, "free": 3, "reset": 1}),
    MappingProxyType({"admit": 4, "compute": 8, "decode": 2, "free": 1, "swap_out": 6, "take_back": 8, "forget": 1}),
)
"""How often each call is made: in traces without and with swapping."""


@dataclass(frozen=True, slots=True)
class KVCall:
    """A call; `which` says of which request, among those that it can be about."""

    kind: str
    which: int
    count: int  # tokens to compute
    tokens: tuple[int, ...]  # of a request that comes; the first one is also the next token of one that decodes
    salt: str | None
    retention: Retention
    skips: bool  # the prefix cache

    def __str__(self) -> str:
        tokens = f", {list(self.tokens)}, salt={self.salt}, skips={self.skips}" if self.kind == "admit" else ""
        return f"{self.kind}({self.which}{tokens})"


def random_calls(seed: int, length: int) -> list[KVCall]:
    """So many calls."""
    draw = seeded(seed)
    weights = draw.choice(_MIXES)
    kinds = draw.choices(list(weights), list(weights.values()), k=length)
    return [_call(kind, draw) for kind in kinds]


def make_calls(driver: KVDriver, calls: Sequence[KVCall], *, salt: str = "", num_lookups: int = 0) -> None:
    """Make the calls, with a few look-ups of others after each; at the end nobody is left. `salt` ends every id."""
    for number, call in enumerate(calls):
        _make(driver, call, f"k{number:03}{salt}")
        for _ in range(num_lookups):
            driver.manager.lookup(DrivenRequest(f"other{number}", list(call.tokens), cache_salt=call.salt))
    for request in list(driver.live.values()):
        driver.free(request)
    for request in list(driver.swapped.values()):
        driver.forget_swapped(request)


def _make(driver: KVDriver, call: KVCall, name: str) -> None:
    if call.kind == "admit":
        driver.admit(
            DrivenRequest(
                name,
                list(call.tokens),
                cache_salt=call.salt,
                retention=call.retention,
                skip_prefix_cache=call.skips,
            )
        )
    elif call.kind == "reset":
        driver.reset()
    elif call.kind in ("take_back", "forget"):
        if driver.swapped:
            request = driver.swapped[sorted(driver.swapped)[call.which % len(driver.swapped)]]
            driver.take_back(request) if call.kind == "take_back" else driver.forget_swapped(request)
    elif driver.live:
        _use(driver, driver.live[sorted(driver.live)[call.which % len(driver.live)]], call)


def _use(driver: KVDriver, request: DrivenRequest, call: KVCall) -> None:
    if call.kind == "free":
        driver.free(request)
    elif call.kind == "swap_out":
        driver.swap_out(request)
    elif call.kind == "compute":
        driver.compute(request, call.count)
    elif request.num_computed == request.num_tokens:
        request.append(call.tokens[0])
        driver.compute(request, 1)


def _call(kind: str, draw: Random) -> KVCall:
    # Two tokens and two beginnings: equal prefixes are common, and so are equal blocks after unequal ones.
    tokens = [draw.randint(0, 1)] * draw.choice([0, 4, 8, 16]) + draw.choices([0, 1], k=draw.randint(1, 6))
    return KVCall(
        kind,
        which=draw.randint(0, 99),
        count=draw.randint(1, 12),
        tokens=tuple(tokens),
        salt=draw.choice([None, None, "tenant"]),
        retention=draw.choice(RETENTION_LEVELS),
        skips=draw.random() < 0.5,
    )
