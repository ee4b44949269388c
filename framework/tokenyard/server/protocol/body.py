"""RequestBody: what the bodies of all endpoints have in common; and whether and how an answer is streamed."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from tokenyard.errors import ValidationError


class RequestBody(BaseModel):
    """A JSON object. Types are strict: text is no number, and a number no truth value.

    A field that no endpoint knows is accepted, for clients that send more than we read, and told in the log: see
    `UnknownFields`. Fields of features that are not there are refused by name: see `refuse_unsupported`.
    """

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())


class StreamOptions(RequestBody):
    """What a stream tells besides text."""

    include_usage: Annotated[bool | None, Field(description="One more chunk at the end, with the token counts")] = None
    continuous_usage_stats: Annotated[
        bool | None, Field(description="With include_usage: token counts so far in every chunk")
    ] = None


class StreamFields(RequestBody):
    """Of an endpoint whose answer can be a stream of server-sent events."""

    stream: Annotated[bool | None, Field(description="Send the answer as it is made")] = None
    stream_options: Annotated[StreamOptions | None, Field(description="Only with stream=true")] = None

    @property
    def is_stream(self) -> bool:
        return bool(self.stream)

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk of token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def has_continuous_usage(self) -> bool:
        """Whether every chunk of a stream has token counts."""
        options = self.stream_options
        return options is not None and bool(options.include_usage) and bool(options.continuous_usage_stats)

    def check_stream(self) -> None:
        """Raise ValidationError for options of a stream that is none."""
        if self.stream_options is not None and not self.is_stream:
            raise ValidationError(
                "stream_options says how to stream, and stream is not true; set stream=true, or leave it out",
                parameter="stream_options",
                value=None,
            )
