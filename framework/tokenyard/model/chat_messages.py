"""Chat messages as the OpenAI API has them -> what chat templates read: checked, and content always text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NoReturn, TypeAlias

from tokenyard.errors import UnsupportedError, ValidationError, did_you_mean
from tokenyard.sampling_checks import short

PlainValue: TypeAlias = "str | int | float | bool | list[PlainValue] | dict[str, PlainValue] | None"
Message: TypeAlias = dict[str, PlainValue]

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
PART_SEPARATOR = "\n"
MAX_DEPTH = 32  # of objects and lists in one another, in a message, a tool or a template variable
_MAX_BITS = 1024  # of a number
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")  # what clients call it; templates read the first
_KNOWN_PARTS = frozenset(
    {"image_url", "input_image", "image", "input_audio", "audio_url", "video_url", "file", "refusal"}
)


def normalise_messages(messages: Sequence[Mapping[str, object]]) -> list[Message]:
    """Copies in which `content` is text: parts are joined with a newline, null becomes the empty string.

    Other fields are kept, except those that are null; a message's reasoning is there under each name that templates
    use for it. The arguments of tool calls, which the OpenAI API has as JSON text, become the objects that templates
    read. ValidationError says which message does not hold and why.
    """
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise ValidationError(
            f"messages must be a list of messages, got {type(messages).__name__}", parameter="messages", value=messages
        )
    if not messages:
        raise ValidationError("messages is empty; at least one is needed", parameter="messages", value=messages)
    return [_normalise(message, f"messages[{index}]") for index, message in enumerate(messages)]


def plain_value(value: object, where: str, depth: int = 0) -> PlainValue:
    """`value` rebuilt of JSON types only, so that a template never sees an object with methods of its own."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # and not what a subclass would like it to be
    if isinstance(value, int) and int.bit_length(value) <= _MAX_BITS:
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if depth >= MAX_DEPTH:
        raise ValidationError(f"{where} is nested more than {MAX_DEPTH} deep", parameter=where, value=None)
    if isinstance(value, Mapping):
        return {str(key): plain_value(item, f"{where}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [plain_value(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)]
    kind = f"a number of more than {_MAX_BITS} bits" if isinstance(value, int) else f"of type {type(value).__name__}"
    raise ValidationError(f"{where} is {kind}; only JSON values are allowed", parameter=where, value=value)


def _normalise(message: Mapping[str, object], where: str) -> Message:
    if not isinstance(message, Mapping):
        raise ValidationError(
            f"{where} must be an object with role and content, got {type(message).__name__}",
            parameter=where,
            value=message,
        )
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        hint = did_you_mean(role, ROLES) if isinstance(role, str) else ""
        raise ValidationError(
            f"{where}.role is {short(role)}; allowed: {', '.join(ROLES)}{hint}", parameter=f"{where}.role", value=role
        )
    if role == "tool" and not isinstance(message.get("tool_call_id"), str):
        raise ValidationError(
            f"{where}: role 'tool' needs tool_call_id, the id of the call that it answers",
            parameter=f"{where}.tool_call_id",
            value=message.get("tool_call_id"),
        )
    if "content" not in message and role != "assistant":
        raise ValidationError(f"{where} has no content", parameter=f"{where}.content", value=None)
    fields = {
        str(key): plain_value(_readable(key, value, where), f"{where}.{key}")
        for key, value in message.items()
        if key != "content" and value is not None
    }
    reasoning = next((fields[name] for name in _REASONING_FIELDS if name in fields), None)
    if reasoning is not None:
        fields = {"thinking": reasoning, **fields, "reasoning_content": reasoning}
    return {"role": role, "content": _content_text(message.get("content"), f"{where}.content"), **fields}


def _readable(key: object, value: object, where: str) -> object:
    if key != "tool_calls" or isinstance(value, str | bytes) or not isinstance(value, Sequence):
        return value
    return [_with_arguments(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(value)]


def _with_arguments(call: object, where: str) -> object:
    function = call.get("function") if isinstance(call, Mapping) else None
    text = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(text, str):
        return call
    return {**call, "function": {**function, "arguments": _read_arguments(text, f"{where}.function.arguments")}}


def _read_arguments(text: str, where: str) -> object:
    try:
        found = json.loads(text or "{}", parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict):
        return found
    raise ValidationError(
        f'{where} must be the text of a JSON object, such as \'{{"city": "Oslo"}}\'', parameter=where, value=None
    )


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _content_text(content: object, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return str.__str__(content)
    if isinstance(content, Sequence) and not isinstance(content, bytes | bytearray):
        return PART_SEPARATOR.join(_part_text(part, f"{where}[{index}]") for index, part in enumerate(content))
    raise ValidationError(
        f"{where} must be text, a list of parts or null, got {type(content).__name__}", parameter=where, value=content
    )


def _part_text(part: object, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(text, str):
        return str.__str__(text)
    if isinstance(kind, str) and kind in _KNOWN_PARTS:
        raise UnsupportedError(
            f"{where}: content of type {kind!r} is not available in this version; allowed: text",
            parameter=where,
            value=kind,
        )
    raise ValidationError(
        f"{where} must be {{'type': 'text', 'text': ...}}, got type {kind!r:.100}", parameter=where, value=kind
    )
