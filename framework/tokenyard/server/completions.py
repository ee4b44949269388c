"""/v1/completions: prompts completed as they are."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from fastapi import APIRouter, Request, Response

from tokenyard.errors import ValidationError
from tokenyard.server import generation
from tokenyard.server.body import JsonRoute
from tokenyard.server.chunks import ChunkFrame, encode
from tokenyard.server.completion_choices import ChoiceOptions, CompletionChoice, PromptWriter, choice_options
from tokenyard.server.completion_stream import CompletionStream
from tokenyard.server.models import check_model
from tokenyard.server.prompts import GivenPrompt, Prompts, check_num_completions, prompt_from, read_prompts
from tokenyard.server.protocol.completions import DEFAULT_MAX_TOKENS, UNSUPPORTED, CompletionRequest
from tokenyard.server.protocol.sampling import check_num_choices, refuse_unsupported, sampling_params
from tokenyard.server.scheduling import terms_of
from tokenyard.server.service import request_id_of, service_of
from tokenyard.server.sse import EventStream
from tokenyard.server.usage import Usage, usage_of

if TYPE_CHECKING:
    from tokenyard.engine.input_processor import TokenizedPrompt
    from tokenyard.front_end import FrontEnd
    from tokenyard.model.tokenizer import Tokenizer
    from tokenyard.outputs import RequestOutput
    from tokenyard.sampling_params import SamplingParams
    from tokenyard.server.generation import Call
    from tokenyard.server.service import Service

OBJECT = "text_completion"

router = APIRouter(route_class=JsonRoute)


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer. `created` is a Unix time."""

    id: str
    object: str = OBJECT
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    service_tier: None = None
    system_fingerprint: None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Checked:
    """A request whose fields hold; its prompts have not been looked at."""

    prompts: Prompts
    params: SamplingParams  # of each prompt
    options: ChoiceOptions
    adds_special_tokens: bool

    @property
    def num_choices(self) -> int:
        """Over all prompts."""
        return len(self.prompts.given) * self.params.n

    @property
    def num_token_ids(self) -> int:
        """Prompt tokens that are known before tokenizing, each choice's own."""
        return self.prompts.num_token_ids * self.params.n


_ANSWERS: dict[int | str, dict[str, object]] = {
    200: {"description": "The choices", "content": {"application/json": {}, "text/event-stream": {}}}
}


@router.post("/v1/completions", responses=_ANSWERS, summary="Complete prompts as they are")
async def create_completion(http: Request, body: CompletionRequest) -> Response:
    """Choice i of prompt p has the index p * n + i; of a stream, events come in the order in which they are made."""
    service = service_of(http)
    model = check_model(service, body.model)
    asked = _check(service, body)
    call = await _prepared(service, http, body, asked)
    created, tokenizer = int(time.time()), service.engine.front.tokenizer
    if body.is_stream:
        frame = ChunkFrame(object_name=OBJECT, response_id=call.request_id, created=created, model=model)
        stream = CompletionStream(
            frame,
            call.prompts,
            tokenizer,
            asked.options,
            includes_usage=body.includes_usage,
            has_continuous_usage=body.has_continuous_usage,
        )
        return EventStream(_events(generation.stream(service, call), stream))
    outputs = await generation.complete(service, http, call)
    write = partial(_write, call, created, model, tokenizer, asked.options, outputs)
    answer = write() if asked.options.is_plain else await asyncio.to_thread(write)
    return Response(answer, media_type="application/json")


async def _prepared(service: Service, http: Request, body: CompletionRequest, asked: _Checked) -> Call:
    """The request's work, its prompts tokenized, with room for it."""
    terms = terms_of(service, http, body)
    tokenize = partial(_tokenize, service.engine.front, asked)
    prepared = await service.flow.prepare(terms, asked.num_choices, tokenize, asked.num_token_ids)
    return generation.Call(
        request_id=f"cmpl-{request_id_of(http)}",
        prompts=prepared.prompts,
        params=[asked.params] * len(prepared.prompts),
        terms=terms,
        ticket=prepared.ticket,
    )


async def _events(
    outputs: AsyncGenerator[tuple[int, RequestOutput], None], stream: CompletionStream
) -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(outputs):
        async for prompt_index, output in outputs:
            if output.prompt_logprobs is None:
                events = stream.events(prompt_index, output)
            else:  # of a whole prompt: too many to write them here, where all streams wait
                events = await asyncio.to_thread(stream.events, prompt_index, output)
            for event in events:
                yield event
    if (usage := stream.usage_event()) is not None:
        yield usage


def _check(service: Service, body: CompletionRequest) -> _Checked:
    """Everything that can be checked before a prompt is tokenized; ValidationError names the field."""
    server = service.config.server
    num_choices = check_num_choices(body.n, server.max_n)
    service.unknown_fields.note(refuse_unsupported(body, {**UNSUPPORTED, "best_of": (num_choices,)}))
    body.check_stream()
    if body.is_stream and body.prompt_logprobs is not None:
        raise ValidationError(
            "prompt_logprobs are not available in a stream; set stream=false, or take echo=true with logprobs",
            parameter="prompt_logprobs",
            value=body.prompt_logprobs,
        )
    prompts = read_prompts(body.prompt, server.max_prompts)
    check_num_completions(len(prompts.given), num_choices, server.max_prompts)
    params = sampling_params(
        body,
        service,
        max_tokens=body.max_tokens,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )
    adds_special_tokens = body.add_special_tokens is not False
    return _Checked(
        prompts=prompts, params=params, options=choice_options(body, params), adds_special_tokens=adds_special_tokens
    )


def _tokenize(front: FrontEnd, asked: _Checked) -> list[TokenizedPrompt]:
    options = {"add_special_tokens": asked.adds_special_tokens}
    prompts = asked.prompts.given
    with prompt_from("prompt"):
        if len(prompts) == 1:
            return [front.tokenize(prompts[0], options)]
        return [_tokenize_one(front, number, prompt, options) for number, prompt in enumerate(prompts)]


def _tokenize_one(front: FrontEnd, number: int, prompt: GivenPrompt, options: Mapping[str, object]) -> TokenizedPrompt:
    try:
        return front.tokenize(prompt, options)
    except ValidationError as error:
        message = f"prompt {number} (counted from 0): {error}"
        raise ValidationError(message, parameter=error.parameter, value=error.value) from error


def _write(
    call: Call,
    created: int,
    model: str,
    tokenizer: Tokenizer,
    options: ChoiceOptions,
    outputs: Sequence[RequestOutput],
) -> bytes:
    choices: list[CompletionChoice] = []
    for prompt, output in zip(call.prompts, outputs, strict=True):
        choices += PromptWriter(len(choices), prompt, tokenizer, options).take(output)
    return encode(
        Completion(id=call.request_id, created=created, model=model, choices=choices, usage=usage_of(outputs))
    )
