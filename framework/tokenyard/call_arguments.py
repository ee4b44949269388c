"""Arguments of `generate` and `chat` as users give them: one for all prompts, or one each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeVar, cast

from tokenyard.errors import UserError, ValidationError
from tokenyard.sampling_checks import num_items, short
from tokenyard.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tokenyard.engine.input_processor import Prompt

T = TypeVar("T")

Message: TypeAlias = Mapping[str, object]
Conversation: TypeAlias = Sequence[Message]


def as_overrides(overrides: str | Sequence[str] | None) -> Sequence[str]:
    """A list of override strings, as given."""
    if overrides is None:
        return ()
    if not isinstance(overrides, list | tuple) or not all(isinstance(override, str) for override in overrides):
        raise UserError(f"overrides are a list of strings such as ['kv_cache.num_blocks=64']; got {short(overrides)}")
    return overrides


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, or several: a list of ints is one prompt of token ids."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise ValidationError(
            f"prompts is a prompt or a list of prompts; got {type(prompts).__name__}",
            parameter="prompts",
            value=prompts,
        )
    if num_items(prompts) and isinstance(prompts[0], int):  # whether all are is looked at where prompts are
        return [cast("Sequence[int]", prompts)]
    return [cast("Prompt", prompt) for prompt in prompts]


def as_conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """One conversation, or several: a list of messages is one."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise ValidationError(
            f"messages is a list of messages or a list of such lists; got {type(messages).__name__}",
            parameter="messages",
            value=messages,
        )
    if not messages or isinstance(messages[0], Mapping):
        return [cast("Conversation", messages)]
    return [cast("Conversation", conversation) for conversation in messages]


def params_for(given: SamplingParams | Sequence[SamplingParams], count: int) -> Sequence[SamplingParams]:
    """A SamplingParams for each of `count` prompts."""
    if isinstance(given, SamplingParams):
        return [given] * count
    if not isinstance(given, Sequence) or not all(isinstance(row, SamplingParams) for row in given):
        raise ValidationError(
            f"sampling_params is a SamplingParams or a list of them; got {type(given).__name__}",
            parameter="sampling_params",
            value=given,
        )
    return one_each("sampling_params", given, count)


def priorities_for(priority: int | Sequence[int] | None, count: int) -> Sequence[int]:
    """A priority for each of `count` prompts; None is 0."""
    given = 0 if priority is None else priority
    rows = one_each("priority", given, count) if isinstance(given, list | tuple) else [cast("int", given)] * count
    for value in rows:
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValidationError(f"a priority is an integer; got {short(value)}", parameter="priority", value=value)
    return rows


def one_each(name: str, rows: Sequence[T], count: int) -> Sequence[T]:
    """`rows`, of which there must be one for each of `count` prompts."""
    if len(rows) != count:
        raise ValidationError(
            f"{name} has {len(rows)} entries for {count} prompts; give one for all, or one each",
            parameter=name,
            value=len(rows),
        )
    return rows
