"""What /openapi.json says of errors: FastAPI knows its own alone, and a 422 that never comes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from tokenyard.server.probes import PUBLIC_PATHS

if TYPE_CHECKING:
    from fastapi import FastAPI

Node = dict[str, object]

_ERROR = "ErrorBody"
_SCHEMA: Node = {
    "type": "object",
    "title": _ERROR,
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "code": {"type": "integer", "description": "The HTTP status."},
            },
        }
    },
}
_DESCRIPTIONS = {
    400: "Something in the request does not hold: `param` says what.",
    401: "The API key is missing or wrong.",
    403: "The Host header is none of the allowed ones.",
    404: "There is no such thing, or no such model.",
    408: "The body did not come in time.",
    413: "The body is too long.",
    415: "The body is not JSON, or its header does not say so.",
    500: "The server failed; its log says how, under the request's id.",
    503: "There is no engine yet, or any more, or it has too much to do: see Retry-After.",
    504: "The request's time was up.",
}
_OF_ALL, _OF_BODIES, _OF_MODELS = (400, 500), (404, 408, 413, 415, 503, 504), (404, 503)
_FASTAPIS_OWN = ("HTTPValidationError", "ValidationError")


def describe_api(app: FastAPI, *, needs_key: bool, checks_hosts: bool) -> None:
    """Make `app.openapi` tell the statuses that there are."""
    make = app.openapi

    def openapi() -> dict[str, object]:
        is_new = app.openapi_schema is None
        found = cast("Node", make())
        if is_new:
            _describe(found, needs_key=needs_key, checks_hosts=checks_hosts)
        return found

    app.openapi = openapi  # type: ignore[method-assign]


def _describe(api: Node, *, needs_key: bool, checks_hosts: bool) -> None:
    components = cast("Node", api.setdefault("components", {}))
    schemas = cast("Node", components.setdefault("schemas", {}))
    for name in _FASTAPIS_OWN:
        schemas.pop(name, None)
    schemas[_ERROR] = _SCHEMA
    if needs_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operation in _operations(api):
        statuses = [*_OF_ALL, *(_OF_BODIES if "requestBody" in operation else ())]
        if path.startswith("/v1/"):
            statuses += _OF_MODELS
        if path not in PUBLIC_PATHS:
            statuses += [401] * needs_key + [403] * checks_hosts
            if needs_key:
                operation["security"] = [{"key": []}]
        _add_errors(cast("Node", operation["responses"]), statuses)


def _operations(api: Node) -> Iterator[tuple[str, Node]]:
    for path, methods in cast("dict[str, dict[str, Node]]", api["paths"]).items():
        yield from ((path, operation) for operation in methods.values())


def _add_errors(responses: Node, statuses: list[int]) -> None:
    responses.pop("422", None)
    body = {"application/json": {"schema": {"$ref": f"#/components/schemas/{_ERROR}"}}}
    for status in sorted(statuses):
        response = cast("Node", responses.setdefault(str(status), {"description": _DESCRIPTIONS[status]}))
        response.setdefault("content", body)
