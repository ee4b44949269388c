"""/tokenize and /detokenize: from text and conversations to token ids, and back."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
from fastapi import APIRouter, Request, Response

from tokenyard.sampling_checks import invalid, is_int
from tokenyard.server.body import JsonRoute
from tokenyard.server.chat_prompt import chat_options
from tokenyard.server.json_answer import json_answer
from tokenyard.server.models import check_model
from tokenyard.server.prompts import prompt_from
from tokenyard.server.protocol.sampling import refuse_unsupported
from tokenyard.server.protocol.tokens import (  # FastAPI reads the annotations when it runs
    DetokenizeRequest,  # noqa: TC001
    TokenizeRequest,  # noqa: TC001
)
from tokenyard.server.service import service_of
from tokenyard.vocabulary_checks import check_ids

if TYPE_CHECKING:
    from tokenyard.front_end import FrontEnd
    from tokenyard.server.service import Service

router = APIRouter(route_class=JsonRoute)


class Tokenized(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids, how many there are, and how many of prompt and output the model takes."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None  # as the vocabulary spells them


class Detokenized(msgspec.Struct, frozen=True, kw_only=True):
    """Text."""

    prompt: str


@router.post("/tokenize", summary="Token ids of a text or a conversation")
async def tokenize(http: Request, body: TokenizeRequest) -> Response:
    """The ids that the completion of this prompt, or the answer to this conversation, would begin with."""
    service = service_of(http)
    check_model(service, body.model)
    service.unknown_fields.note(refuse_unsupported(body))
    body.check()
    return json_answer(await asyncio.to_thread(_tokenized, service, body))


@router.post("/detokenize", summary="The text of token ids")
async def detokenize(http: Request, body: DetokenizeRequest) -> Response:
    """Control tokens are written by their names, unless they are to be skipped."""
    service = service_of(http)
    check_model(service, body.model)
    service.unknown_fields.note(refuse_unsupported(body))
    return json_answer(await asyncio.to_thread(_detokenized, service.engine.front, body))


def _tokenized(service: Service, body: TokenizeRequest) -> Tokenized:
    front = service.engine.front
    with prompt_from("messages" if body.prompt is None else "prompt"):
        ids = _ids(service, body)
    return Tokenized(
        count=len(ids),
        max_model_len=front.model_config.max_model_len,
        tokens=ids,
        token_strs=list(map(front.tokenizer.id_to_token, ids)) if body.return_token_strs else None,
    )


def _ids(service: Service, body: TokenizeRequest) -> list[int]:
    tokenizer, max_tokens = service.engine.front.tokenizer, service.engine.front.inputs.max_prompt_tokens
    if body.prompt is not None:
        adds_special_tokens = body.add_special_tokens is not False
        return tokenizer.encode(body.prompt, add_special_tokens=adds_special_tokens, max_tokens=max_tokens)
    continues = bool(body.continue_final_message)
    adds = body.add_generation_prompt if body.add_generation_prompt is not None else not continues
    options = chat_options(
        service,
        add_generation_prompt=adds,
        continue_final_message=continues,
        chat_template=body.chat_template,
        tools=body.tools or None,
        variables=body.chat_template_kwargs,
    )
    return tokenizer.encode_chat(
        body.messages or [],
        add_generation_prompt=options.add_generation_prompt,
        continue_final_message=options.continue_final_message,
        chat_template=options.chat_template,
        tools=options.tools,
        chat_template_kwargs=options.chat_template_kwargs,
        max_tokens=max_tokens,
    )


def _detokenized(front: FrontEnd, body: DetokenizeRequest) -> Detokenized:
    ids = body.tokens
    if not isinstance(ids, list) or not all(map(is_int, ids)):
        raise invalid("tokens", ids, "a list of token ids, which are integers")
    # A model may have embeddings beyond its tokenizer's, which have no text, or fewer.
    check_ids("tokens", "token id", ids, max(front.tokenizer.vocab_size, front.model_config.vocab_size))
    return Detokenized(prompt=front.tokenizer.decode(ids, skip_special_tokens=bool(body.skip_special_tokens)))
