"""A Hub of the test's own with the cache in front of it, and tokenizers for the tests of chats and text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import fake_hub
import pytest
from fake_hub import FakeHub
from gguf_files import TinyVocabulary
from gguf_tokenizers import write_vocabulary
from tokenyard.model.files import resolve_model
from tokenyard.model.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "hub"


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A server, and an empty cache in front of it."""
    with fake_hub.run_fake_hub() as running:
        fake_hub.use_in_process(monkeypatch, cache, running.url)
        yield running


@pytest.fixture
def offline(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of a process without a network."""
    fake_hub.use_in_process(monkeypatch, cache, None)
    return cache


@pytest.fixture
def write_here(tmp_path: Path) -> Callable[[TinyVocabulary], Path]:
    """Writes a GGUF file that has a vocabulary and an embedding only."""
    return lambda vocabulary: write_vocabulary(tmp_path / "vocabulary.gguf", vocabulary)


@pytest.fixture(scope="session")
def tiny(tiny_llama_dir: Path) -> Tokenizer:
    """The tokenizer of the tiny Llama, with a ChatML template."""
    return load_tokenizer(resolve_model(str(tiny_llama_dir)))


@pytest.fixture
def with_template(make_llama: Callable[..., Path]) -> Callable[..., Tokenizer]:
    """The tiny tokenizer with another chat template (None: without one) or other settings in tokenizer_config.json."""

    def make(template: str | None, **config: object) -> Tokenizer:
        folder = make_llama()
        (folder / "chat_template.jinja").unlink()
        if template is not None:
            (folder / "chat_template.jinja").write_text(template)
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
        return load_tokenizer(resolve_model(str(folder)))

    return make
