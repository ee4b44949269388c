"""What a request asks of the engine, from its checked prompts to its outputs; ended when its client leaves."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tokenyard.errors import DeadlineError, RequestFailedError, UserError
from tokenyard.request import FinishReason
from tokenyard.runner_output import NO_TOKEN_LEFT
from tokenyard.server.disconnect import ClientDisconnectedError, departure, run_until

if TYPE_CHECKING:
    from starlette.requests import Request

    from tokenyard.engine.async_client import Submission
    from tokenyard.engine.input_processor import TokenizedPrompt
    from tokenyard.outputs import CompletionOutput, RequestOutput
    from tokenyard.request import SchedulingHints
    from tokenyard.sampling_params import SamplingParams
    from tokenyard.server.flow import Ticket
    from tokenyard.server.scheduling import Terms
    from tokenyard.server.service import Service

_GRACE = 5.0  # seconds after its deadline within which an engine that lives has ended a request
_MIN_DEADLINE = 1e-6  # seconds: hints have one that is above 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One HTTP request's work: prompts, each with n choices."""

    request_id: str  # as it is echoed and logged: made by the server, unique
    prompts: Sequence[TokenizedPrompt]
    params: Sequence[SamplingParams]  # one each; output_kind is DELTA for a stream and FINAL_ONLY otherwise
    terms: Terms  # of `terms_of`
    ticket: Ticket | None = None  # of FlowControl.prepare; without one, room is looked for when the call begins


async def complete(service: Service, http: Request, call: Call) -> list[RequestOutput]:
    """The finished outputs, in the order of the prompts, which all run at once.

    All requests are aborted as soon as the client disconnects: ClientDisconnectedError. Raises EngineOverloadedError
    before any work, ValidationError for one that is refused, EngineDeadError, RequestFailedError, and DeadlineError
    when its time is up. However it ends, nothing of it is left one step later.
    """
    async with departure(http.receive) as gone:
        outputs = await run_until(_complete(service, call), gone)
    if outputs is None:
        raise ClientDisconnectedError
    return outputs


async def stream(service: Service, call: Call) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Outputs as they come: (index of the prompt, delta). Closing it ends what has not ended.

    Raises as `complete` does; what came before the error was yielded before.
    """
    with _submitted(service, call) as submission:
        async for index, output in submission:
            if (error := _error_of(output)) is None:
                yield index, output
                continue
            if delivered := [_without_end(one) for one in output.outputs if one.token_ids]:
                yield index, replace(output, outputs=delivered, finished=False)
            raise error


async def _complete(service: Service, call: Call) -> list[RequestOutput]:
    outputs: dict[int, RequestOutput] = {}
    with _submitted(service, call) as submission:
        async for index, output in submission:
            if (error := _error_of(output)) is not None:
                raise error
            outputs[index] = output
    return [outputs[index] for index in range(len(call.prompts))]


@contextlib.contextmanager
def _submitted(service: Service, call: Call) -> Iterator[Submission]:
    """The call's requests, queued; at the end none of them is left."""
    num_requests = sum(params.n for params in call.params)
    num_tokens = sum(params.n * len(prompt.token_ids) for prompt, params in zip(call.prompts, call.params, strict=True))
    terms = call.terms
    with call.ticket or service.flow.admit(num_requests, num_tokens):
        hints = _hints_of(terms)
        submission = service.engine.submit(call.prompts, call.params, call.request_id, terms.priority, hints)
    try:
        with _backstop(submission, hints):
            yield submission
    finally:
        submission.close()


def _hints_of(terms: Terms) -> SchedulingHints | None:
    """The hints, with what is left of the time that the request had when it came."""
    hints = terms.hints
    if hints is None or hints.deadline is None:
        return hints
    return replace(hints, deadline=max(_MIN_DEADLINE, hints.deadline - (time.monotonic() - terms.since)))


@contextlib.contextmanager
def _backstop(submission: Submission, hints: SchedulingHints | None) -> Iterator[None]:
    """Deadlines are the engine's to keep; no client waits for one that hangs."""
    if hints is None or hints.deadline is None:
        yield
        return
    late = asyncio.get_running_loop().call_later(hints.deadline + _GRACE, submission.fail, _too_late())
    try:
        yield
    finally:
        late.cancel()


def _error_of(output: RequestOutput) -> Exception | None:
    """Why an output is not a part of an answer, if it is not."""
    for one in output.outputs:
        if one.finish_reason is None:
            continue
        if one.finish_reason == FinishReason.ERROR:
            if output.error is not None and output.error.startswith(NO_TOKEN_LEFT):
                return UserError(output.error)
            return RequestFailedError(output.error or "the engine could not go on with this request")
        if one.finish_reason == FinishReason.ABORT and one.stop_reason == "deadline":
            return _too_late()
    return None


def _too_late() -> DeadlineError:
    return DeadlineError("the request's time was up before its answer was whole: it was aborted; ask for less")


def _without_end(completion: CompletionOutput) -> CompletionOutput:
    return replace(completion, finish_reason=None, stop_reason=None)
