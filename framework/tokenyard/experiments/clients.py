"""`workload.clients`: clients for the requests of a workload that names none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from tokenyard.errors import ConfigError, did_you_mean
from tokenyard.interfaces.workload import Workload, WorkloadRequest

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_CLIENTS = 1_000_000
MAX_ZIPF = 100.0
_MAX_SEED = 2**63
_CHUNK = 1024  # draws at a time
_STREAM = 0x636C69656E7473  # what sets these draws apart from others of the same seed


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientMix:
    """Clients `client-0`, `client-1`, ...: client k is drawn in proportion to 1 / (k + 1) ** zipf."""

    number: int
    zipf: float  # 0 = each as often
    seed: int

    def names(self) -> list[str]:
        return [f"client-{number}" for number in range(self.number)]

    def cumulative(self) -> NDArray[np.float64]:
        """[number] up to 1"""
        weights = np.arange(1, self.number + 1, dtype=np.float64) ** -self.zipf
        cumulative: NDArray[np.float64] = np.cumsum(weights) / weights.sum()
        return cumulative


def read_client_mix(value: int | Mapping[str, object] | None, seed: int) -> ClientMix | None:
    """`workload.clients` as it is configured; its own seed is `seed` unless it names one. Raises ConfigError."""
    if value is None:
        return None
    given: Mapping[str, object] = value if isinstance(value, Mapping) else {"number": value}
    names = [field.name for field in fields(ClientMix)]
    for name in given:
        if name not in names:
            raise ConfigError(
                f"unknown key 'workload.clients.{name}'{did_you_mean(name, names)}; keys of workload.clients: "
                f"{', '.join(names)}"
            )
    key = "workload.clients.number" if isinstance(value, Mapping) else "workload.clients"
    return ClientMix(
        number=_whole(key, given.get("number"), 1, MAX_CLIENTS),
        zipf=_zipf(given.get("zipf", 0.0)),
        seed=_whole("workload.clients.seed", seed if given.get("seed") is None else given["seed"], 0, _MAX_SEED - 1),
    )


def _whole(key: str, value: object, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ConfigError(f"{key} must be a whole number from {least} to {most}, got {value!r}")
    return value


def _zipf(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_ZIPF:
        raise ConfigError(f"workload.clients.zipf must be a number from 0 to {MAX_ZIPF:g}, got {value!r}")
    return float(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Assigned(WorkloadRequest):
    """A request with its client, and the workload's own object, which that knows again."""

    original: WorkloadRequest


class AssignedClients(Workload):
    """Another workload, whose requests have clients: those that name one keep it, those of a session share one.

    The draw for a request depends on the seed and its place in the workload alone; a follow-up has the client of the
    request that it follows.
    """

    def __init__(self, workload: Workload, mix: ClientMix) -> None:
        self._workload = workload
        self._mix = mix
        self._names = mix.names()
        self._cumulative = mix.cumulative()

    def requests(self) -> Iterator[WorkloadRequest]:
        for request, place in zip(self._workload.requests(), self._draws(), strict=False):
            yield self._assigned(request, self._names[self._place_of(request, place)])

    def follow_ups(self, request: WorkloadRequest, end: float) -> Sequence[WorkloadRequest]:
        if not isinstance(request, _Assigned):
            return self._workload.follow_ups(request, end)
        follow_ups = self._workload.follow_ups(request.original, end)
        return [self._assigned(follow_up, request.client) for follow_up in follow_ups]

    @property
    def has_content(self) -> bool:
        return self._workload.has_content

    @property
    def description(self) -> str:
        mix = self._mix
        clients = f"{mix.number} clients assigned, Zipf exponent {mix.zipf:g}, seed {mix.seed}"
        return "; ".join(part for part in (self._workload.description, clients) if part)

    def _draws(self) -> Iterator[int]:
        """A place among the clients for each request; drawn also for those that do not need it."""
        random = np.random.default_rng((_STREAM, self._mix.seed))
        while True:
            yield from np.searchsorted(self._cumulative, random.random(_CHUNK), side="right").tolist()

    def _place_of(self, request: WorkloadRequest, drawn: int) -> int:
        if request.session is None:
            return min(drawn, self._mix.number - 1)
        text = f"{self._mix.seed}/{request.session}".encode(errors="surrogatepass")
        share = int.from_bytes(blake2b(text, digest_size=8).digest(), "big") / 2**64
        return min(int(np.searchsorted(self._cumulative, share, side="right")), self._mix.number - 1)

    def _assigned(self, request: WorkloadRequest, client: str | None) -> WorkloadRequest:
        return _Assigned(
            arrival=request.arrival,
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=request.num_output_tokens,
            client=client if request.client is None else request.client,
            session=request.session,
            priority=request.priority,
            deadline=request.deadline,
            content=request.content,
            original=request,
        )


def with_clients(workload: Workload, clients: int | Mapping[str, object] | None, seed: int) -> Workload:
    """`workload` with clients as `workload.clients` asks for; itself where it asks for none. Raises ConfigError."""
    mix = read_client_mix(clients, seed)
    return workload if mix is None else AssignedClients(workload, mix)
