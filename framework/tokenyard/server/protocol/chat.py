"""ChatRequest: the body of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import Field, JsonValue, SkipValidation

from tokenyard import sampling_checks as checks
from tokenyard.errors import UnsupportedError, ValidationError
from tokenyard.model.template_variables import MAX_TOOLS
from tokenyard.sampling_params import CHECKS
from tokenyard.server.protocol.chat_messages import ChatMessage, Tool  # noqa: TC001  # pydantic reads annotations
from tokenyard.server.protocol.sampling import SamplingFields, refuse_unsupported
from tokenyard.server.protocol.scheduling import RequestMeta

MAX_MESSAGES = 2048
_Count = Annotated[int, Field(ge=1, le=2**63 - 1)]

UNSUPPORTED: Mapping[str, Sequence[object]] = MappingProxyType({
    "add_special_tokens": (False,),  # a template writes all that the model needs
    "audio": (),
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_reasoning": (True,),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),  # of which there are none
    "prediction": (),
    "store": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
})  # fmt: skip
"""Chat fields of features that are not there, with the values that ask for nothing."""


class ChatRequest(SamplingFields, RequestMeta):
    """A conversation to go on with, and how."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES), SkipValidation]
    model: Annotated[str | None, Field(description="As /v1/models lists it; null: the first one")] = None
    max_completion_tokens: Annotated[
        _Count | None, Field(description="Tokens of each choice at most; null: what the context leaves"), SkipValidation
    ] = None
    max_tokens: Annotated[_Count | None, Field(description="The same; the other name wins"), SkipValidation] = None
    logprobs: Annotated[bool | None, Field(description="Logprobs of the answer's tokens")] = None
    top_logprobs: Annotated[
        int | None,
        Field(ge=0, le=20, description="With logprobs: of so many likely tokens too; at most model.max_logprobs"),
        SkipValidation,
    ] = None
    tools: Annotated[
        list[Tool] | None,
        Field(max_length=MAX_TOOLS, description="Shown to the model; only with tool_choice `none`"),
        SkipValidation,
    ] = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | dict[str, JsonValue] | None,
        Field(description="`none`: answers are text. Calls are not parsed in this version"),
        SkipValidation,
    ] = None
    add_generation_prompt: Annotated[
        bool | None, Field(description="Begin an answer; null: true, unless the final message is continued")
    ] = None
    continue_final_message: Annotated[
        bool | None, Field(description="Go on with the last message; not with add_generation_prompt")
    ] = None
    echo: Annotated[
        bool | None, Field(description="Answer with the last message before the new text, if it has the answer's role")
    ] = None
    chat_template: Annotated[
        str | None, Field(description="A Jinja template; only with server.trust_request_chat_template")
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, JsonValue] | None, Field(description="Variables of the chat template"), SkipValidation
    ] = None
    reasoning_effort: Annotated[
        Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None,
        Field(description="For models whose chat template reads it"),
    ] = None
    service_tier: Annotated[
        Literal["auto", "default"] | None, Field(description="There is one; answers have it as `default`")
    ] = None
    return_prompt_text: Annotated[bool | None, Field(description="Add what the chat template made")] = None

    @property
    def adds_generation_prompt(self) -> bool:
        """Whether the answer is a message of its own."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt

    def check(self) -> None:
        """Raise ValidationError for fields that do not go together, UnsupportedError for what is not there."""
        refuse_unsupported(self, UNSUPPORTED)
        self.check_stream()
        self._check_tools()
        if isinstance(self.messages, list) and len(self.messages) > MAX_MESSAGES:
            raise ValidationError(
                f"{len(self.messages)} messages are given; at most {MAX_MESSAGES} are allowed",
                parameter="messages",
                value=len(self.messages),
            )
        if self.is_stream and self.prompt_logprobs is not None:
            raise ValidationError(
                "prompt_logprobs are not available in a stream; set stream=false",
                parameter="prompt_logprobs",
                value=self.prompt_logprobs,
            )

    def most_tokens(self) -> int | None:
        """Tokens of each choice at most; None = no limit but the context. `max_tokens` alone is still to be checked."""
        if self.max_completion_tokens is None:
            return self.max_tokens
        CHECKS["max_tokens"]("max_completion_tokens", self.max_completion_tokens)
        return self.max_completion_tokens

    def num_top_logprobs(self, most: int) -> int | None:
        """How many alternatives each token's logprobs are to have, at most `most`; None = no logprobs."""
        count = self.top_logprobs or 0
        if not checks.is_int(count) or not 0 <= count <= most:
            allowed = f"an integer from 0 to {most} (model.max_logprobs)"
            raise checks.invalid("top_logprobs", self.top_logprobs, allowed)
        if count and not self.logprobs:
            raise ValidationError(
                f"top_logprobs={count} needs logprobs=true; set it, or leave top_logprobs out",
                parameter="top_logprobs",
                value=count,
            )
        return count if self.logprobs else None

    def _check_tools(self) -> None:
        choice = self.tool_choice
        if choice not in (None, "none", "auto"):
            raise UnsupportedError(
                f"tool_choice={checks.short(choice)} is not available in this version, which parses no tool calls; "
                "allowed: 'none'",
                parameter="tool_choice",
                value=choice,
            )
        if self.tools and choice != "none":
            raise UnsupportedError(
                "tools are not available in this version, which parses no tool calls; leave them out, or set "
                "tool_choice='none' to show them to the model and have its answer as text",
                parameter="tools",
                value=None,
            )
