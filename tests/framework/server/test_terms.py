"""terms_of: what body, headers, API key and settings say of how a request is to be served."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Literal, cast

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from tokenyard.async_llm import AsyncLLM
from tokenyard.config import EngineConfig, NoOptions, ServerConfig
from tokenyard.errors import ValidationError
from tokenyard.request import SchedulingHints, ServiceLevel
from tokenyard.server.protocol.scheduling import RequestMeta
from tokenyard.server.scheduling import Terms, terms_of
from tokenyard.server.service import Service


class Tier(Enum):
    GOLD = "gold"
    TIN = "tin"


@dataclass(frozen=True)
class Metadata:
    """What a policy may be told, of every type that a header can say."""

    weight: float = 1.0
    tries: int | None = None
    is_batch: bool = False
    tier: Tier = Tier.TIN
    job_class: Literal["fast", "slow"] = "slow"
    name: str = ""
    tags: tuple[str, ...] = ()
    limits: dict[str, int] = field(default_factory=dict)


def terms(
    body: dict[str, object] | None = None,
    headers: dict[str, str] | None = None,
    *,
    key_id: str | None = None,
    metadata_type: type = Metadata,
    **server: object,
) -> Terms:
    """Of a request with this body and these headers."""
    front = SimpleNamespace(engine=SimpleNamespace(metadata_type=metadata_type))
    service = Service(config=EngineConfig(server=ServerConfig(**server)))  # type: ignore[arg-type]
    service.llm = cast("AsyncLLM", SimpleNamespace(front=front))
    raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in (headers or {}).items()]
    http = Request({"type": "http", "headers": raw, "state": {"api_key_id": key_id}})
    return terms_of(service, http, RequestMeta.model_validate(body or {}))


def hints(*args: object, **kwargs: object) -> SchedulingHints:
    found = terms(*args, **kwargs).hints  # type: ignore[arg-type]
    assert found is not None
    return found


def test_a_request_that_says_nothing_has_terms_that_say_nothing() -> None:
    found = terms(metadata_type=NoOptions)
    assert (found.priority, found.hints, found.cache_salt, found.label) == (0, None, None, None)


def test_every_key_of_the_body_reaches_its_place() -> None:
    body = {
        "priority": -3,
        "user": "me",
        "session_id": "s",
        "request_id": "mine",
        "cache_salt": "salt",
        "timeout": 5,
        "scheduling": {
            "deadline": 9,
            "slo": {"ttft": 0.5},
            "retention": "low",
            "weight": 2,
            "tier": "gold",
            "tags": ["a"],
        },
    }
    found = terms(body)
    assert (found.priority, found.label, found.cache_salt) == (-3, "mine", "salt")
    assert found.hints == SchedulingHints(
        deadline=5,
        client_id="me",
        session_id="s",
        service_level=ServiceLevel(ttft=0.5),
        retention="low",
        metadata=Metadata(weight=2.0, tier=Tier.GOLD, tags=("a",)),
    )


def test_every_header_is_converted_from_text() -> None:
    headers = {
        "X-Tokenyard-Priority": "7",
        "X-Tokenyard-Client": "12",
        "X-Tokenyard-Session": "s",
        "X-Tokenyard-Deadline": "2.5",
        "X-Tokenyard-Slo-Tpot": "0.1",
        "X-Tokenyard-Retention": "high",
        "X-Tokenyard-Weight": "3",
        "X-Tokenyard-Tries": "4",
        "X-Tokenyard-Is-Batch": "true",
        "X-Tokenyard-Tier": "gold",
        "X-Tokenyard-Job-Class": "fast",
        "X-Tokenyard-Name": "5",
        "X-Tokenyard-Tags": '["a", "b"]',
        "X-Tokenyard-Limits": '{"a": 1}',
    }
    found = terms(headers=headers)
    assert found.priority == 7
    assert found.hints == SchedulingHints(
        deadline=2.5,
        client_id="12",
        session_id="s",
        service_level=ServiceLevel(tpot=0.1),
        retention="high",
        metadata=Metadata(3.0, 4, True, Tier.GOLD, "fast", "5", ("a", "b"), {"a": 1}),
    )


def test_the_body_wins_over_the_header_and_the_header_over_the_key() -> None:
    headers = {"X-Tokenyard-Client": "header", "X-Tokenyard-Priority": "1", "X-Tokenyard-Weight": "1"}
    assert hints(key_id="key").client_id == "key"
    assert hints(headers=headers, key_id="key").client_id == "header"
    body: dict[str, object] = {"user": "user", "priority": 2, "scheduling": {"weight": 5}}
    found = terms(body, headers, key_id="key")
    assert found.priority == 2
    assert found.hints is not None
    assert found.hints.client_id == "user"
    assert found.hints.metadata == Metadata(weight=5.0)
    assert hints({"user": "user", "scheduling": {"client": "hint"}}, headers).client_id == "hint"


@pytest.mark.parametrize(
    ("body", "headers", "default", "expected"),
    [
        ({}, {}, 30.0, 30.0),
        ({}, {"X-Tokenyard-Timeout": "50"}, 30.0, 50.0),
        ({"timeout": 60.0}, {"X-Tokenyard-Timeout": "50"}, 30.0, 60.0),
        ({"scheduling": {"deadline": 2}}, {}, 30.0, 2.0),
        ({"scheduling": {"deadline": 2}, "timeout": 1}, {}, None, 1.0),
        ({"scheduling": {"deadline": 2}}, {}, None, 2.0),
    ],
)
def test_2_3_22_the_deadline_is_the_earlier_of_hint_and_timeout(
    body: dict[str, object], headers: dict[str, str], default: float | None, expected: float
) -> None:
    assert hints(body, headers, request_timeout=default).deadline == expected


@pytest.mark.parametrize(
    ("body", "headers", "parameter", "told"),
    [
        ({}, {"X-Tokenyard-Wieght": "1"}, "x-tokenyard-wieght", "did you mean 'x-tokenyard-weight'"),
        ({}, {"X-Tokenyard-Weight": "heavy"}, "x-tokenyard-weight", "must be a number"),
        ({}, {"X-Tokenyard-Weight": "NaN"}, "scheduling", "must be a finite number"),
        ({}, {"X-Tokenyard-Is-Batch": "yes"}, "x-tokenyard-is-batch", "must be true or false"),
        ({}, {"X-Tokenyard-Tries": "1.5"}, "x-tokenyard-tries", "must be a whole number"),
        ({}, {"X-Tokenyard-Tags": "[" * 4000}, "x-tokenyard-tags", "must be a list"),
        ({}, {"X-Tokenyard-Name": "x" * 5000}, "x-tokenyard-name", "at most 4096 are allowed"),
        ({}, {"X-Tokenyard-Client": "x" * 257}, "scheduling", "client"),
        ({}, {"X-Tokenyard-Priority": "9" * 30}, "priority", "must be an integer from"),
        ({}, {"X-Tokenyard-Priority": "true"}, "x-tokenyard-priority", "must be a whole number"),
        ({}, {"X-Tokenyard-Timeout": "0"}, "timeout", "above 0"),
        ({}, {"X-Tokenyard-Timeout": "Infinity"}, "timeout", "above 0"),
        ({}, {"X-Tokenyard-Deadline": "-1"}, "scheduling", "deadline"),
        ({"scheduling": {"wieght": 1}}, {}, "scheduling", "did you mean 'weight'"),
        ({"scheduling": {"weight": "1"}}, {}, "scheduling", "scheduling.weight must be a number"),
        ({"scheduling": {"tags": ["x" * 300]}}, {}, "scheduling", "at most 256 characters"),
    ],
)
def test_d22_what_does_not_hold_is_refused_by_name_in_one_line(
    body: dict[str, object], headers: dict[str, str], parameter: str, told: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        terms(body, headers)
    assert told in str(caught.value)
    assert caught.value.parameter == parameter
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("field_name", "value"),
    [
        ("priority", 1.0),
        ("priority", "1"),
        ("priority", True),
        ("priority", 2**31),
        ("user", ""),
        ("user", 5),
        ("user", "x" * 257),
        ("session_id", "x" * 257),
        ("request_id", "x" * 257),
        ("timeout", 0),
        ("timeout", float("nan")),
        ("timeout", float("inf")),
        ("timeout", 1e7),
        ("timeout", "5"),
        ("scheduling", []),
        ("scheduling", "x"),
        ("cache_salt", ""),
        ("cache_salt", "x" * 129),
        ("cache_salt", 3),
    ],
)
def test_d22_fields_of_the_body_are_strict_and_bounded(field_name: str, value: object) -> None:
    with pytest.raises(pydantic.ValidationError) as caught:
        RequestMeta.model_validate({field_name: value})
    assert caught.value.errors()[0]["loc"][0] == field_name


def test_g2_salts_of_two_keys_differ_whatever_their_requests_say() -> None:
    def salt(key_id: str | None, given: str | None = None, *, by_key: bool = True) -> str | None:
        return terms({"cache_salt": given}, key_id=key_id, salt_by_api_key=by_key).cache_salt

    a, b = salt("a"), salt("b")
    assert a is not None
    assert a != b
    assert salt("a") == a
    assert salt("b", a) not in (a, b)  # a salt that another key was seen to have is of no use
    assert salt("a", "x") != salt("a", "y")
    assert salt("a", by_key=False) is None
    assert salt("a", "x", by_key=False) == "x"
    assert salt(None, "x") == "x"  # where no keys are asked for


@given(
    st.dictionaries(
        st.sampled_from(["Priority", "Timeout", "Deadline", "Weight", "Tags", "Tier", "Limits", "Nothing", "Slo-Ttft"]),
        st.text(st.characters(min_codepoint=32, max_codepoint=255), max_size=40),
    )
)
def test_whatever_headers_say_they_are_taken_or_refused_and_nothing_else_happens(headers: dict[str, str]) -> None:
    try:
        terms(headers={f"X-Tokenyard-{name}": value for name, value in headers.items()})
    except ValidationError:
        return
