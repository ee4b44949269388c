"""What a request asks of the engine, from its checked prompts to its outputs; ended when its client leaves."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.requests import Request

    from tokenyard.engine.input_processor import TokenizedPrompt
    from tokenyard.outputs import RequestOutput
    from tokenyard.request import SchedulingHints
    from tokenyard.sampling_params import SamplingParams
    from tokenyard.server.service import Service


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One HTTP request's work: prompts, each with n choices."""

    request_id: str  # as it is echoed and logged: made by the server, unique
    prompts: Sequence[TokenizedPrompt]
    params: Sequence[SamplingParams]  # one each; output_kind is DELTA for a stream and FINAL_ONLY otherwise
    priority: int = 0
    scheduling: SchedulingHints | None = None


async def complete(service: Service, http: Request, call: Call) -> list[RequestOutput]:
    """The finished outputs, in the order of the prompts.

    All requests are aborted as soon as the client disconnects. Raises EngineOverloadedError before any work,
    ValidationError for one that is refused, EngineDeadError, and DeadlineError when its time is up.
    """
    outputs: list[RequestOutput] = []
    for prompt, params in zip(call.prompts, call.params, strict=True):
        stream = service.engine.submit(prompt, params, call.request_id, call.priority, call.scheduling)
        outputs += [output async for output in stream]
    return outputs


async def stream(service: Service, call: Call) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Outputs as they come: (index of the prompt, delta). Closing it ends what has not ended."""
    for index, (prompt, params) in enumerate(zip(call.prompts, call.params, strict=True)):
        async for output in service.engine.submit(prompt, params, call.request_id, call.priority, call.scheduling):
            yield index, output
