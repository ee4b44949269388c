"""`scheduler=scorpio`: who may enter, and who is refused, so that service levels are met."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenyard import PolicyDescriptor, hookimpl
from tokenyard.errors import ConfigError
from tokenyard.interfaces import AdmitDecision, SchedulingPolicy, StepLoad, service_alone
from tokenyard.request import ServiceLevel

if TYPE_CHECKING:
    from tokenyard.interfaces import PolicyContext, RequestView, SchedulerView


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorpioOptions:
    """Options of the policy, under `scheduler.policy`."""

    reject: bool = True  # what cannot meet its service level even alone; false = it is served all the same


class ScorpioPolicy(SchedulingPolicy):
    """After SCORPIO (arXiv 2505.23022): a guard for the time to the first token, and one for each token after it.

    The line is in order of `arrival + slo.ttft`; who cannot make it, or its `slo.tpot`, even alone is rejected. Others
    enter only if a step in which all decode stays within the tightest `slo.tpot`, and prefills get only the tokens that
    this leaves. Requests without a level come last. All take part in each step: the paper's credits are left out.
    """

    may_starve = True

    def __init__(self, options: ScorpioOptions, context: PolicyContext) -> None:
        if not context.has_latency:
            raise ConfigError("the policy scorpio needs the times of steps: set latency=linear or latency=constant")
        self._rejects, self._context, self._tightest = options.reject, context, math.inf
        self._num_known: int | None = None  # tokens of those that run, in this step, once somebody asks

    def waiting_key(self, request: RequestView, view: SchedulerView) -> float:
        return request.arrival_time + _seconds(request.service_level)[0]

    requeue_key = waiting_key

    def token_budget(self, view: SchedulerView) -> int | None:
        levels = {None, *(one.service_level for one in view.running)}
        self._tightest, self._num_known = min(_seconds(level)[1] for level in levels), None
        return None if self._tightest == math.inf else view.latency.budget_for(self._tightest)

    def max_running(self, view: SchedulerView) -> int | None:
        return None if self._is_kept(self._tightest, 0, view) else view.num_running

    def admit(self, request: RequestView, view: SchedulerView) -> AdmitDecision:
        ttft, tpot = _seconds(request.service_level)
        if self._rejects and not request.attained_service and min(ttft, tpot) < math.inf:
            alone, left = service_alone(request, view, self._context), request.arrival_time + ttft - view.now
            for what, takes, has in (("first token", alone.ttft, left), ("each token after it", alone.tpot, tpot)):
                if takes > has:
                    return AdmitDecision.reject(f"{what} takes {takes:.3g} s alone, and is due in {has:.3g} s")
        own, tightest = request.num_prompt_tokens + request.num_output_tokens, min(tpot, self._tightest)
        if view.num_running and not self._is_kept(tightest, own, view):
            return AdmitDecision.defer("with it a step would take longer than the tightest slo.tpot")
        self._tightest, self._num_known = tightest, None
        return AdmitDecision.accept()

    def _is_kept(self, tpot: float, num_more: int, view: SchedulerView) -> bool:
        """Whether a step takes at most `tpot` if all that run decode, and one more with so many tokens."""
        if self._num_known is None and tpot < math.inf:
            self._num_known = sum(one.num_prompt_tokens + one.num_output_tokens for one in view.running)
        load = StepLoad(view.num_running + 1, (self._num_known or 0) + num_more)
        return tpot == math.inf or view.latency.predict(load) <= tpot


def _seconds(level: ServiceLevel | None) -> tuple[float, float]:
    """`slo.ttft` and `slo.tpot`; inf = whenever."""
    ttft, tpot, _ = level or ServiceLevel()
    return math.inf if ttft is None else ttft, math.inf if tpot is None else tpot


@hookimpl
def tokenyard_policies() -> Iterator[PolicyDescriptor[ScorpioOptions]]:
    yield PolicyDescriptor(
        name="scorpio",
        api_version=(1, 7),
        summary="earliest first token due first; lets in, and gives prefills, only what keeps service levels",
        options_type=ScorpioOptions,
        factory=ScorpioPolicy,
    )
