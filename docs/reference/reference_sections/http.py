"""The server's routes, and the fields of their bodies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from tokenyard.config import EngineConfig
from tokenyard.server.app import create_app
from tokenyard.server.probes import PUBLIC_PATHS
from tokenyard.server.protocol import chat, completions, sampling, tokens
from tokenyard.server.service import Service

from reference_sections.markdown import code, table, word_list

if TYPE_CHECKING:
    from pydantic import BaseModel


def endpoints() -> str:
    """Every route with the statuses that it answers with."""
    paths = create_app(Service(config=EngineConfig())).openapi()["paths"]
    return table(("route", "answers", "key", "statuses"), _routes(paths))


def sampling_fields() -> str:
    """What both generating endpoints take."""
    return _fields(sampling.SamplingFields)


def completion_fields() -> str:
    """What /v1/completions takes beyond that."""
    return _fields(completions.CompletionRequest, beyond=sampling.SamplingFields)


def chat_fields() -> str:
    """What /v1/chat/completions takes beyond that."""
    return _fields(chat.ChatRequest, beyond=sampling.SamplingFields)


def token_fields() -> str:
    """What /tokenize and /detokenize take."""
    return f"`/tokenize`:\n\n{_fields(tokens.TokenizeRequest)}\n\n`/detokenize`:\n\n{_fields(tokens.DetokenizeRequest)}"


def refused_fields() -> str:
    """Fields that are known and not available."""
    return word_list(sorted({*sampling.UNSUPPORTED, *chat.UNSUPPORTED}))


def _routes(paths: Mapping[str, Mapping[str, Mapping[str, object]]]) -> Iterator[tuple[str, ...]]:
    for path, methods in paths.items():
        for method, operation in methods.items():
            key = "no" if path in PUBLIC_PATHS else "yes"
            responses = operation["responses"]
            statuses = ", ".join(sorted(responses)) if isinstance(responses, Mapping) else ""
            yield code(f"{method.upper()} {path}"), str(operation.get("summary", "")), key, statuses


def _fields(model: type[BaseModel], beyond: type[BaseModel] | None = None) -> str:
    known = {} if beyond is None else beyond.model_fields
    schema = model.model_json_schema()["properties"]
    rows = [
        (code(name), _type(schema[name]), schema[name].get("description", "")) for name in schema if name not in known
    ]
    return table(("field", "takes", "meaning"), rows)


def _type(schema: Mapping[str, object]) -> str:
    """A JSON schema in words, without null, which every field may be that need not be given."""
    options = schema.get("anyOf")
    if isinstance(options, list):
        return " or ".join(dict.fromkeys(_type(option) for option in options if option.get("type") != "null"))
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return ", ".join(code(str(value)) for value in values) if isinstance(values, list) else ""
    kind = str(schema.get("type", "any"))
    items = schema.get("items")
    inner = f" of {_type(items)}" if isinstance(items, Mapping) and items else ""
    return f"{kind}{inner}{_bounds(schema)}"


def _bounds(schema: Mapping[str, object]) -> str:
    names = (
        ("minimum", "from {}"),
        ("exclusiveMinimum", "above {}"),
        ("maximum", "to {}"),
        ("exclusiveMaximum", "below {}"),
        ("minLength", "at least {} characters"),
        ("maxLength", "at most {} characters"),
        ("minItems", "at least {}"),
        ("maxItems", "at most {}"),
    )
    found = [words.format(_number(schema[name])) for name, words in names if name in schema]
    return f" ({', '.join(found)})" if found else ""


def _number(value: object) -> str:
    return f"{value:.10g}" if isinstance(value, float) else str(value)
