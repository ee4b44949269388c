"""/v1/models: what is served here, under each of its names; and the check of the name in a request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from fastapi import APIRouter, Path, Request, Response

from tokenyard.errors import UnknownModelError, did_you_mean
from tokenyard.sampling_checks import short
from tokenyard.server.json_answer import json_answer
from tokenyard.server.service import service_of

if TYPE_CHECKING:
    from tokenyard.server.service import Service

router = APIRouter()

OWNER = "tokenyard"


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One name of the served model, in OpenAI's shape and with vLLM's further fields. `created` is a Unix time."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = OWNER
    root: str
    parent: None = None
    max_model_len: int
    permission: tuple[()] = ()


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """Every name that a request may use."""

    object: str = "list"
    data: list[ModelCard]


def check_model(service: Service, name: str | None) -> str:
    """The name that stands in the answer: the one that was asked for, the first served one where none was.

    Raises UnknownModelError (404), with the served names, for any other.
    """
    names = service.model_names
    if name is None:
        return names[0]
    if name in names:
        return name
    raise UnknownModelError(
        f"the model {short(name)} is not served here{did_you_mean(name[:200], names)}; served: {', '.join(names)}",
        parameter="model",
        value=name,
    )


@router.get("/v1/models", summary="The served model, under each of its names")
async def list_models(http: Request) -> Response:
    """All names that a request may use, the first one first."""
    service = service_of(http)
    return json_answer(ModelList(data=[_card(service, name) for name in service.model_names]))


@router.get("/v1/models/{name:path}", summary="One name of the served model")
async def retrieve_model(http: Request, name: Annotated[str, Path(description="As /v1/models lists it.")]) -> Response:
    """404 for a name that /v1/models does not list."""
    service = service_of(http)
    return json_answer(_card(service, check_model(service, name)))


def _card(service: Service, name: str) -> ModelCard:
    model = service.engine.front.model_config
    return ModelCard(id=name, created=service.started_at, root=model.model, max_model_len=model.max_model_len)
