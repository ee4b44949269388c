"""service_alone: how well a request could be served at best."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tokenyard.interfaces.latency import StepLoad

if TYPE_CHECKING:
    from tokenyard.interfaces.policy import PolicyContext, RequestView, SchedulerView


class ServiceAlone(NamedTuple):
    """Seconds from now on."""

    ttft: float  # to the first token
    tpot: float  # from one token to the next
    e2e: float  # to the last token


def service_alone(request: RequestView, view: SchedulerView, limits: PolicyContext) -> ServiceAlone:
    """What a request that has not run would get if nothing else ran from now on (since API 1.6).

    By the latency model, the prefix cache and, for the length of the output, the predictor; contexts are taken as they
    are at the start of the output, so what a longer one costs comes on top. `limits` are what the policy's factory was
    given. Raises PluginError without a latency model.
    """
    ttft = _prefill_seconds(request.num_prompt_tokens, view.hit_tokens(request), view, limits)
    tpot = view.latency.predict(StepLoad(num_decodes=1, num_decode_context_tokens=request.num_prompt_tokens))
    return ServiceAlone(ttft, tpot, ttft + tpot * (view.predictor.output_len(request) - 1))


def _prefill_seconds(num_tokens: int, num_computed: int, view: SchedulerView, limits: PolicyContext) -> float:
    """Of all tokens but those computed already, in chunks as large as they can be."""
    largest, seconds = min(limits.max_chunk_tokens or num_tokens, limits.max_num_batched_tokens), 0.0
    while num_computed < num_tokens:
        count = min(largest, num_tokens - num_computed)
        load = StepLoad(num_prefills=1, num_prefill_tokens=count, num_prefill_context_tokens=num_computed)
        seconds += view.latency.predict(load)
        num_computed += count
    return seconds
