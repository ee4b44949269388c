"""/v1/chat/completions: conversations, through the model's chat template."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response

from tokenyard.server import generation
from tokenyard.server.body import JsonRoute
from tokenyard.server.chat_answer import AnswerOptions, chat_completion, system_fingerprint
from tokenyard.server.chat_prompt import answer_role, echoed_text, tokenize_chat
from tokenyard.server.chat_stream import ChatStream
from tokenyard.server.models import check_model
from tokenyard.server.protocol.chat import UNSUPPORTED, ChatRequest
from tokenyard.server.protocol.sampling import refuse_unsupported, sampling_params
from tokenyard.server.scheduling import terms_of
from tokenyard.server.service import request_id_of, service_of
from tokenyard.server.sse import EventStream
from tokenyard.vocabulary_checks import NO_LIMIT

if TYPE_CHECKING:
    from tokenyard.server.generation import Call
    from tokenyard.server.service import Service

router = APIRouter(route_class=JsonRoute)

_ANSWERS: dict[int | str, dict[str, object]] = {
    200: {"description": "The answer", "content": {"application/json": {}, "text/event-stream": {}}}
}


@router.post("/v1/chat/completions", responses=_ANSWERS, summary="Go on with a conversation")
async def create_chat_completion(http: Request, body: ChatRequest) -> Response:
    """The model's answer to the messages: whole, or with `stream` as server-sent events."""
    service = service_of(http)
    model = check_model(service, body.model)
    body.check()
    service.unknown_fields.note(refuse_unsupported(body, UNSUPPORTED))
    num_top_logprobs = body.num_top_logprobs(_most_logprobs(service))
    call = await _prepared(service, http, body, num_top_logprobs)
    role = answer_role(service, body)
    options = AnswerOptions(
        response_id=call.request_id,
        model=model,
        fingerprint=system_fingerprint(service.config),
        role=role,
        prefix=echoed_text(body, role),
        num_top_logprobs=num_top_logprobs,
        names_tokens_by_id=bool(body.return_tokens_as_token_ids),
        includes_token_ids=bool(body.return_token_ids),
        includes_usage=body.includes_usage,
        has_continuous_usage=body.has_continuous_usage,
        service_tier=None if body.service_tier is None else "default",
    )
    if body.is_stream:
        stream = ChatStream(options, call.prompts[0], call.params[0].n)
        return EventStream(stream.events(generation.stream(service, call)))
    (output,) = await generation.complete(service, http, call)
    if num_top_logprobs is None and output.prompt_logprobs is None:
        answer = chat_completion(options, output)
    else:  # there may be many: not here, where all streams wait
        answer = await asyncio.to_thread(chat_completion, options, output)
    return Response(answer, media_type="application/json")


async def _prepared(service: Service, http: Request, body: ChatRequest, num_top_logprobs: int | None) -> Call:
    """The request's work, checked, with room for it."""
    terms = terms_of(service, http, body)
    params = sampling_params(
        body, service, max_tokens=body.most_tokens(), default_max_tokens=None, logprobs=num_top_logprobs
    )
    prepared = await service.flow.prepare(terms, params.n, lambda: [tokenize_chat(service, body)])
    return generation.Call(
        request_id=f"chatcmpl-{request_id_of(http)}",
        prompts=prepared.prompts,
        params=[params],
        terms=terms,
        ticket=prepared.ticket,
    )


def _most_logprobs(service: Service) -> int:
    most = service.config.model.max_logprobs
    return service.engine.front.model_config.vocab_size if most == NO_LIMIT else most
