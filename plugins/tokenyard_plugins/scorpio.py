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
            need = "latency=linear or latency=constant with its times"
            raise ConfigError(f"scheduler=scorpio has to know how long a step takes: set {need}")
        self._rejects, self._context = options.reject, context
        self._load, self._tightest = StepLoad(1), math.inf  # of all that run, and of one more, if each decodes

    def waiting_key(self, request: RequestView, view: SchedulerView) -> float:
        return request.arrival_time + _seconds(request)[0]

    requeue_key = waiting_key

    def token_budget(self, view: SchedulerView) -> int | None:
        self._tightest = min((_seconds(one)[1] for one in view.running), default=math.inf)
        num_known = sum(one.num_prompt_tokens + one.num_output_tokens for one in view.running)
        self._load = StepLoad(view.num_running + 1, num_known)
        return None if self._tightest == math.inf else view.latency.budget_for(self._tightest)

    def max_running(self, view: SchedulerView) -> int | None:
        return None if self._is_kept(self._tightest, self._load, view) else view.num_running

    def admit(self, request: RequestView, view: SchedulerView) -> AdmitDecision:
        ttft, tpot = _seconds(request)
        if self._rejects and not request.attained_service and min(ttft, tpot) < math.inf:
            alone, left = service_alone(request, view, self._context), request.arrival_time + ttft - view.now
            for what, takes, has in (("first token", alone.ttft, left), ("each token after it", alone.tpot, tpot)):
                if takes > has:
                    return AdmitDecision.reject(f"{what} takes {takes:.3g} s alone, and is due in {has:.3g} s")
        num_known = self._load.num_decode_context_tokens + request.num_prompt_tokens + request.num_output_tokens
        load, tightest = self._load._replace(num_decode_context_tokens=num_known), min(tpot, self._tightest)
        if view.num_running and not self._is_kept(tightest, load, view):
            return AdmitDecision.defer("with it a step would take longer than the tightest slo.tpot")
        self._load, self._tightest = load._replace(num_decodes=load.num_decodes + 1), tightest
        return AdmitDecision.accept()

    def _is_kept(self, tpot: float, load: StepLoad, view: SchedulerView) -> bool:
        return tpot == math.inf or view.latency.predict(load) <= tpot


def _seconds(request: RequestView) -> tuple[float, float]:
    """`slo.ttft` and `slo.tpot`; inf = whenever."""
    ttft, tpot, _ = request.service_level or ServiceLevel()
    return math.inf if ttft is None else ttft, math.inf if tpot is None else tpot


@hookimpl
def tokenyard_policies() -> Iterator[PolicyDescriptor[ScorpioOptions]]:
    yield PolicyDescriptor(
        name="scorpio",
        api_version=(1, 6),
        summary="earliest first token due first; lets in, and gives prefills, only what keeps service levels",
        options_type=ScorpioOptions,
        factory=ScorpioPolicy,
    )
