"""Clients that always have requests in line, and what each was served."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from tokenyard.testing import EngineHarness

INPUT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0


@dataclass(frozen=True, kw_only=True)
class Client:
    """What a client asks: as often as it takes to have `depth` requests that have not ended."""

    prompt: Callable[[Random, int], Sequence[int]]  # of the client's request of this number
    output: Callable[[Random], tuple[int, int]]  # the limit that it gives, and where the output ends
    depth: int = 30


def fixed(prompt: int, output: int, depth: int = 30) -> Client:
    """Requests of one size that share nothing."""
    return Client(
        prompt=lambda draw, number: [draw.randrange(1, 1 << 20) for _ in range(prompt)],
        output=lambda draw: (output, output),
        depth=depth,
    )


def mixed(prompts: range, outputs: range, depth: int = 30) -> Client:
    """Requests of random sizes that share nothing."""

    def output(draw: Random) -> tuple[int, int]:
        length = draw.choice(outputs)
        return length, length

    return Client(
        prompt=lambda draw, number: [draw.randrange(1, 1 << 20) for _ in range(draw.choice(prompts))],
        output=output,
        depth=depth,
    )


@dataclass
class Served:
    """Service so far: `INPUT_WEIGHT` a prompt token, when it is admitted first, and `OUTPUT_WEIGHT` an output token."""

    total: dict[str, float]
    widest: float = 0.0  # the largest change of the difference between the first two clients over any interval
    order: list[str] = field(default_factory=list)  # clients, admission by admission
    _low: float = 0.0
    _high: float = 0.0

    def look(self) -> None:
        first, second = list(self.total.values())[:2]
        self._low, self._high = min(self._low, first - second), max(self._high, first - second)
        self.widest = self._high - self._low

    def share(self, client: str) -> float:
        return self.total[client] / sum(self.total.values())


def serve(engine: EngineHarness, clients: Mapping[str, Client], num_steps: int, seed: int = 0) -> Served:
    """Run so many steps with all clients backlogged; then end what is left."""
    draw = Random(seed)
    served = Served(dict.fromkeys(clients, 0.0))
    sizes: dict[str, int] = {}  # by request id, of those that were not admitted yet
    ends: dict[str, tuple[str, int]] = {}  # by request id: client, and output tokens that are left
    open_by_client: dict[str, set[str]] = {name: set() for name in clients}
    counts = dict.fromkeys(clients, 0)

    def sample(request_id: str) -> list[int]:
        return [engine.eos_token_id] if ends[request_id][1] == 1 else [1]

    for _ in range(num_steps):
        for name, client in clients.items():
            while len(open_by_client[name]) < client.depth:
                prompt, (limit, length) = client.prompt(draw, counts[name]), client.output(draw)
                counts[name] += 1
                request_id = engine.add(prompt, max_tokens=limit, client=name)
                sizes[request_id], ends[request_id] = len(prompt), (name, length)
                open_by_client[name].add(request_id)
        outputs = engine.step(sample)
        for admitted in outputs.admitted:
            size = sizes.pop(admitted.request_id, None)
            if size is not None:  # for the first time
                served.total[ends[admitted.request_id][0]] += INPUT_WEIGHT * size
                served.order.append(ends[admitted.request_id][0])
        for request_id, num_tokens in zip(outputs.request_ids, outputs.num_tokens.tolist(), strict=True):
            name, left = ends[request_id]
            ends[request_id] = name, left - num_tokens
            served.total[name] += OUTPUT_WEIGHT * num_tokens
        for end in outputs.finished:
            open_by_client[ends.pop(end.request_id)[0]].discard(end.request_id)
        served.look()
    engine.finish(list(ends))
    engine.run()
    engine.check_idle()
    return served
