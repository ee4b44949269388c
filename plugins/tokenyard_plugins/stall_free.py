"""`scheduler=stall-free`: chunks of prompts as large as a step of the target time has room for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenyard import PolicyDescriptor, hookimpl
from tokenyard.errors import ConfigError
from tokenyard.interfaces import SchedulingPolicy

if TYPE_CHECKING:
    from tokenyard.interfaces import PolicyContext, RequestView, SchedulerView


@dataclass(frozen=True, slots=True, kw_only=True)
class StallFreeOptions:
    """Options of the policy, under `scheduler.policy`."""

    target_step_seconds: float = 0.1  # no step that has prefills in it is to take longer
    align: int = 1  # a chunk ends at a multiple of so many blocks, or the prompt, if it is as long; 0 = anywhere
    max_prefills: int | None = None  # prompts that are being computed at once; null = as many as fit

    def __post_init__(self) -> None:
        if not 0 < self.target_step_seconds < math.inf:  # also refuses NaN
            raise ValueError(
                f"target_step_seconds={self.target_step_seconds} is not valid: it must be a number of seconds above 0"
            )
        if self.align < 0:
            raise ValueError(f"align={self.align} is not valid: it must be a number of blocks, at least 0")
        if self.max_prefills is not None and self.max_prefills < 1:
            raise ValueError(f"max_prefills={self.max_prefills} is not valid: it must be at least 1, or null")


class StallFreePolicy(SchedulingPolicy):
    """Stall-free batching (Sarathi-Serve, Agrawal et al., OSDI 2024), with a budget from a time instead of a constant.

    All decodes run in each step; prefills get what is left of the tokens that a step of `target_step_seconds` has by
    the latency model. So no prompt, however long, makes those who are being answered wait longer for a token, as long
    as their decodes alone do not. Order and victims are those of fcfs.
    """

    def __init__(self, options: StallFreeOptions, context: PolicyContext) -> None:
        if not context.has_latency:
            raise ConfigError(
                "the policy stall-free has to know how long a step takes: set latency=linear or latency=constant with "
                "its times; a constant budget is scheduler.max_num_batched_tokens with any policy"
            )
        self._options = options

    def token_budget(self, view: SchedulerView) -> int:
        return view.latency.budget_for(self._options.target_step_seconds)

    def chunk_size(self, request: RequestView, num_left: int, view: SchedulerView) -> int:
        # One that waits has computed nothing, and starts behind what the cache saves.
        start = request.num_computed_tokens + request.num_in_flight_tokens or view.hit_tokens(request)
        unit = self._options.align * view.block_size
        is_last = start + num_left >= request.num_prompt_tokens + request.num_output_tokens
        return num_left if is_last or not 0 < unit <= num_left else (start + num_left) // unit * unit - start

    def max_running(self, view: SchedulerView) -> int | None:
        most = self._options.max_prefills
        return None if most is None else view.num_running + max(0, most - len(view.prefills))


@hookimpl
def tokenyard_policies() -> Iterator[PolicyDescriptor[StallFreeOptions]]:
    yield PolicyDescriptor(
        name="stall-free",
        api_version=(1, 7),
        summary="first come, first served; prompts in chunks that keep each step below a target time",
        options_type=StallFreeOptions,
        factory=StallFreePolicy,
    )
