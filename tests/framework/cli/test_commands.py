"""The commands, run in this process: what they print, and where."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenyard import __version__
from tokenyard.cli import run
from tokenyard.cli.phases import Phases, process_age
from tokenyard.primitive_caches import CAPACITY, bound_primitive_caches
from tokenyard.thread_waits import SPIN_COUNT, share_cores

Install = Callable[..., None]


def output_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    """(stdout, stderr) of a command that succeeds."""
    code = run(arguments)
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out, captured.err


def test_the_answer_contains_paris_and_the_phases_are_told(
    capsys: pytest.CaptureFixture[str], default_model_dir: Path
) -> None:
    out, err = output_of(
        capsys, "generate", "What is the capital of France?", "--max-tokens", "16", "--temperature", "0"
    )
    assert "Paris" in out
    for phase in ("interpreter", "config", "imports", "model", "first token", "rest"):
        assert phase in err


def test_generate_prints_json_for_programs(capsys: pytest.CaptureFixture[str], default_model_dir: Path) -> None:
    out, err = output_of(capsys, "generate", "Hi", "--json", "--raw", "--max-tokens", "3", "--ignore-eos")
    answer = json.loads(out)
    assert len(answer["token_ids"]) == 3
    assert answer["finish_reason"] == "length"
    assert set(answer["phases"]) == {"interpreter", "config", "imports", "model", "first token", "rest"}
    assert err == ""


def test_raw_completion_of_a_question_ends_at_once_with_this_model(
    capsys: pytest.CaptureFixture[str], default_model_dir: Path
) -> None:
    arguments = ["What is the capital of France?", "--json", "--max-tokens", "16", "--temperature", "0"]
    raw = json.loads(output_of(capsys, "generate", *arguments, "--raw")[0])
    templated = json.loads(output_of(capsys, "generate", *arguments)[0])
    assert len(raw["prompt_token_ids"]) < len(templated["prompt_token_ids"])
    assert raw["text"] != templated["text"]


def test_a_prompt_may_contain_anything_and_come_from_stdin(
    capsys: pytest.CaptureFixture[str], default_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--json", "--raw", "--max-tokens", "1", "--temperature", "0"]
    given = json.loads(output_of(capsys, "generate", "x=1 scheduler=fcfs ~y", *flags)[0])
    monkeypatch.setattr("sys.stdin", io.StringIO("x=1 scheduler=fcfs ~y"))
    read = json.loads(output_of(capsys, "generate", "-", *flags)[0])
    assert given["prompt_token_ids"] == read["prompt_token_ids"]


def test_what_looks_like_an_override_is_a_prompt_a_path_or_an_override(
    capsys: pytest.CaptureFixture[str], tiny_llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "seed=9").mkdir()
    (tmp_path / "epoch=3").symlink_to(tiny_llama_dir)
    flags = ["--raw", "--json", "--max-tokens", "1", "--ignore-eos"]
    for words in (["x=" + "a" * 100, "epoch=3"], ["seed=4 is h", "epoch=3", "seed=9"], ["seed=9", "hi", "epoch=3"]):
        answer = json.loads(output_of(capsys, "generate", *words, *flags)[0])
        assert answer["model"] == "epoch=3"
    assert json.loads(output_of(capsys, "config", "--json", "seed=9")[0])["seed"]["value"] == 9


def test_flags_words_and_overrides_may_be_mixed(capsys: pytest.CaptureFixture[str], tiny_llama_dir: Path) -> None:
    out, _ = output_of(
        capsys,
        *("generate", "--raw", "hi", "kv_cache.block_size=4", "--max-tokens", "5", str(tiny_llama_dir)),
        *("scheduler=fcfs", "--json", "--max-model-len", "64", "--ignore-eos"),
    )
    assert len(json.loads(out)["token_ids"]) == 5


def test_hyd_01_a_model_path_is_taken_verbatim(
    capsys: pytest.CaptureFixture[str], tiny_llama_dir: Path, tmp_path: Path
) -> None:
    for name in ("epoch=3", "a b, c: @*#$ {x} ${y} 'q' \"d\"", "back\\slash"):
        link = tmp_path / name
        link.symlink_to(tiny_llama_dir)
        flags = ["--json", "--raw", "--max-tokens", "1"]
        by_flag = json.loads(output_of(capsys, "generate", "hi", "--model", str(link), *flags)[0])
        by_word = json.loads(output_of(capsys, "generate", "hi", str(link), *flags)[0])
        assert by_flag["model"] == by_word["model"] == str(link)


def test_chat_remembers_its_turns(
    capsys: pytest.CaptureFixture[str], default_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "My name is Anna. Remember it.\nWhat is my name?\n/reset\nWhat is my name?\n/exit\nnever said\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(said))
    out, _ = output_of(capsys, "chat", "--temperature", "0", "--max-tokens", "24")
    answers = out.splitlines()
    remembered = [line for line in answers if "Anna" in line]
    assert remembered
    assert len([line for line in answers if line.strip()]) >= 3


def test_a_chat_survives_a_message_that_is_too_long(
    capsys: pytest.CaptureFixture[str], default_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("word " * 200 + "\nSay hi.\n"))
    assert run(["chat", "--temperature", "0", "--max-tokens", "4", "--max-model-len", "128"]) == 1
    out, err = capsys.readouterr()
    assert "the prompt has" in err
    assert out.strip()


def test_plugins_lists_the_active_ones_and_explains_one(capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(output_of(capsys, "plugins", "--json")[0])
    assert {row["name"] for row in rows if row["status"] == "active"} >= {"sync", "fcfs", "batch", "paged", "inproc"}
    assert set(rows[0]) >= {"name", "kind", "distribution", "version", "api_version", "status", "reason"}
    table, _ = output_of(capsys, "plugins")
    for name in ("KIND", "torch_native", "fcfs"):
        assert name in table
    explained, _ = output_of(capsys, "plugins", "explain", "fcfs")
    assert "scheduler=fcfs" in explained
    found = json.loads(output_of(capsys, "plugins", "explain", "torch_native", "--json")[0])
    assert found["verdicts"][0]["can_be_chosen"] is True


def test_plugins_explain_auto_tells_its_walk(capsys: pytest.CaptureFixture[str]) -> None:
    walk = ["cpu_native", "flashinfer", "triton", "xformers", "torch_native"]
    out, _ = output_of(capsys, "plugins", "explain", "auto")
    assert out.startswith("attention=auto is no plugin: it takes the first backend that runs here")
    assert out.endswith(f"in this order: {', '.join(walk)}\n")
    assert json.loads(output_of(capsys, "plugins", "explain", "auto", "--json")[0]) == {
        "name": "auto",
        "verdicts": [],
        "walk": walk,
    }


def test_a_third_party_plugin_of_an_older_minor_api_runs(
    capsys: pytest.CaptureFixture[str], install: Install, tiny_llama_dir: Path
) -> None:
    from tokenyard.plugins import load_catalogue

    install("frozen_v1_0")
    (entry,) = [entry for entry in load_catalogue().entries() if "frozen" in entry.provider.distribution]
    assert entry.descriptor.api_version == (1, 0)
    out, _ = output_of(
        capsys, "generate", "hi", str(tiny_llama_dir), "--raw", "--json", "--max-tokens", "2", f"scheduler={entry.name}"
    )
    assert json.loads(out)["finish_reason"]


def test_plugins_allow_keeps_third_parties_out_unloaded(capsys: pytest.CaptureFixture[str], install: Install) -> None:
    install("good")
    rows = json.loads(output_of(capsys, "plugins", "--json", "plugins.allow=[]")[0])
    assert {row["status"] for row in rows if row["distribution"] != "tokenyard"} == {"blocked"}
    assert {row["name"] for row in rows if row["status"] == "active"} >= {"sync", "fcfs"}


def test_config_tells_the_origin_of_each_value(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("kv_cache:\n  block_size: 8\n")
    arguments = ["--max-num-seqs", "4", "--config", str(file), "model.dtype=float32"]
    found = json.loads(output_of(capsys, "config", "--json", *arguments)[0])
    assert found["scheduler.max_num_seqs"] == {"value": 4, "origin": "flag --max-num-seqs"}
    assert found["kv_cache.block_size"]["value"] == 8
    assert "my.yaml" in found["kv_cache.block_size"]["origin"]
    assert found["model.dtype"]["origin"] == "override model.dtype=float32"
    assert found["scheduler.policy.name"]["origin"] == "configs/scheduler/fcfs.yaml"
    assert found["kv_cache.num_blocks"] == {"value": None, "origin": "default"}
    shown, _ = output_of(capsys, "config", *arguments)
    assert "flag --max-num-seqs" in shown
    file.write_text(shown)  # what `config` prints is a config file again
    again = json.loads(output_of(capsys, "config", "--json", "--config", str(file))[0])
    assert {key: row["value"] for key, row in again.items()} == {key: row["value"] for key, row in found.items()}


def test_doctor_says_which_decoder_a_model_takes(
    capsys: pytest.CaptureFixture[str], tiny_llama_dir: Path, tmp_path: Path
) -> None:
    report = json.loads(output_of(capsys, "doctor", str(tiny_llama_dir), "--json")[0])
    assert "fast decoder" in report["model"]["decoder"]
    assert report["problems"] == []
    shown, _ = output_of(capsys, "doctor", str(tiny_llama_dir))
    assert "no problem found" in shown
    assert run(["doctor", str(tmp_path / "nothing")]) == 2
    assert "nothing" in capsys.readouterr().out


def test_the_command_line_lets_threads_sleep_unless_the_user_says_otherwise() -> None:
    for given, expected in (
        ({}, {"GOMP_SPINCOUNT": SPIN_COUNT}),
        ({"GOMP_SPINCOUNT": "5"}, {"GOMP_SPINCOUNT": "5"}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, {"OMP_WAIT_POLICY": "ACTIVE"}),
    ):
        environment = dict(given)
        share_cores(environment)
        assert environment == expected


def test_the_caches_of_compiled_operators_are_bounded_unless_the_user_says_otherwise() -> None:
    environment = {"LRU_CACHE_CAPACITY": "5", "OTHER": "1"}
    bound_primitive_caches(environment)
    assert environment == {"LRU_CACHE_CAPACITY": "5", "OTHER": "1", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": CAPACITY}


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert output_of(capsys, "--version")[0].strip() == f"tokenyard {__version__}"
    for name in ("generate", "chat", "plugins", "config", "doctor"):
        assert name in output_of(capsys, "--help")[0]
        with pytest.raises(SystemExit) as caught:
            run([name, "--help"])
        assert caught.value.code == 0
        assert "--max-num-seqs" in capsys.readouterr().out


def test_phases_add_up() -> None:
    phases = Phases()
    phases.end("a")
    phases.end("b")
    phases.end("a")
    assert list(phases.seconds) == ["interpreter", "a", "b"]
    assert phases.total == pytest.approx(sum(phases.seconds.values()))
    assert process_age() >= 0


def test_debugging_is_about_us_and_not_about_hydra(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    root = logging.getLogger()
    level = root.level
    try:
        output_of(capsys, "config", "--log-level", "debug")
        assert root.level == logging.DEBUG
    finally:
        root.setLevel(level)
    assert [record.name for record in caplog.records if record.name.startswith("hydra")] == []


def test_help_of_serve_explains_model_and_every_flag_with_a_phrase(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(["serve", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "MODEL is a model's name, a folder" in text
    assert "--no-disable" not in text
