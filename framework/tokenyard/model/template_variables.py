"""What a caller may hand to a chat template beside the messages: `chat_template_kwargs` and `tools`, checked."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence

from tokenyard.errors import ValidationError, did_you_mean
from tokenyard.model.chat_messages import PlainValue, plain_value

# Names that callers set for any model, though many templates do not read them.
COMMON_NAMES = frozenset(
    {"enable_thinking", "thinking", "thinking_budget", "reasoning_effort", "documents", "date_string"}
)
ENGINE_NAMES = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"}
    | {"raise_exception", "strftime_now", "namespace", "range", "dict", "self"}
    | {"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"}
)
_LONG_NAMES = frozenset({"documents", "custom_tools", "xml_tools", "python_tools", "builtin_tools"})
MAX_VALUE = 4 * 2**10  # characters of a variable as JSON
MAX_LONG_VALUE = 2**20  # of documents and tools
MAX_TOOLS = 128


def check_template_kwargs(given: Mapping[str, object] | None, used: Collection[str]) -> dict[str, PlainValue]:
    """`chat_template_kwargs` as JSON values; ValidationError for what the template does not read, or is not to be told.

    `used` are the variables that the template reads.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise ValidationError(
            f"chat_template_kwargs is a dict of names in the chat template; got {type(given).__name__}",
            parameter="chat_template_kwargs",
            value=given,
        )
    allowed = (COMMON_NAMES | set(used)) - ENGINE_NAMES
    for name in given:
        _check_name(name, allowed)
    return {name: _sized(value, f"chat_template_kwargs.{name}", _limit_of(name)) for name, value in given.items()}


def check_tools(given: Sequence[Mapping[str, object]] | None, used: Collection[str]) -> PlainValue:
    """`tools` as JSON values, None for none; ValidationError when the template has no place for them."""
    if given is None:
        return None
    if isinstance(given, str | bytes) or not isinstance(given, Sequence):
        raise ValidationError(f"tools is a list of objects; got {type(given).__name__}", parameter="tools", value=given)
    if len(given) > MAX_TOOLS:
        raise ValidationError(
            f"{len(given)} tools are given; at most {MAX_TOOLS} are allowed", parameter="tools", value=len(given)
        )
    for index, tool in enumerate(given):
        if not isinstance(tool, Mapping):
            raise ValidationError(
                f"tools[{index}] must be an object as {{'type': 'function', 'function': {{...}}}}, got "
                f"{type(tool).__name__}",
                parameter=f"tools[{index}]",
                value=tool,
            )
    if given and "tools" not in used:
        raise ValidationError(
            "this model's chat template has no place for tools; leave them out, or give a chat_template that has",
            parameter="tools",
            value=len(given),
        )
    return _sized(list(given), "tools", MAX_LONG_VALUE) if given else None


def _check_name(name: str, allowed: Collection[str]) -> None:
    if name in ENGINE_NAMES:
        raise ValidationError(
            f"chat template variable {name!r} is set by the engine and cannot be given in chat_template_kwargs",
            parameter="chat_template_kwargs",
            value=name,
        )
    if name not in allowed:
        own = sorted(set(allowed) - COMMON_NAMES)
        raise ValidationError(
            f"chat_template_kwargs has {name!r}, which this model's chat template does not use; it uses "
            f"{', '.join(own[:20]) or 'no variables of its own'}{did_you_mean(name, allowed)}",
            parameter="chat_template_kwargs",
            value=name,
        )


def _limit_of(name: str) -> int:
    return MAX_LONG_VALUE if name in _LONG_NAMES else MAX_VALUE


def _sized(value: object, where: str, limit: int) -> PlainValue:
    plain = plain_value(value, where)
    size = len(json.dumps(plain, ensure_ascii=False))
    if size > limit:
        raise ValidationError(
            f"{where} has {size} characters as JSON; at most {limit} are allowed", parameter=where, value=None
        )
    return plain
