"""attention=NAME and attention=auto as their users meet them: what is told, where, and how soon."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tokenyard import LLM, AsyncLLM, SamplingParams
from tokenyard.cli import run
from tokenyard.errors import PluginError

Install = Callable[..., None]
REFUSED = "attention 'quantum' cannot run here: no quantum device here; quantum is not installed; here would run: "
WALK = (
    "attention=auto takes works (made elsewhere); not quantum: no quantum device here; "
    "not fails_late: failed to start: RuntimeError: no memory"
)
WARNING = "attention=auto goes on without fails_late: failed to start: RuntimeError: no memory"
SHORT = ["--raw", "--json", "--max-tokens", "1", "--ignore-eos"]


@pytest.fixture(autouse=True)
def _installed(install: Install) -> None:
    install("attention_backends")


def told(capsys: pytest.CaptureFixture[str], code: int, *arguments: str) -> tuple[str, str]:
    """(stdout, stderr) of a command that ends with `code`."""
    assert run(arguments) == code
    captured = capsys.readouterr()
    return captured.out, captured.err


def command(*arguments: str, packages: Path) -> subprocess.CompletedProcess[str]:
    """`tokenyard` in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(packages / "attention_backends"), "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-c", "from tokenyard.cli import main; main()", *arguments]
    return subprocess.run(program, env=environment, capture_output=True, text=True, check=False, timeout=120)


# ---- auto ------------------------------------------------------------------------------------------------------------


def test_generate_tells_the_walk_once_on_stderr(tiny_llama_dir: Path, packages_dir: Path) -> None:
    done = command("generate", "hi", str(tiny_llama_dir), *SHORT, packages=packages_dir)
    assert done.returncode == 0
    assert len(json.loads(done.stdout)["token_ids"]) == 1
    lines = [line for line in done.stderr.splitlines() if "attention" in line]
    assert lines == [f"WARNING: {WARNING}", f"INFO: {WALK}"]


def test_those_who_ask_for_errors_alone_are_told_no_walk(tiny_llama_dir: Path, packages_dir: Path) -> None:
    done = command("generate", "hi", str(tiny_llama_dir), *SHORT, "--log-level", "error", packages=packages_dir)
    assert done.returncode == 0
    assert "attention" not in done.stderr


@pytest.mark.parametrize("engine", ["sync", "overlap"])
def test_llm_says_what_it_takes_to_those_who_listen_and_warns_the_others(
    tiny_llama_dir: Path, caplog: pytest.LogCaptureFixture, engine: str
) -> None:
    overrides = ["kv_cache.num_blocks=8"]
    caplog.set_level(logging.INFO)
    with LLM(tiny_llama_dir, engine=engine, overrides=overrides) as llm:
        report = llm.engine.report
        assert (report.attention_backend, report.attention_description) == ("works", "made elsewhere")
        assert llm.generate("hi", SamplingParams(max_tokens=1), use_tqdm=False)
    about = [(record.levelname, record.message) for record in caplog.records if "attention=auto" in record.message]
    assert about == [("WARNING", WARNING), ("INFO", WALK)]


def test_a_named_backend_is_told_to_those_who_listen_only(
    tiny_llama_dir: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", "hi", str(tiny_llama_dir), *SHORT, "attention=works"]
    _, err = told(capsys, 0, *arguments)
    assert err == ""
    caplog.set_level(logging.INFO)
    told(capsys, 0, *arguments, "--log-level", "info")
    assert "attention=works (made elsewhere)" in caplog.messages
    assert not any("auto" in message for message in caplog.messages)


# ---- A backend that cannot run here ----------------------------------------------------------------------------------


@pytest.mark.parametrize("command_of", [["generate", "hi"], ["chat"]])
def test_a_named_backend_that_cannot_run_is_one_line_before_any_model_is_read(
    command_of: Sequence[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model does not exist: had anything been looked for, the line would be about it."""
    out, err = told(capsys, 2, *command_of, "--model", str(tmp_path / "nowhere"), "attention=quantum")
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith(f"error: {REFUSED}fails_late, works, ")
    assert "torch_native" in line


def test_every_way_to_start_an_engine_refuses_it(tiny_llama_dir: Path) -> None:
    overrides = ["attention=quantum"]
    with pytest.raises(PluginError, match=REFUSED):
        LLM(tiny_llama_dir, overrides=overrides)
    with pytest.raises(PluginError, match=REFUSED):
        LLM(tiny_llama_dir, attention_backend="quantum")
    with pytest.raises(PluginError, match=REFUSED):
        LLM.from_config([f"model.name={tiny_llama_dir}", *overrides])

    async def start() -> None:
        AsyncLLM(tiny_llama_dir, overrides=overrides)

    with pytest.raises(PluginError, match=REFUSED):
        asyncio.run(start())


def test_a_named_backend_whose_factory_fails_is_an_error_that_names_it(
    tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, err = told(capsys, 2, "generate", "hi", str(tiny_llama_dir), "attention=fails_late")
    assert err == "error: attention 'fails_late' failed to start: RuntimeError: no memory\n"


# ---- Asking beforehand -----------------------------------------------------------------------------------------------


def test_the_listing_and_the_explanation_say_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = told(capsys, 0, "plugins", "--json")
    rows = {row["name"]: row for row in json.loads(out)}
    assert rows["quantum"]["status"] == "unavailable"
    assert rows["quantum"]["reason"] == "no quantum device here; quantum is not installed"
    assert rows["fails_late"]["status"] == "active"  # what auto would try first
    out, _ = told(capsys, 0, "plugins", "explain", "quantum")
    assert "cannot be chosen: no quantum device here; quantum is not installed" in out
    assert "never ran on a device: tested without one only" in out


def test_doctor_makes_the_backend_and_tells_what_it_is(
    tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    out, _ = told(capsys, 0, "doctor", str(tiny_llama_dir), "--json")
    assert json.loads(out)["attention"] == {"backend": WALK}
    assert caplog.messages == [WARNING]
    out, _ = told(capsys, 0, "doctor", str(tiny_llama_dir), "--json", "attention=works")
    assert json.loads(out)["attention"] == {"backend": "attention=works (made elsewhere)"}


@pytest.mark.parametrize(
    ("name", "problem"),
    [("quantum", REFUSED), ("fails_late", "attention 'fails_late' failed to start: RuntimeError: no memory")],
)
def test_doctor_finds_a_backend_that_cannot_run(
    name: str, problem: str, tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, _ = told(capsys, 2, "doctor", str(tiny_llama_dir), "--json", f"attention={name}")
    report = json.loads(out)
    assert report["attention"]["problem"].startswith(problem)
    assert report["problems"] == [report["attention"]["problem"]]


def test_doctor_says_who_is_asked_where_only_the_loaded_model_can_tell_what_it_asks(
    window_model: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(window_model("gemma3_text"))  # transformers' own code runs it
    found = json.loads(told(capsys, 0, "doctor", folder, "--json")[0])["attention"]["backend"]
    assert found.startswith("the first that serves the model of: fails_late, works, ")
    assert "quantum" not in found
    out, _ = told(capsys, 0, "doctor", folder, "--json", "attention=works")
    assert json.loads(out)["attention"] == {"backend": "works, if it serves the model"}


def test_doctor_leaves_attention_out_where_something_before_it_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, _ = told(capsys, 2, "doctor", str(tmp_path / "nowhere"), "--json", "attention=quantum")
    report = json.loads(out)
    assert "attention" not in report
    assert len(report["problems"]) == 1
