"""The prompts of a completion request: one or several, each text or token ids."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias, cast

from tokenyard.errors import ValidationError
from tokenyard.sampling_checks import short

GivenPrompt: TypeAlias = str | Sequence[int]


class Prompts(NamedTuple):
    """As they were given. Token ids are looked at where they are tokenized, since there may be very many."""

    given: Sequence[GivenPrompt]
    num_token_ids: int  # in those that are given as token ids


def read_prompts(value: object, max_prompts: int) -> Prompts:
    """Text, a list of texts, token ids, or a list of lists of token ids; ValidationError for anything else."""
    if isinstance(value, str):
        return Prompts([value], 0)
    if not isinstance(value, list):
        raise _invalid(f"got {short(value)}")
    if not value:
        raise ValidationError("the prompt is empty; give at least one token", parameter="prompt", value=value)
    first = value[0]
    if not isinstance(first, str | list):  # numbers, or what the tokenizing refuses one by one
        return Prompts([value], len(value))
    if len(value) > max_prompts:
        raise ValidationError(
            f"{len(value)} prompts are given; at most {max_prompts} are allowed (server.max_prompts)",
            parameter="prompt",
            value=len(value),
        )
    kind = str if isinstance(first, str) else list
    if odd := [one for one in value if not isinstance(one, kind)]:
        raise _invalid(f"got a list with both {short(first)} and {short(odd[0])}")
    return Prompts(cast("Sequence[GivenPrompt]", value), sum(len(one) for one in value) if kind is list else 0)


def check_num_completions(num_prompts: int, num_choices: int, most: int) -> None:
    """Raise ValidationError for more choices over all prompts than the server makes at once."""
    if num_prompts > 1 and num_prompts * num_choices > most:
        raise ValidationError(
            f"{num_prompts} prompts with n={num_choices} are {num_prompts * num_choices} completions; at most {most} "
            "are allowed in one request (server.max_prompts)",
            parameter="n",
            value=num_choices,
        )


@contextlib.contextmanager
def prompt_from(field: str) -> Iterator[None]:
    """What does not hold of a prompt is told of the field that it was made from."""
    try:
        yield
    except ValidationError as error:
        if error.parameter in ("prompt", "prompt_token_ids"):
            error.parameter = field
        raise


def _invalid(what: str) -> ValidationError:
    return ValidationError(
        f"prompt is text, a list of texts, a list of token ids, or a list of lists of token ids; {what}",
        parameter="prompt",
        value=None,
    )
