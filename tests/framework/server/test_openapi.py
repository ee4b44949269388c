"""/openapi.json against the server that it describes: what it promises, and what nobody promised."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import schemathesis
from http_server import ThreadServer, running_server
from hypothesis import HealthCheck, Phase, settings
from schemathesis import CheckContext, GenerationMode, Response
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.testclient import TestClient
from tokenyard.config import EngineConfig, ServerConfig
from tokenyard.server.app import create_app
from tokenyard.server.probes import PUBLIC_PATHS
from tokenyard.server.service import Service

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def no_fault_of_the_server(ctx: CheckContext, response: Response, case: schemathesis.Case) -> bool | None:
    """504 is what a request gets that gives itself no time."""
    asked = case.body if isinstance(case.body, dict) else {}
    if response.status_code == 504 and asked.get("timeout") is not None:
        return None
    return not_a_server_error(ctx, response, case)


CHECKS = [no_fault_of_the_server, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def fuzzed(tiny_llama_dir: Path) -> Iterator[ThreadServer]:
    """Answers are short, however long a request wants them."""
    with running_server(["model.max_model_len=64"], model=tiny_llama_dir) as running:
        yield running


SCHEMA = schemathesis.openapi.from_dict(create_app(Service(config=EngineConfig())).openapi())
SCHEMA.config.generation.update(modes=[GenerationMode.POSITIVE, GenerationMode.NEGATIVE])


def fuzz(max_examples: int) -> settings:
    return settings(
        max_examples=max_examples,
        deadline=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


@SCHEMA.parametrize()
@fuzz(15)
def test_api_02_no_request_is_answered_with_a_5xx_or_what_is_not_documented(
    case: schemathesis.Case, fuzzed: ThreadServer
) -> None:
    case.call_and_validate(base_url=fuzzed.url, checks=CHECKS)


@pytest.mark.slow
@SCHEMA.parametrize()
@fuzz(400)
def test_api_02_nor_is_any_of_many(case: schemathesis.Case, fuzzed: ThreadServer) -> None:
    case.call_and_validate(base_url=fuzzed.url, checks=CHECKS)


def document(*keys: str, hosts: tuple[str, ...] = ()) -> dict[str, dict[str, dict[str, dict[str, object]]]]:
    config = EngineConfig(server=ServerConfig(allowed_hosts=hosts))
    headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
    with TestClient(create_app(Service(config=config), keys), base_url="http://localhost") as client:
        return client.get("/openapi.json", headers=headers).json()["paths"]  # type: ignore[no-any-return]


def test_a_422_is_never_promised_and_what_a_body_may_get_is() -> None:
    for path, methods in document().items():
        for method, operation in methods.items():
            assert "422" not in operation["responses"]
            assert {"400", "500"} <= set(operation["responses"])
            assert "401" not in operation["responses"]
            if method == "post":
                assert {"413", "415", "503"} <= set(operation["responses"]), path


def test_keys_and_hosts_are_documented_where_they_are_asked_for() -> None:
    for path, methods in document("a-key", hosts=("localhost",)).items():
        for operation in methods.values():
            found = {"401", "403"} & set(operation["responses"])
            assert found == (set() if path in PUBLIC_PATHS else {"401", "403"})
