"""How an engine's own process starts: from anywhere, many at once, and with the error that it would have here."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from own_process import LETTERS, PACKAGE, children_of, letters_llm, nothing_left, probe_installed, short_folder
from plugin_makers import component
from tokenyard import LLM, AsyncLLM, SamplingParams
from tokenyard.errors import (
    CapacityError,
    ConfigError,
    EngineDeadError,
    ModelLoadError,
    PluginError,
    TokenyardError,
    UserError,
)
from tokenyard.ipc.config_values import config_to_values
from tokenyard.launch.build import build_engine_config
from tokenyard.launch.compose import load_engine_config
from tokenyard.testing import catalogue_with

THREE = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def probe() -> Iterator[None]:
    with probe_installed():
        yield


def script(model: Path, more: str = "") -> str:
    return (
        f"import sys; sys.path.insert(0, {str(PACKAGE)!r})\n"
        "from tokenyard import LLM, SamplingParams\n"
        f"llm = LLM({str(model)!r}, max_model_len=128, overrides={LETTERS!r})\n"
        "print('made', flush=True)\n"
        "print(len(llm.generate('hi', SamplingParams(max_tokens=3), use_tqdm=False)[0].outputs[0].token_ids))\n" + more
    )


@pytest.mark.parametrize("way", ["script", "-c", "stdin", "interactive", "notebook"])
def test_prc_07_no_main_guard_is_needed_and_nothing_runs_twice(tiny_llama_dir: Path, tmp_path: Path, way: str) -> None:
    text, arguments = script(tiny_llama_dir), ["-"]
    if way == "script":
        (tmp_path / "three_lines.py").write_text(text)
        arguments = [str(tmp_path / "three_lines.py")]
    elif way == "-c":
        arguments = ["-c", text]
    elif way == "interactive":
        arguments = ["-i", "-q"]
    elif way == "notebook":  # cells run one after the other, in a __main__ without a file, within an event loop
        cells = [f"{line}\n" for line in text.splitlines()]
        arguments = [
            "-c",
            "import asyncio, code\n"
            "async def kernel():\n"
            f"    console = code.InteractiveConsole()\n    for cell in {cells!r}: console.push(cell)\n"
            "asyncio.run(kernel())",
        ]
    done = subprocess.run(
        [sys.executable, *arguments],
        input=text if way in ("stdin", "interactive") else None,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["made", "3"], done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("process", ["in", "own"])
@pytest.mark.parametrize(
    ("overrides", "kind", "told"),
    [
        (["model.name=/nowhere/at/all"], ModelLoadError, "/nowhere/at/all"),
        (["model.max_model_len=100000"], ConfigError, "100000 is more than the 256 tokens"),
        (
            ["model.max_model_len=256", "executor.room=256"],
            CapacityError,
            "room for 15 blocks of 16 tokens .* needs 16",
        ),
        (
            ["executor.start=raise"],
            PluginError,
            "executor 'letters' failed in initialize: LookupError: no letters here",
        ),
        (["attention=flashinfer"], PluginError, "flashinfer"),
        (["scheduler.max_num_seqs=many"], ConfigError, "scheduler.max_num_seqs"),
    ],
    ids=["no model", "too long", "no room", "executor", "attention", "config"],
)
def test_prc_08_a_start_that_fails_raises_what_it_would_raise_here_and_leaves_nothing(
    tiny_llama_dir: Path, process: str, overrides: list[str], kind: type[TokenyardError], told: str
) -> None:
    base = [f"model.name={tiny_llama_dir}", "executor=letters", f"engine.process={process}", "kv_cache.num_blocks=null"]
    with nothing_left(), pytest.raises(kind, match=told) as raised:
        LLM.from_config([*base, *overrides])
    assert isinstance(raised.value, kind)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("start", "told"),
    [
        ("exit", r"ended with exit code 9 at its start \(.+\)"),
        ("kill", r"was killed by SIGKILL at its start \(.+\)"),
    ],
)
def test_prc_08_a_process_that_dies_while_it_starts_is_told_with_the_phase(
    tiny_llama_dir: Path, start: str, told: str
) -> None:
    with nothing_left(), pytest.raises(EngineDeadError, match=told):
        letters_llm(tiny_llama_dir, f"executor.start={start}")


def test_a_start_that_is_interrupted_leaves_nothing(tiny_llama_dir: Path) -> None:
    def interrupt(text: str) -> None:
        if "letters" in text:
            raise KeyboardInterrupt

    config, catalogue = load_engine_config([f"model.name={tiny_llama_dir}", *LETTERS, "executor.start=sleep"])
    for kind in (LLM, AsyncLLM):
        with nothing_left(), pytest.raises(KeyboardInterrupt):
            kind.from_parts(config, catalogue, on_progress=interrupt)


def test_plg_04_a_component_that_only_this_program_has_is_refused_by_name(tiny_llama_dir: Path) -> None:
    config, _ = load_engine_config([f"model.name={tiny_llama_dir}", *LETTERS])
    with nothing_left(), pytest.raises(PluginError, match=r"lacks eviction 'my_own' of .*a component that only"):
        LLM.from_parts(config, catalogue_with(component("eviction", "my_own")))


def test_plg_04_each_process_loads_each_plugin_once(
    tiny_llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = tmp_path / "loaded"
    environment = {**os.environ, "PROBE_LOADED_FILE": str(loaded)}
    more = "import os\nprint(os.getpid(), llm.engine.core._link.process.pid)\n"
    done = subprocess.run(
        [sys.executable, "-c", script(tiny_llama_dir, more)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    pids = done.stdout.splitlines()[-1].split()
    assert loaded.read_text().split() == pids, done.stderr
    assert len(set(pids)) == 2


def test_plg_04_every_setting_is_sent_and_none_assumed(tiny_llama_dir: Path) -> None:
    overrides = [
        f"model.name={tiny_llama_dir}",
        *LETTERS,
        "scheduler.policy.label=x",
        "executor.step_seconds=0.5",
        "model.seed=9223372036854775807",
        "observers=[step_logger]",
        "logits_processors=[{name: no_repeat_ngram, size: 3}]",
        "server.default_chat_template_kwargs={a: [1, b]}",
        "server.api_key_file=null",
        "plugins.disabled=[triton]",
    ]
    config, catalogue = load_engine_config([one for one in overrides if "api_key_file" not in one])
    assert build_engine_config(config_to_values(config), catalogue) == config
    default, default_catalogue = load_engine_config([])
    assert build_engine_config(config_to_values(default), default_catalogue) == default


def start_at_once(count: int, model: Path) -> None:
    barrier = threading.Barrier(count)

    def start() -> int:
        barrier.wait()
        with letters_llm(model) as llm:
            return len(llm.generate("hi", THREE, use_tqdm=False)[0].outputs[0].token_ids)

    with nothing_left(), ThreadPoolExecutor(count) as pool:
        assert list(pool.map(lambda _: start(), range(count))) == [3] * count


def test_prc_05_several_engines_start_at_the_same_moment(tiny_llama_dir: Path) -> None:
    start_at_once(8, tiny_llama_dir)


@pytest.mark.slow
def test_prc_05_eight_engines_start_at_the_same_moment_twenty_times(tiny_llama_dir: Path) -> None:
    for _ in range(20):
        start_at_once(8, tiny_llama_dir)


def test_prc_05_one_starts_after_another_crashed_and_with_a_long_tmpdir(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with short_folder() as folder:
        stale = folder / "ty-stale"
        stale.mkdir()
        (stale / "commands").touch()
        long = folder / ("x" * 120)
        long.mkdir()
        for path in (folder, long):
            monkeypatch.setattr(tempfile, "tempdir", str(path))
            monkeypatch.setenv("TMPDIR", str(path))
            with letters_llm(tiny_llama_dir) as llm:
                assert llm.generate("hi", THREE, use_tqdm=False)[0].finished
        (stale / "commands").unlink()
        stale.rmdir()
        long.rmdir()


def test_the_process_starts_before_the_model_is_looked_for(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenyard.launch import own_process
    from tokenyard.model.files import ModelFiles, resolve_model

    seen: list[int] = []

    def look(*arguments: object, **others: object) -> ModelFiles:
        seen.extend(children_of(os.getpid()))
        return resolve_model(*arguments, **others)  # type: ignore[arg-type]

    monkeypatch.setattr(own_process, "resolve_model", look)
    before = set(children_of(os.getpid()))
    letters_llm(tiny_llama_dir).shutdown()
    assert set(seen) - before


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_a_front_end_that_does_not_come_up_ends_the_engine(
    tiny_llama_dir: Path, kind: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(files: object) -> None:
        raise UserError("no tokenizer")

    monkeypatch.setattr("tokenyard.front_end.load_tokenizer", fail)
    start = time.monotonic()
    with nothing_left(), pytest.raises(UserError, match="no tokenizer"):
        kind(tiny_llama_dir, overrides=LETTERS)
    assert time.monotonic() - start < 60
