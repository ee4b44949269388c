"""What came back of log probabilities, by prompt, and whether it can be right."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from tokenyard.testing.contracts.base import expect

if TYPE_CHECKING:
    from tokenyard.engine_outputs import EngineCoreOutputs
    from tokenyard.runner_output import Logprobs

_TOLERANCE = 1e-3  # of logarithms in float32, between batches of other shapes


class Position(NamedTuple):
    """One position's log probabilities, without padding."""

    token_ids: tuple[int, ...]  # its own, then the most likely ones
    logprobs: tuple[float, ...]
    rank: int


@dataclass(slots=True)
class ReceivedLogprobs:
    """By the name of a prompt."""

    sampled: dict[str, dict[int, Position]] = field(default_factory=dict)  # name -> index of the output token
    of_prompt: dict[str, dict[int, Position]] = field(default_factory=dict)  # name -> position
    _num_tokens: dict[str, int] = field(default_factory=dict)

    def take(self, outputs: EngineCoreOutputs, names: Mapping[str, str]) -> None:
        """What one step told; `names` are those of the requests' prompts."""
        for chunk in outputs.prompt_logprobs:
            known = self.of_prompt.setdefault(names[chunk.request_id], {})
            known |= dict(enumerate(positions_of(chunk.logprobs), chunk.start))
        found = {} if outputs.logprobs is None else _by_row(outputs.logprobs)
        place = 0
        for request_id, count in zip(outputs.request_ids, outputs.num_tokens.tolist(), strict=True):
            name = names[request_id]
            start = self._num_tokens.get(name, 0)
            self._num_tokens[name] = start + count
            own = {start + index: found.pop(place + index) for index in range(count) if place + index in found}
            self.sampled.setdefault(name, {}).update(own)
            place += count
        expect(not found, "executor.logprobs", f"log probabilities of tokens {list(found)} of {place}")


def positions_of(logprobs: Logprobs) -> list[Position]:
    """Row by row."""
    return [
        Position(tuple(ids[ids >= 0].tolist()), tuple(values[ids >= 0].tolist()), int(rank))
        for ids, values, rank in zip(logprobs.token_ids, logprobs.logprobs, logprobs.sampled_ranks, strict=True)
    ]


def check_logprobs(found: ReceivedLogprobs, name: str, tokens: Sequence[int], count: int | None) -> None:
    """`executor.logprobs` of the greedy tokens of one prompt."""
    positions = found.sampled.get(name, {})
    if count is None:
        expect(not positions, "executor.logprobs", f"{len(positions)} positions of a request that did not ask")
        return
    expect(
        list(positions) == list(range(len(tokens))), "executor.logprobs", f"of {len(tokens)} tokens: {list(positions)}"
    )
    for token_id, position in zip(tokens, positions.values(), strict=True):
        _check_position(position, token_id, count, "executor.logprobs")
        expect(position.rank == 1, "executor.logprobs", f"the greedy token {token_id} has rank {position.rank}")


def check_prompt_logprobs(whole: ReceivedLogprobs, chunked: ReceivedLogprobs, name: str, prompt: Sequence[int]) -> None:
    """`executor.prompt_logprobs` of one prompt, computed in one step and in several."""
    rule = "executor.prompt_logprobs"
    for found in (whole, chunked):
        places = sorted(found.of_prompt.get(name, {}))
        expect(places == list(range(1, len(prompt))), rule, f"of a prompt of {len(prompt)} tokens: {places}")
    for place in range(1, len(prompt)):
        one, other = whole.of_prompt[name][place], chunked.of_prompt[name][place]
        _check_position(one, prompt[place], 2, rule)
        _check_position(other, prompt[place], 2, rule)
        same = all(
            math.isclose(a, b, rel_tol=0, abs_tol=_TOLERANCE) for a, b in zip(one.logprobs, other.logprobs, strict=True)
        )
        expect(same, rule, f"position {place} has {one} in one step and {other} in chunks")


def _check_position(position: Position, token_id: int, count: int, rule: str) -> None:
    own, top = position.logprobs[0], position.logprobs[1:]
    expect(position.token_ids[0] == token_id, rule, f"{position} is said to be of token {token_id}")
    expect(len(top) == count, rule, f"{len(top)} most likely tokens instead of {count}: {position}")
    expect(all(map(math.isfinite, position.logprobs)), rule, f"not finite: {position}")
    expect(list(top) == sorted(top, reverse=True), rule, f"the most likely one is not first: {position}")
    expect(max(position.logprobs) <= _TOLERANCE, rule, f"a probability above 1: {position}")
    if position.rank <= count:
        expect(abs(top[position.rank - 1] - own) <= _TOLERANCE, rule, f"another logprob at its rank: {position}")


def _by_row(logprobs: Logprobs) -> dict[int, Position]:
    return dict(zip(logprobs.rows.tolist(), positions_of(logprobs), strict=True))
