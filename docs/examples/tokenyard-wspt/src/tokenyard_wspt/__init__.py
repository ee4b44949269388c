"""Weighted shortest processing time: the request with the least work for its weight is admitted first.

Among jobs that are all there, one machine finishes the least sum of weighted completion times in this order (W. E.
Smith, "Various optimizers for single-stage production", 1956). Work is the prompt and the output that the configured
predictor expects; the weight is what the client says the request is worth.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from tokenyard import PolicyDescriptor, hookimpl
from tokenyard.errors import ConfigError
from tokenyard.interfaces import PolicyContext, RequestView, SchedulerView, SchedulingPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class WSPTOptions:
    """Options, set as `scheduler.policy.NAME=VALUE`."""

    ageing: float = 0.0  # tokens of work for a weight of 1 that each second of waiting is worth: no one starves


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """What a client may say of a request: keys of its scheduling hints."""

    weight: float = 1.0  # twice the weight may have twice the work and still go first

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf:
            raise ValueError(f"weight must be a number above 0, got {self.weight}")


class WSPTPolicy(SchedulingPolicy):
    """A static key: it is computed once, so waiting costs nothing."""

    def __init__(self, options: WSPTOptions) -> None:
        self._ageing = options.ageing
        self.may_starve = not options.ageing  # of a steady stream of short or heavy requests

    def waiting_key(self, request: RequestView, view: SchedulerView) -> float:
        work = request.num_prompt_tokens + view.predictor.output_len(request)
        # Everyone ages at the same rate, so the order is that of ratio + ageing * arrival and never changes.
        return work / _weight(request) + self._ageing * request.arrival_time


def _weight(request: RequestView) -> float:
    """What its hints say; a request that no front end made may have none."""
    weight = request.metadata.get("weight")
    return weight if isinstance(weight, int | float) else Worth().weight


def make_policy(options: WSPTOptions, context: PolicyContext) -> WSPTPolicy:
    """The descriptor's factory: called once, at launch, when the config chooses `scheduler=wspt`."""
    if not 0 <= options.ageing < math.inf:
        raise ConfigError(
            f"scheduler.policy.ageing={options.ageing} is not valid: it must be a number of at least 0; 0 = no ageing"
        )
    return WSPTPolicy(options)


@hookimpl
def tokenyard_policies() -> Iterator[PolicyDescriptor[WSPTOptions]]:
    """Found through the entry point group `tokenyard` of pyproject.toml."""
    yield PolicyDescriptor(
        name="wspt",
        api_version=(1, 7),
        summary="least work for its weight first, by any output-length predictor, with optional ageing",
        options_type=WSPTOptions,
        metadata_type=Worth,
        factory=make_policy,
    )


@hookimpl
def tokenyard_config_paths() -> Iterator[str]:
    """The YAML files of this package join the config groups."""
    yield "pkg://tokenyard_wspt.configs"
