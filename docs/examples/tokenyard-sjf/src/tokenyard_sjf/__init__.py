"""Shortest job first: the request with the least work is admitted first.

Work is the prompt plus a share of the longest allowed output; true output lengths are not known to a policy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tokenyard import PolicyDescriptor, hookimpl
from tokenyard.interfaces import PolicyContext, RequestView, SchedulerView, SchedulingPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class SJFOptions:
    """Options, set as `scheduler.policy.NAME=VALUE`."""

    output_weight: float = 1.0  # what one token of the allowed output counts, against 1 for one of the prompt
    ageing: float = 0.0  # tokens by which a request shrinks for each second that it came earlier: no one starves


class SJFPolicy(SchedulingPolicy):
    """A static key: it is computed once, so waiting costs nothing."""

    def __init__(self, options: SJFOptions) -> None:
        self._options = options
        self.may_starve = not options.ageing  # of a steady stream of short requests

    def waiting_key(self, request: RequestView, view: SchedulerView) -> float:
        work = request.num_prompt_tokens + self._options.output_weight * request.max_output_tokens
        # Everyone ages at the same rate, so the order is that of work + ageing * arrival and never changes.
        return work + self._options.ageing * request.arrival_time


def make_policy(options: SJFOptions, context: PolicyContext) -> SJFPolicy:
    """The descriptor's factory: called once, at launch, when the config chooses `scheduler=sjf`."""
    return SJFPolicy(options)


@hookimpl
def tokenyard_policies() -> Iterator[PolicyDescriptor[SJFOptions]]:
    """Found through the entry point group `tokenyard` of pyproject.toml."""
    yield PolicyDescriptor(
        name="sjf",
        api_version=(1, 6),
        summary="shortest job first, by prompt and allowed output, with optional ageing",
        options_type=SJFOptions,
        factory=make_policy,
    )
