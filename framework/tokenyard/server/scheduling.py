"""On what terms a request is served: from its body, its headers and its API key to what the scheduler is told.

A header X-Tokenyard-NAME stands for a key of the body's `scheduling`, converted from text; the body wins over it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tokenyard.errors import ConfigError, ValidationError, nearest
from tokenyard.launch.convert import convert, type_hints
from tokenyard.request import HINT_KEYS, SchedulingHints, ServiceLevel
from tokenyard.sampling_checks import short
from tokenyard.scheduling_hints import read_hints
from tokenyard.server.protocol.scheduling import MAX_PRIORITY, MAX_TIMEOUT
from tokenyard.server.service import api_key_id_of

if TYPE_CHECKING:
    from starlette.requests import Request

    from tokenyard.server.protocol.scheduling import RequestMeta
    from tokenyard.server.service import Service

_PREFIX = "x-tokenyard-"
_MAX_HEADER = 4096  # characters of one header's value
_SLO = tuple(f"slo_{name}" for name in ServiceLevel._fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How a request is to be served."""

    priority: int = 0
    hints: SchedulingHints | None = None
    cache_salt: str | None = None
    label: str | None = None  # the client's own name for it
    since: float = field(default_factory=time.monotonic)  # when its hints were read: their deadline counts from then


def terms_of(service: Service, http: Request, meta: RequestMeta) -> Terms:
    """What body, headers, API key and server settings say together; ValidationError names what does not hold."""
    metadata_type = service.engine.front.engine.metadata_type
    told = _from_headers(http, metadata_type)
    priority, timeout = told.pop("priority", 0), told.pop("timeout", service.config.server.request_timeout)
    if (key_id := api_key_id_of(http)) is not None:
        told.setdefault("client", key_id)
    told |= _given(client=meta.user, session=meta.session_id) | (meta.scheduling or {})
    hints = read_hints(told, metadata_type)
    return Terms(
        priority=_priority(priority if meta.priority is None else meta.priority),
        hints=_within(hints, _timeout(timeout if meta.timeout is None else meta.timeout)),
        cache_salt=_salt(meta.cache_salt, key_id if service.config.server.salt_by_api_key else None),
        label=meta.request_id,
    )


def _given(**values: object) -> dict[str, object]:
    return {name: value for name, value in values.items() if value is not None}


def _from_headers(http: Request, metadata_type: type) -> dict[str, object]:
    """The keys that the headers give, `priority` and `timeout` among them."""
    types: dict[str, object] = {"priority": int, "timeout": float, "deadline": float, "client": str, "session": str}
    own = type_hints(metadata_type)
    types |= dict.fromkeys(_SLO, float) | {"retention": str}
    types |= {name: type_ for name, type_ in own.items() if name not in HINT_KEYS}
    told: dict[str, object] = {}
    slo: dict[str, object] = {}
    for header, text in http.headers.items():
        if not header.startswith(_PREFIX):
            continue
        name = header.removeprefix(_PREFIX).replace("-", "_")
        if name not in types:
            raise _unknown(header, types)
        value = _from_text(header, text, types[name])
        if name in _SLO:
            slo[name.removeprefix("slo_")] = value
        else:
            told[name] = value
    return told | ({"slo": slo} if slo else {})


def _unknown(header: str, types: Mapping[str, object]) -> ValidationError:
    names = [name.replace("_", "-") for name in types]
    match = nearest(header.removeprefix(_PREFIX), names)  # all begin alike, which makes them near to each other
    hint = f"; did you mean '{_PREFIX}{match}'?" if match else ""
    return ValidationError(
        f"unknown header {short(header)}{hint}; allowed: {', '.join(_PREFIX + name for name in names)}",
        parameter=header,
        value=header,
    )


def _from_text(header: str, text: str, annotation: object) -> object:
    """A header's value as the body would give it: the text itself where the field takes it, else what it is as JSON."""
    if len(text) > _MAX_HEADER:
        raise ValidationError(
            f"{header} has {len(text)} characters; at most {_MAX_HEADER} are allowed", parameter=header, value=len(text)
        )
    with contextlib.suppress(ConfigError):
        convert(text, annotation, header)
        return text
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    try:
        convert(value, annotation, header)
    except ConfigError as error:
        raise ValidationError(str(error), parameter=header, value=text) from error
    return value


def _priority(value: object) -> int:
    if isinstance(value, int) and -MAX_PRIORITY <= value <= MAX_PRIORITY:
        return value
    raise ValidationError(
        f"priority={short(value)} is not valid: it must be an integer from {-MAX_PRIORITY} to {MAX_PRIORITY}",
        parameter="priority",
        value=value,
    )


def _timeout(value: object) -> float | None:
    if value is None or (isinstance(value, int | float) and 0 < value <= MAX_TIMEOUT):
        return value
    raise ValidationError(
        f"timeout={short(value)} is not valid: it must be a number of seconds, above 0 and up to {MAX_TIMEOUT:g}",
        parameter="timeout",
        value=value,
    )


def _within(hints: SchedulingHints | None, timeout: float | None) -> SchedulingHints | None:
    """Hints whose deadline is not after the timeout: the engine ends a request at its deadline."""
    if timeout is None:
        return hints
    hints = hints or SchedulingHints()
    return replace(hints, deadline=timeout if hints.deadline is None else min(timeout, hints.deadline))


def _salt(given: str | None, key_id: str | None) -> str | None:
    """Keys whose salts differ whatever salts their requests give; hashed, so that the result's length is bounded."""
    return given if key_id is None else hashlib.sha256(f"{key_id}:{given or ''}".encode()).hexdigest()
