"""TokenizeRequest and DetokenizeRequest: the bodies of /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, JsonValue, SkipValidation

from tokenyard.errors import UnsupportedError, ValidationError
from tokenyard.model.template_variables import MAX_TOOLS
from tokenyard.sampling_checks import MAX_TOKEN_ID
from tokenyard.server.protocol.body import RequestBody
from tokenyard.server.protocol.chat import MAX_MESSAGES
from tokenyard.server.protocol.chat_messages import ChatMessage, Tool  # noqa: TC001  # pydantic reads annotations


class TokenizeRequest(RequestBody):
    """A text or a conversation, of any length; no answer is made."""

    model: Annotated[str | None, Field(description="A name that /v1/models lists; the first one if left out")] = None
    prompt: Annotated[str | None, Field(description="Text, as /v1/completions takes it")] = None
    messages: Annotated[
        Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)] | None,
        Field(description="A conversation, as /v1/chat/completions takes it; instead of a prompt"),
        SkipValidation,
    ] = None
    add_special_tokens: Annotated[
        bool | None, Field(description="Whether a text gets the tokenizer's own, often a BOS; default true")
    ] = None
    return_token_strs: Annotated[bool | None, Field(description="Add the tokens as the vocabulary spells them")] = None
    add_generation_prompt: Annotated[bool | None, Field(description="Of a conversation; default true")] = None
    continue_final_message: Annotated[bool | None, Field(description="Of a conversation; default false")] = None
    chat_template: Annotated[str | None, Field(description="Only with server.trust_request_chat_template")] = None
    chat_template_kwargs: Annotated[
        dict[str, JsonValue] | None, Field(description="Variables that the chat template reads"), SkipValidation
    ] = None
    tools: Annotated[
        Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None,
        Field(description="What the chat template tells the model of tools"),
        SkipValidation,
    ] = None

    def check(self) -> None:
        """Raise ValidationError unless there is a prompt or a conversation, and only one."""
        if (self.prompt is None) == (self.messages is None):
            raise ValidationError(
                "give a prompt (text) or messages (a conversation), and not both", parameter="prompt", value=None
            )
        if self.messages is not None and self.add_special_tokens:
            raise UnsupportedError(
                "add_special_tokens=true is for a prompt; a chat template writes what the model needs: leave it out",
                parameter="add_special_tokens",
                value=True,
            )
        if self.messages is not None and (not isinstance(self.messages, list) or len(self.messages) > MAX_MESSAGES):
            raise ValidationError(
                f"messages must be a list of 1 to {MAX_MESSAGES} messages", parameter="messages", value=None
            )


class DetokenizeRequest(RequestBody):
    """Token ids to be made text."""

    model: Annotated[str | None, Field(description="A name that /v1/models lists; the first one if left out")] = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]], SkipValidation]
    skip_special_tokens: Annotated[
        bool | None, Field(description="Leave control tokens out of the text; default false")
    ] = None
