"""Requests of a workload as an engine takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenyard.errors import ValidationError
from tokenyard.request import EngineCoreRequest
from tokenyard.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tokenyard.experiments.arrivals import Arrived
    from tokenyard.experiments.prompts import PromptTokens
    from tokenyard.interfaces.workload import WorkloadRequest

_MOST_PARAMS = 4096  # output lengths whose parameters are kept


class RequestMaker:
    """`capacity` is the most tokens, prompt and output together, that a request may have."""

    def __init__(self, prompts: PromptTokens, capacity: int, *, has_content: bool) -> None:
        self._prompts = prompts
        self._capacity = capacity
        self._has_content = has_content
        self._params: dict[int, SamplingParams] = {}

    def make(self, arrived: Arrived) -> EngineCoreRequest:
        """Raises ValidationError for one that could not be served whole: results would tell of another workload.

        An oracle need not be told the output's length: nothing but its limit ends it.
        """
        request = arrived.request
        self._check(arrived)
        return EngineCoreRequest(
            request_id=arrived.request_id,
            prompt_token_ids=(
                self._prompts.unknown(request.num_prompt_tokens)
                if request.content is None or not self._has_content
                else self._prompts.of(request.content)
            ),
            params=self._params_of(request.num_output_tokens),
            arrival_time=arrived.arrival,
            priority=request.priority,
            client_id=request.client,
            session_id=request.session,
            deadline=None if request.deadline is None else arrived.arrival + request.deadline,
            skip_prefix_cache=request.content is None,
        )

    def _check(self, arrived: Arrived) -> None:
        request = arrived.request
        if request.num_prompt_tokens + request.num_output_tokens > self._capacity:
            raise ValidationError(
                _too_long(arrived.number, request, self._capacity), parameter="prompt", value=request.num_prompt_tokens
            )

    def _params_of(self, num_output_tokens: int) -> SamplingParams:
        params = self._params.get(num_output_tokens)
        if params is None:
            if len(self._params) >= _MOST_PARAMS:
                self._params.clear()
            params = SamplingParams(temperature=0.0, max_tokens=num_output_tokens, ignore_eos=True)
            self._params[num_output_tokens] = params
        return params


def _too_long(number: int, request: WorkloadRequest, capacity: int) -> str:
    return (
        f"request {number} of the workload has {request.num_prompt_tokens} prompt and {request.num_output_tokens} "
        f"output tokens, more than the {capacity} that one may have; raise model.max_model_len or kv_cache.num_blocks, "
        "or leave long requests out of the workload"
    )
