"""Servers that the tests of a module share: starting an engine for each test would take too long."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from http_server import ThreadServer, running_server


@pytest.fixture(scope="module")
def server(tiny_llama_dir: Path) -> Iterator[ThreadServer]:
    """A tiny Llama behind HTTP, without API keys."""
    with running_server(model=tiny_llama_dir) as running:
        yield running


@pytest.fixture
def client(server: ThreadServer) -> openai.OpenAI:
    """The official client of the module's server."""
    return server.client
