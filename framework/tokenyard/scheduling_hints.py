"""What a client tells the scheduler of a request: SchedulingHints, from a mapping as users write it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set

from tokenyard.config import NO_OPTIONS, NoOptions
from tokenyard.errors import ConfigError, ValidationError, did_you_mean
from tokenyard.launch.convert import to_dataclass
from tokenyard.launch.schema import field_names
from tokenyard.request import HINT_KEYS, RETENTION_LEVELS, SchedulingHints, ServiceLevel
from tokenyard.sampling_checks import is_number, short

__all__ = ["SchedulingHints", "read_hints"]

_PARAMETER = "scheduling"
_MAX_KEYS = 64
_MAX_TEXT = 256  # characters of a string
_MAX_DEPTH = 8
_MAX_SECONDS = 1e9


def read_hints(value: Mapping[str, object] | SchedulingHints | None, metadata_type: type) -> SchedulingHints | None:
    """Hints in their checked form.

    A mapping has the keys `deadline` (seconds after arrival), `client`, `session`, `slo` (a mapping with `ttft`, `tpot`
    and `e2e`, in seconds), `retention` (`low`, `normal` or `high`: how long its content is worth keeping in the prefix
    cache), and those of the active policy, which are the fields of its `metadata_type`. None is an empty mapping; the
    result is None where that says nothing. Raises ValidationError, naming the key.
    """
    if isinstance(value, SchedulingHints):
        return _checked(value, metadata_type)
    given = {} if value is None else value
    if not isinstance(given, Mapping):
        raise _invalid(_PARAMETER, value, "a mapping of hints, such as {'client': 'me'}")
    _check_bounds(_PARAMETER, given)
    _check_keys(given, metadata_type)
    metadata = _metadata({name: item for name, item in given.items() if name not in HINT_KEYS}, metadata_type)
    if not given and metadata is NO_OPTIONS:
        return None
    return _checked(
        SchedulingHints(
            deadline=given.get("deadline"),  # type: ignore[arg-type]  # checked next
            client_id=given.get("client"),  # type: ignore[arg-type]
            session_id=given.get("session"),  # type: ignore[arg-type]
            service_level=_service_level(given.get("slo")),
            retention="normal" if given.get("retention") is None else given["retention"],  # type: ignore[arg-type]
            metadata=metadata,
        ),
        metadata_type,
    )


def _check_keys(given: Mapping[str, object], metadata_type: type) -> None:
    allowed = [*HINT_KEYS, *field_names(metadata_type)]
    for name in given:
        if name not in allowed:
            raise ValidationError(
                f"{_PARAMETER}: unknown key {short(name)}{did_you_mean(str(name), allowed)}; allowed: "
                f"{', '.join(allowed)}",
                parameter=_PARAMETER,
                value=name,
            )


def _metadata(given: Mapping[str, object], metadata_type: type) -> object:
    if metadata_type is NoOptions:
        return NO_OPTIONS
    try:
        return to_dataclass(metadata_type, given, _PARAMETER)
    except ConfigError as error:
        raise ValidationError(str(error), parameter=_PARAMETER, value=dict(given)) from error


def _service_level(slo: object) -> ServiceLevel | None:
    if slo is None:
        return None
    if not isinstance(slo, Mapping) or not set(slo) <= set(ServiceLevel._fields):
        allowed = f"a mapping with the keys {', '.join(ServiceLevel._fields)}, in seconds"
        raise _invalid(f"{_PARAMETER}.slo", slo, allowed)
    return ServiceLevel(**slo)


def _checked(hints: SchedulingHints, metadata_type: type) -> SchedulingHints:
    """The hints themselves; raises when a field does not hold."""
    _check_seconds("deadline", hints.deadline)
    for name, text in (("client", hints.client_id), ("session", hints.session_id)):
        if text is not None and not (isinstance(text, str) and 0 < len(text) <= _MAX_TEXT):
            raise _invalid(f"{_PARAMETER}.{name}", text, f"text of 1 to {_MAX_TEXT} characters")
    if hints.retention not in RETENTION_LEVELS:
        raise _invalid(f"{_PARAMETER}.retention", hints.retention, f"one of {', '.join(RETENTION_LEVELS)}")
    level = hints.service_level
    if level is not None:
        if not isinstance(level, ServiceLevel):
            raise _invalid(f"{_PARAMETER}.slo", level, "a ServiceLevel")
        for name, seconds in level._asdict().items():
            _check_seconds(f"slo.{name}", seconds)
    if hints.metadata is not NO_OPTIONS and type(hints.metadata) is not metadata_type:
        allowed = f"of the active policy's type, {metadata_type.__name__}"
        raise _invalid(f"{_PARAMETER}.metadata", hints.metadata, allowed)
    _check_bounds(_PARAMETER, hints.metadata_values())
    return hints


def _check_seconds(name: str, value: object) -> None:
    if value is None or (isinstance(value, int | float) and is_number(value) and 0 < value <= _MAX_SECONDS):
        return
    raise _invalid(f"{_PARAMETER}.{name}", value, f"a number of seconds, above 0 and up to {_MAX_SECONDS:g}")


def _check_bounds(key: str, value: object, depth: int = 0) -> None:
    """Text and containers of any size would be copied into every process that a request crosses.

    Numbers that are not finite have no order, so a policy that sorts by them would have none.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise _invalid(key, value, "a finite number")
    if isinstance(value, str) and len(value) > _MAX_TEXT:
        raise _invalid(key, value, f"text of at most {_MAX_TEXT} characters")
    if isinstance(value, str | bytes) or not isinstance(value, Mapping | Sequence | Set):
        return
    if len(value) > _MAX_KEYS or depth > _MAX_DEPTH:
        raise _invalid(key, value, f"of at most {_MAX_KEYS} entries, nested at most {_MAX_DEPTH} deep")
    for name, item in value.items() if isinstance(value, Mapping) else enumerate(value):
        _check_bounds(key, name, depth + 1)
        _check_bounds(f"{key}.{short(name).strip(chr(39))}", item, depth + 1)


def _invalid(key: str, value: object, allowed: str) -> ValidationError:
    return ValidationError(
        f"{key}={short(value)} is not valid: it must be {allowed}", parameter=_PARAMETER, value=value
    )
