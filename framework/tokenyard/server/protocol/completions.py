"""CompletionRequest: the body of /v1/completions."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, SkipValidation

from tokenyard.sampling_checks import MAX_TOKEN_ID
from tokenyard.server.protocol.sampling import SamplingFields
from tokenyard.server.protocol.scheduling import RequestMeta

DEFAULT_MAX_TOKENS = 16

_Text = Annotated[str, Field(min_length=1)]
_Ids = Annotated[list[Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]], Field(min_length=1)]


class CompletionRequest(SamplingFields, RequestMeta):
    """Completes prompts as they are; no chat template is applied."""

    model: Annotated[str | None, Field(description="A name that /v1/models lists; the first one if left out")] = None
    prompt: Annotated[
        _Text | Annotated[list[_Text], Field(min_length=1)] | _Ids | Annotated[list[_Ids], Field(min_length=1)],
        Field(description="Text or token ids, of one prompt or of several: at most server.max_prompts"),
        SkipValidation,  # of what may be very long: it is looked at where it is tokenized
    ]
    max_tokens: Annotated[int | None, Field(ge=1, le=2**63 - 1), SkipValidation] = None
    logprobs: Annotated[
        int | None,
        Field(ge=-1, le=MAX_TOKEN_ID, description="Of each token and so many likeliest; at most model.max_logprobs"),
        SkipValidation,
    ] = None
    echo: Annotated[bool | None, Field(description="Begin each choice with its prompt")] = None
    add_special_tokens: Annotated[
        bool | None, Field(description="Whether a text prompt gets the tokenizer's own, often a BOS; default true")
    ] = None


UNSUPPORTED = {
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "parallel_tool_calls": (True, False),
}
"""Further fields that ask for what completions do not have."""
