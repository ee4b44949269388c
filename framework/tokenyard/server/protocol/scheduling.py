"""RequestMeta: the fields of a request body that say how it is to be served, not what it asks for."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, JsonValue
from pydantic.json_schema import SkipJsonSchema  # noqa: TC002  # read at run time, with the annotations

from tokenyard.server.protocol.body import RequestBody

MAX_TEXT = 256  # characters of an id
MAX_SALT = 128
MAX_PRIORITY = 2**31 - 1
MAX_TIMEOUT = 1e6  # seconds

Id = Annotated[str, Field(strict=True, min_length=1, max_length=MAX_TEXT)]


class RequestMeta(RequestBody):
    """To inherit from. `tokenyard.server.scheduling.terms_of` reads it; what is None says nothing."""

    priority: Annotated[int, Field(strict=True, ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = Field(
        None, description="Lower is more urgent; looked at by policies that have priorities."
    )
    user: Id | None = Field(None, description="Whose request this is, for policies that share by client.")
    session_id: Id | None = Field(None, description="The conversation that this request is a part of.")
    request_id: Id | None = Field(None, description="The client's own name for the request; need not be unique.")
    # Not in /openapi.json: what programs make up from that would be requests that give themselves no time, and get 504.
    timeout: SkipJsonSchema[Annotated[float, Field(strict=True, gt=0, le=MAX_TIMEOUT, allow_inf_nan=False)] | None] = (
        Field(None, description="Seconds after which the request is aborted, waiting or running.")
    )
    scheduling: dict[str, JsonValue] | None = Field(
        None,
        description="Hints for the scheduler: deadline, client, session, slo, retention, and those of the policy.",
    )
    cache_salt: Annotated[str, Field(strict=True, min_length=1, max_length=MAX_SALT)] | None = Field(
        None, description="Requests with different salts never share prefix-cache blocks."
    )
