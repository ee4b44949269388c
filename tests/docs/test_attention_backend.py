"""The attention backend of the how-to page: it runs as it is printed, keeps the contract, gives the right tokens."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from tokenyard import LLM, SamplingParams
from tokenyard.catalogue import DISABLED_VARIABLE
from tokenyard.plugins import forget_plugins
from tokenyard.testing import AttentionBackendContract

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "how-to" / "write-an-attention-backend.md"


def python_blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def run(code: str) -> dict[str, object]:
    names: dict[str, object] = {"__name__": "page"}
    exec(compile(code, str(PAGE), "exec"), names)
    return names


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The page's files, put where the page says, look installed."""
    monkeypatch.delenv(DISABLED_VARIABLE, raising=False)
    files = {match[1]: block for block in python_blocks() if (match := re.match(r"# src/(\S+)\n", block))}
    assert sorted(files) == ["tokenyard_plain/__init__.py", "tokenyard_plain/backend.py"]
    info = tmp_path / "tokenyard_plain-1.0.dist-info"
    for folder in (tmp_path / "tokenyard_plain", info):
        folder.mkdir()
    for name, code in files.items():
        (tmp_path / name).write_text(code, encoding="utf-8")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tokenyard-plain\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("[tokenyard]\nplain = tokenyard_plain\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    forget_plugins()
    yield
    forget_plugins()
    for name in [name for name in sys.modules if name.partition(".")[0] == "tokenyard_plain"]:
        del sys.modules[name]


class TestPlain(AttentionBackendContract):
    """As the page's class says, with fewer examples."""

    overrides = ("attention=plain",)
    soft_caps = False
    sinks = False
    max_examples = 6


def test_the_pages_suite_claims_what_is_tested_here() -> None:
    (suite,) = [block for block in python_blocks() if "AttentionBackendContract" in block]
    printed = run(suite)["TestPlain"]
    assert isinstance(printed, type)
    assert issubclass(printed, AttentionBackendContract)
    assert list(printed.overrides) == list(TestPlain.overrides)
    assert (printed.soft_caps, printed.sinks) == (TestPlain.soft_caps, TestPlain.sinks)


def test_the_pages_step_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (step,) = [block for block in python_blocks() if "make_case" in block]
    run(step)
    assert capsys.readouterr().out.startswith("torch.Size([6, 4, 64])")


def test_it_gives_the_tokens_of_torch_native(tiny_llama_dir: Path) -> None:
    def tokens(backend: str) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        given = [f"model.name={tiny_llama_dir}", "kv_cache.num_blocks=64", "kv_cache.block_size=4"]
        with LLM.from_config([*given, "model.dtype=float32", "executor.device=cpu", f"attention={backend}"]) as llm:
            return [
                row.outputs[0].token_ids for row in llm.generate(["one two", "the cat sat"], params, use_tqdm=False)
            ]

    assert tokens("plain") == tokens("torch_native")


def test_importing_the_plugin_imports_no_backend() -> None:
    plugin: ModuleType = __import__("tokenyard_plain")
    assert [row.name for row in plugin.tokenyard_attention_backends()] == ["plain"]
    assert "tokenyard_plain.backend" not in sys.modules
