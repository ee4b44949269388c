"""Messages and tools of a chat request, for the schema in /openapi.json.

Values are checked where they are used, off the event loop: `normalise_messages` and `check_tools` say in one line what
does not hold.
"""

from __future__ import annotations

from typing import Annotated, Literal, Required

from pydantic import ConfigDict, Field, JsonValue, with_config
from typing_extensions import TypedDict

_OPEN = ConfigDict(extra="allow")  # templates may read further fields


@with_config(_OPEN)
class TextPart(TypedDict):
    """A part of a message; parts are joined with a newline."""

    type: Literal["text"]
    text: str


@with_config(_OPEN)
class FunctionCall(TypedDict):
    """What an earlier answer called; the arguments are an object, or the JSON text of one."""

    name: str
    arguments: str | dict[str, JsonValue]


@with_config(_OPEN)
class ToolCall(TypedDict, total=False):
    """A call in an earlier answer."""

    id: str
    type: Literal["function"]
    function: Required[FunctionCall]


@with_config(_OPEN)
class ChatMessage(TypedDict, total=False):
    """One message. All but an answer need a `content`; the result of a tool needs the id of the call it answers."""

    role: Required[Literal["system", "developer", "user", "assistant", "tool", "function"]]
    content: str | list[TextPart] | None
    name: str
    tool_calls: list[ToolCall]
    tool_call_id: str
    reasoning: str
    reasoning_content: str


@with_config(_OPEN)
class Function(TypedDict, total=False):
    """What a tool is called and takes, the latter as a JSON schema."""

    name: Required[Annotated[str, Field(min_length=1, max_length=256)]]
    description: str
    parameters: dict[str, JsonValue]
    strict: bool | None


@with_config(_OPEN)
class Tool(TypedDict):
    """A tool that the chat template may show to the model."""

    type: Literal["function"]
    function: Function
