"""json_answer: a whole answer of one JSON object."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from fastapi import Response

if TYPE_CHECKING:
    from collections.abc import Mapping


def json_answer(body: msgspec.Struct | Mapping[str, object], status: int = 200) -> Response:
    """The body with the status."""
    return Response(msgspec.json.encode(body), status, media_type="application/json")
