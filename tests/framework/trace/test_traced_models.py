"""Engines with a model, in this process, in their own and behind HTTP, are traced where they run."""

from __future__ import annotations

import json
import re
import signal
import urllib.request
from pathlib import Path

import pytest
from http_server import DEADLINE, running_server, server_process, wait_for
from tokenyard import LLM, SamplingParams
from tokenyard.errors import ConfigError
from tokenyard.replay.run import replay
from tokenyard.trace.diff import diff

PROMPTS = ["hi", "the hi the", "hihihi the the", "he", "the hi the hi the"]
GREEDY = SamplingParams(temperature=0, max_tokens=12)
SMALL = ("kv_cache.num_blocks=12", "scheduler.max_num_seqs=3", "kv_cache.block_size=4", "model.max_model_len=48")


@pytest.mark.parametrize("loop", ["sync", "overlap"])
@pytest.mark.parametrize("process", ["in", "own"])
def test_what_a_model_was_given_is_decided_again_without_it(
    tiny_llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: str, loop: str
) -> None:
    monkeypatch.chdir(tmp_path)
    trace = ["trace.path=trace.jsonl", "trace.chrome=chrome.json"]
    overrides = [*SMALL, *trace, f"engine.process={process}", f"engine={loop}"]
    with LLM(tiny_llama_dir, dtype="float32", overrides=overrides) as llm:
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        llm.generate(PROMPTS[2:], SamplingParams(n=2, seed=1, max_tokens=9, prompt_logprobs=1), use_tqdm=False)
    result = replay(tmp_path / "trace.jsonl")
    assert result.difference is None
    assert not result.notes
    assert result.num_steps > 20
    assert json.loads((tmp_path / "chrome.json").read_text())


def test_two_runs_of_one_model_are_alike(tiny_llama_dir: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        overrides = [*SMALL, f"trace.path={tmp_path / name}"]
        with LLM(tiny_llama_dir, dtype="float32", overrides=overrides) as llm:
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    result = diff(tmp_path / "a", tmp_path / "b")
    assert result.difference is None
    assert not result.config


@pytest.mark.parametrize("process", ["in", "own"])
def test_a_file_that_exists_is_refused_before_the_model_is_loaded(
    tiny_llama_dir: Path, tmp_path: Path, process: str
) -> None:
    (tmp_path / "old").write_text("precious")
    with pytest.raises(ConfigError, match="exists already"):
        LLM(tiny_llama_dir, overrides=[f"trace.path={tmp_path / 'old'}", f"engine.process={process}"])
    assert (tmp_path / "old").read_text() == "precious"


def test_an_engine_that_does_not_load_leaves_no_file(tiny_llama_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        LLM(tiny_llama_dir, overrides=[f"trace.path={tmp_path / 'new'}", "model.max_model_len=100000000"])
    assert not list(tmp_path.iterdir())


def test_a_shadow_is_told_in_the_metrics_of_a_server(tiny_llama_dir: Path) -> None:
    with running_server(["scheduler.shadow=priority", "scheduler.max_num_seqs=1"], model=tiny_llama_dir) as server:
        for _ in range(2):
            server.client.completions.create(model=str(tiny_llama_dir), prompt="hi", max_tokens=2, temperature=0)
        _, text = server.get("/metrics")
    found = re.findall(r'tokenyard:shadow_decisions_total\{agrees="(\w+)".*point="waiting_order"\} (\S+)', text)
    assert sorted(found) == [("false", "0.0"), ("true", "2.0")]


@pytest.mark.slow
def test_a_server_that_is_stopped_leaves_a_whole_trace(tiny_llama_dir: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    arguments = [str(tiny_llama_dir), "--dtype=float32", f"trace.path={trace}", *SMALL, "scheduler.shadow=priority"]
    with server_process([*arguments, "--log-level=info"]) as server:
        for prompt in PROMPTS:
            body = json.dumps({"model": str(tiny_llama_dir), "prompt": prompt, "max_tokens": 8}).encode()
            headers = {"content-type": "application/json"}
            request = urllib.request.Request(f"{server.url}/v1/completions", body, headers)
            with urllib.request.urlopen(request, timeout=DEADLINE) as answer:
                assert answer.status == 200
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(DEADLINE)
        assert "shadow policy 'priority' would have decided otherwise" in server.log
    result = replay(trace)
    assert result.difference is None
    assert not result.notes


@pytest.mark.slow
def test_an_engine_that_is_killed_leaves_a_trace_that_says_so_and_its_successor_has_its_own(
    tiny_llama_dir: Path, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    arguments = [str(tiny_llama_dir), "--dtype=float32", f"trace.path={trace}", "server.restart_engine=true"]
    with server_process(arguments) as server:
        (engine,) = [process for process in server.family() if process.pid != server.process.pid]
        engine.kill()
        wait_for(lambda: (tmp_path / "trace.2.jsonl").exists(), "no other engine is started")
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(DEADLINE)
    assert "has no end" in " ".join(replay(trace).notes)
