"""The shared sampling fields: their schema and what SamplingParams takes are the same; unknown fields are bounded."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from tokenyard.errors import ValidationError
from tokenyard.sampling_params import CHECKS, NOT_YET, SamplingParams
from tokenyard.server.protocol.completions import CompletionRequest
from tokenyard.server.protocol.sampling import LIMITS, SHARED, UNSUPPORTED, SamplingFields
from tokenyard.server.unknown_fields import UnknownFields

SCHEMA: dict[str, dict[str, Any]] = SamplingFields.model_json_schema()["properties"]


def variants(name: str) -> list[dict[str, Any]]:
    """The types that a field may have, but for null."""
    return [one for one in SCHEMA[name].get("anyOf", [SCHEMA[name]]) if one.get("type") != "null"]


def is_taken(name: str, value: object) -> bool:
    try:
        LIMITS.get(name, CHECKS[name])(name, value)
    except ValidationError:
        return False
    return True


def edges(kind: dict[str, Any]) -> tuple[list[object], list[object]]:
    """Values that the schema just takes, and just does not."""
    step = 1 if kind["type"] == "integer" else 1e-9 * max(1, abs(kind.get("maximum", 1)))
    good: list[object] = [kind[name] for name in ("minimum", "maximum") if name in kind]
    bad: list[object] = [kind["exclusiveMinimum"]] if "exclusiveMinimum" in kind else []
    if "minimum" in kind:
        bad.append(kind["minimum"] - step)
    if "maximum" in kind:
        bad.append(kind["maximum"] + step)
    return good, bad


@pytest.mark.parametrize("name", sorted(SHARED))
def test_the_schema_says_what_is_taken(name: str) -> None:
    for kind in variants(name):
        if kind["type"] in ("integer", "number"):
            good, bad = edges(kind)
            assert good
            assert bad
            assert all(is_taken(name, value) for value in good)
            assert not any(is_taken(name, value) for value in bad)
        elif kind["type"] == "boolean":
            assert is_taken(name, True)
            assert not is_taken(name, 1)
        elif kind["type"] == "string":
            assert is_taken(name, "x" * kind["maxLength"])
            assert not is_taken(name, "x" * (kind["maxLength"] + 1))
            assert not is_taken(name, "")
        elif kind["type"] == "array":
            items = [str(i) if kind["items"]["type"] == "string" else i for i in range(kind["maxItems"] + 1)]
            assert is_taken(name, items[:-1])
            assert not is_taken(name, items)
            assert is_taken(name, []) == ("minItems" not in kind)
        elif name != "extra_args":
            entries = {str(i): 0.5 for i in range(kind["maxProperties"] + 1)}
            assert not is_taken(name, entries)
            entries.popitem()
            assert is_taken(name, entries)


def test_every_sampling_parameter_is_a_field_or_is_refused_by_name() -> None:
    internal = {"output_kind", "detokenize", "skip_reading_prefix_cache"}
    fields = set(CompletionRequest.model_fields) | set(UNSUPPORTED)
    assert set(SamplingParams.__dataclass_fields__) - internal <= fields
    assert set(UNSUPPORTED) >= NOT_YET
    assert not set(UNSUPPORTED) & set(CompletionRequest.model_fields)


def test_unknown_fields_are_told_once_each_and_not_without_end(caplog: pytest.LogCaptureFixture) -> None:
    fields = UnknownFields()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            fields.note(["a", "b", "x" * 10**6])
        assert len(caplog.records) == 3
        assert max(len(record.getMessage()) for record in caplog.records) < 200
        fields.note(str(number) for number in range(10**4))
    assert len(caplog.records) < 300
