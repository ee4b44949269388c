"""`tokenyard bench`: the fields that programs read, and every mistake in one line."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from bench_command import json_of, output_of, refused
from tokenyard.bench.keys import meaning_of
from tokenyard.bench.settings import SETTINGS
from tokenyard.cli import run
from tokenyard.cli.bench_kinds import KINDS

SMALL = ("bench.num_requests=3", "bench.num_steps=20", "bench.prompt_len=20")
DECODE_FIGURES = {"schedule_us", "update_us", "sum_median_us", "sum_p99_us", "loop_us", "timed_share"}
CHURN_FIGURES = {*DECODE_FIGURES, "add_us"}
ADMIT_FIGURES = {"make_ms", "add_ms", "schedule_ms", "update_ms", "total_ms"}
FACTS = {
    "benchmark": "scheduler",
    "mode": "decode",
    "num_requests": 3,
    "num_running": 3,
    "num_waiting": 0,
    "num_steps": 20,
    "prompt_len": 20,
    "scheduler": "batch",
    "policy": "fcfs",
    "kv_cache": "paged",
    "block_size": 16,
    "prefix_caching": True,
}


def are_positive(row: Mapping[str, object], names: set[str]) -> bool:
    return all(isinstance(row[name], float) and row[name] > 0 for name in names)  # type: ignore[operator]


def test_a_row_names_what_was_measured_and_has_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    row = json_of(capsys, "scheduler", *SMALL)
    assert {name: row[name] for name in FACTS} == FACTS
    assert set(row) == {*FACTS, *DECODE_FIGURES, "python", "load"}
    assert are_positive(row, DECODE_FIGURES)
    assert isinstance(row["python"], str)


def test_the_timed_parts_are_within_the_loop(capsys: pytest.CaptureFixture[str]) -> None:
    row = json_of(capsys, "scheduler", *SMALL)
    timed = float(str(row["schedule_us"])) + float(str(row["update_us"]))
    assert timed <= float(str(row["loop_us"])) + 0.2  # each is rounded
    assert float(str(row["sum_median_us"])) <= float(str(row["sum_p99_us"]))


def test_several_sizes_give_a_list_of_rows_and_one_in_a_list_does_too(capsys: pytest.CaptureFixture[str]) -> None:
    for sizes in ([2, 5], [4]):
        out, _ = output_of(
            capsys, "scheduler", "--json", f"bench.num_requests={sizes}", "bench.num_steps=2", "bench.prompt_len=4"
        )
        rows = json.loads(out)
        assert [row["num_requests"] for row in rows] == [row["num_running"] for row in rows] == sizes


def test_people_get_a_table_and_the_names_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = output_of(capsys, "scheduler", *SMALL)
    header, row = out.splitlines()
    assert header.split()[0] == "num_requests"
    assert len(header.split()) == len(row.split())
    assert "policy fcfs" in err


def test_overrides_choose_what_is_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "bench.yaml"
    file.write_text("scheduler: {max_num_seqs: 2}\n", encoding="utf-8")
    row = json_of(capsys, "scheduler", *SMALL, "kv_cache.block_size=4", "kv_cache.enable_prefix_caching=false")
    assert (row["block_size"], row["prefix_caching"]) == (4, False)
    row = json_of(capsys, "scheduler", *SMALL, "--max-num-seqs", "1")
    assert (row["num_running"], row["num_waiting"]) == (1, 2)
    row = json_of(capsys, "scheduler", *SMALL, "--config", str(file))
    assert (row["num_running"], row["num_waiting"]) == (2, 1)


def test_of_two_values_the_later_one_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert json_of(capsys, "scheduler", *SMALL, "bench.num_requests=2")["num_requests"] == 2


def test_small_blocks_get_as_many_as_they_need(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("bench.num_requests=200", "bench.num_steps=2", "bench.prompt_len=400", "kv_cache.block_size=1")
    assert json_of(capsys, "scheduler", *sizes)["num_running"] == 200


def test_requests_behind_a_full_batch_wait_while_it_decodes(capsys: pytest.CaptureFixture[str]) -> None:
    row = json_of(capsys, "scheduler", *SMALL, "bench.num_waiting=7")
    assert (row["num_requests"], row["num_running"], row["num_waiting"]) == (3, 3, 7)


def test_in_each_step_of_churn_one_request_ends_and_another_one_enters(capsys: pytest.CaptureFixture[str]) -> None:
    row = json_of(capsys, "scheduler", *SMALL, "bench.mode=churn", "bench.num_waiting=10")
    assert are_positive(row, CHURN_FIGURES)
    assert (row["mode"], row["num_steps"], row["num_preemptions"]) == ("churn", 20, 0)
    assert (row["num_running"], row["num_waiting"]) == (2, 11)  # one has ended and one come since the last step
    assert set(row) == {*FACTS, *CHURN_FIGURES, "num_preemptions", "python", "load"}


def test_churn_has_a_thousand_requests_in_line_unless_it_is_told_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = output_of(capsys, "scheduler", *SMALL, "bench.mode=churn")
    header, row = (line.split() for line in out.splitlines())
    assert dict(zip(header, row, strict=True))["num_waiting"] == "1001"


def test_admission_takes_in_every_request_and_half_of_each_prompt_is_cached(
    capsys: pytest.CaptureFixture[str],
) -> None:
    row = json_of(capsys, "scheduler", "bench.mode=admit", "bench.num_requests=30", "bench.prompt_len=100")
    assert are_positive(row, ADMIT_FIGURES)
    assert "num_steps" not in row
    cached = 100 // 2 // 16 * 16
    assert row["scheduled_tokens"] == 30 * (100 - cached)
    parts = sum(float(str(row[name])) for name in ADMIT_FIGURES - {"total_ms"})
    assert float(str(row["total_ms"])) == pytest.approx(parts, abs=0.1)  # rounded


def test_admission_without_a_prefix_cache_computes_everything(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("bench.mode=admit", "bench.num_requests=4", "bench.prompt_len=100")
    row = json_of(capsys, "scheduler", *sizes, "kv_cache.enable_prefix_caching=false")
    assert row["scheduled_tokens"] == 400


def test_what_changes_nothing_without_a_model_is_told(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    json_of(capsys, "scheduler", *SMALL, "executor.device=cpu", "model.max_model_len=4096", "engine.log_stats=false")
    (record,) = caplog.records
    assert record.getMessage().endswith("this changes nothing: executor.device")


def test_no_model_and_no_torch_is_loaded() -> None:
    code = (
        "import sys\nfrom tokenyard.cli import run\n"
        f"code = run(['bench', 'scheduler', '--json', 'plugins.allow=[]', *{SMALL!r}])\n"
        "sys.exit(code or 10 * ('torch' in sys.modules or 'transformers' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_overhead_is_told_part_by_part_and_adds_up_to_the_whole(
    capsys: pytest.CaptureFixture[str], tiny_llama_dir: Path
) -> None:
    row = json_of(
        capsys, "overhead", str(tiny_llama_dir), "bench.num_requests=3", "bench.num_steps=20", "bench.prompt_len=5"
    )
    parts = {part["part"]: part for part in row["parts"]}  # type: ignore[attr-defined]
    steps = {"scheduler.schedule", "scheduler.update_from_output", "executor.execute_model", "executor.sample_tokens"}
    for name in (*steps, "engine.step", "front_end.process"):
        assert parts[name]["calls"] == 1.0
    owners = {name: (parts[name]["plugin"], parts[name]["distribution"]) for name in ("kv_cache.commit", "rest")}
    assert owners == {"kv_cache.commit": ("paged", "tokenyard"), "rest": (None, None)}
    assert parts["eviction.pop"]["plugin"] == "lru"
    assert parts["front_end.process"]["plugin"] is None
    assert parts["scheduler.schedule"]["plugin"] == "batch"
    assert 1 / 20 <= parts["kv_cache.allocate_next"]["calls"] <= 6 / 20  # each crosses one or two block boundaries
    assert sum(part["self_us"] for part in parts.values()) == pytest.approx(row["wall_us"], rel=0.02)
    assert sum(part["share"] for part in parts.values()) == pytest.approx(1.0, abs=0.01)
    assert 0 < float(str(row["overhead_us"])) < float(str(row["wall_us"]))
    assert (row["benchmark"], row["engine"], row["policy"], row["device"]) == ("overhead", "sync", "fcfs", "cpu")
    assert float(str(row["timers_us"])) >= 0


def test_overhead_for_people_is_a_table_with_the_cost_of_the_timers(
    capsys: pytest.CaptureFixture[str], tiny_llama_dir: Path
) -> None:
    sizes = ("bench.num_requests=2", "bench.num_steps=2", "bench.prompt_len=3")
    out, err = output_of(capsys, "overhead", str(tiny_llama_dir), *sizes)
    names = [line.split()[0] for line in out.splitlines()]
    assert names[0] == "part"
    assert names[-1] == "rest"
    assert "scheduler.schedule [batch] " in out
    assert "the timers cost" in err


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["what to measure is missing", "scheduler, overhead, attention", "serve"]),
        (["throughput", "bench.shapes=8x128"], ["'8x128' is no shape", "8x128+64"]),
        (["throughput", "bench.shapes=[]"], ["bench.shapes", "at least one"]),
        (["throughput", "bench.num_rounds=0"], ["bench.num_rounds", "1 to 10000", "got 0"]),
        (["throughput", "bench.seed=-1"], ["bench.seed", "got -1"]),
        (["throughput", "bench.shapes={a: 1}"], ["bench.shapes"]),
        (["throughput", "--input-len", "8"], ["--num-prompts, --output-len is missing", "bench.shapes=8x128+64"]),
        (
            ["throughput", "--num-prompts", "1", "--input-len", "8", "--output-len", "0"],
            ["'1x8+0' is no shape", "numbers above 0"],
        ),
        (
            ["throughput", "--num-prompts=1", "--input-len=8", "--output-len=1", "bench.shapes=1x1+1"],
            ["--num-prompts, --input-len and --output-len", "give one of the two"],
        ),
        (["throughput", "--batch-size", "8"], ["--batch-size is for latency, not for throughput", "--num-prompts"]),
        (["latency", "--num-prompts", "8"], ["--num-prompts is for throughput, not for latency", "--batch-size"]),
        (["latency", "--batch-size", "many"], ["bench.batch_size", "'many'"]),
        (["startup", "--input-len", "8"], ["--input-len is for throughput and latency", "which has --num-iters"]),
        (["scheduler", "--num-iters", "8"], ["--num-iters is for latency and startup, not for scheduler"]),
        (["latency", "bench.num_iters_warmup=-1"], ["bench.num_iters_warmup", "0 to 10000", "got -1"]),
        (["latency", "bench.batch_size=0"], ["bench.batch_size", "got 0"]),
        (["latency", "bench.shapes=1x1+1"], ["unknown key 'bench.shapes'", "batch_size"]),
        (["startup", "bench.num_iters=0"], ["bench.num_iters", "got 0"]),
        (["startup", "scheduler.max_num_seq=3"], ["scheduler.max_num_seqs"]),
        (["schedular"], ["did you mean 'scheduler'"]),
        (["scheduler", "smollm2-135m"], ["runs no model"]),
        (["scheduler", "bench.num_request=2"], ["'bench.num_request'", "did you mean 'bench.num_requests'", "mode"]),
        (["scheduler", "bench.num_requests=0"], ["bench.num_requests", "1 to 16384", "got 0"]),
        (["scheduler", "bench.num_requests=many"], ["bench.num_requests", "'many'"]),
        (["scheduler", "bench.num_requests=[]"], ["bench.num_requests", "at least one"]),
        (["scheduler", "bench.num_requests=[4,-1]"], ["bench.num_requests", "got -1"]),
        (["scheduler", "bench.num_requests="], ["bench.num_requests"]),
        (["scheduler", "bench.num_steps=true"], ["bench.num_steps", "true"]),
        (["scheduler", "bench.num_steps=1e9"], ["bench.num_steps", "a whole number"]),
        (["scheduler", "bench.prompt_len=0"], ["bench.prompt_len", "tokens"]),
        (["scheduler", "bench.mode=drain"], ["bench.mode", "'decode', 'churn', 'admit'"]),
        (["scheduler", "bench.mode=admit", "bench.num_waiting=3"], ["bench.num_waiting=3 has no effect"]),
        (["scheduler", "bench.num_waiting=-1"], ["bench.num_waiting", "0 to 16384", "got -1"]),
        (["scheduler", "bench.mode=admit", "bench.num_steps=3"], ["bench.num_steps=3 has no effect"]),
        (["scheduler", "bench={num_steps: 3}"], ["'bench'", "bench.num_requests=32"]),
        (["scheduler", "scheduler=nope"], ["nope", "fcfs"]),
        (["scheduler", "kv_cache.num_blocks=null"], ["kv_cache.num_blocks=null", "give a number"]),
        (["scheduler", "model.max_model_len=null"], ["model.max_model_len=null", "give a number"]),
        (["scheduler", "model.max_model_len=-1"], ["model.max_model_len=-1", "give a number"]),
        (["scheduler", "kv_cache.num_blocks=5"], ["kv_cache.num_blocks=5 is too few", "bench.num_requests"]),
        (
            ["scheduler", "bench.mode=admit", "bench.num_requests=9", "scheduler.max_num_batched_tokens=2500"],
            ["one step took in", "of 9 requests", "scheduler.max_num_batched_tokens"],
        ),
        (["overhead", "/no/such/model"], ["/no/such/model"]),
        (["overhead", "bench.mode=decode"], ["unknown key 'bench.mode'", "num_requests"]),
        (["overhead", "bench.num_requests=8", "scheduler.max_num_seqs=4"], ["scheduler.max_num_seqs=4", "8 requests"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistake_is_one_line_that_names_it(
    capsys: pytest.CaptureFixture[str], arguments: list[str], parts: list[str]
) -> None:
    line = refused(capsys, "bench", *arguments)
    for part in parts:
        assert part in line


def test_a_batch_that_preempts_has_no_steady_cost(capsys: pytest.CaptureFixture[str]) -> None:
    # Exactly the blocks of the timed steps: those of the prefill's steps, in which the first ones decode, are missing.
    sizes = ("bench.num_requests=8", "bench.num_steps=64", "bench.prompt_len=64", "scheduler.max_num_batched_tokens=16")
    line = refused(capsys, "bench", "scheduler", *sizes, "kv_cache.num_blocks=72")
    assert "the batch did not stay as it was" in line
    assert "kv_cache.num_blocks" in line


def test_a_batch_that_ends_has_no_steady_cost(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "bench", "scheduler", *SMALL, "model.max_model_len=40")
    assert "the batch did not stay as it was" in line


def test_overhead_refuses_what_the_model_or_the_cache_cannot_hold(
    capsys: pytest.CaptureFixture[str], tiny_llama_dir: Path
) -> None:
    line = refused(capsys, "bench", "overhead", str(tiny_llama_dir), "bench.prompt_len=250", "bench.num_steps=2")
    assert "the model takes 256" in line
    sizes = ("bench.num_requests=4", "bench.num_steps=20", "bench.prompt_len=20")
    line = refused(capsys, "bench", "overhead", str(tiny_llama_dir), *sizes, "kv_cache.num_blocks=4")
    assert "kv_cache.num_blocks=4" in line


def test_the_keys_of_the_benchmark_are_none_of_the_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "`tokenyard bench` takes keys of its own" in refused(capsys, "config", "bench.num_requests=3")
    file = tmp_path / "my.yaml"
    file.write_text("bench: {num_requests: 3}\n", encoding="utf-8")
    line = refused(capsys, "bench", "scheduler", "--config", str(file))
    assert "on its command line" in line
    assert "my.yaml" in line
    assert run(["config", "--json"]) == 0
    assert not [key for key in json.loads(capsys.readouterr().out) if key.startswith("bench")]


# ---- Help -----------------------------------------------------------------------------------------------------------

FLAGS = {
    "throughput": {"--num-prompts", "--input-len", "--output-len"},
    "latency": {"--batch-size", "--input-len", "--output-len", "--num-iters", "--num-iters-warmup"},
    "startup": {"--num-iters"},
    "scheduler": set(),
    "overhead": set(),
    "attention": set(),
    "serve": {
        "--port",
        "--random-input-len",
        "--random-output-len",
        "--random-prefix-len",
        "--num-prompts",
        "--max-concurrency",
        "--seed",
        "--num-warmups",
    },
}


def help_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        run(["bench", *arguments])
    assert stopped.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("order", [("{}", "--help"), ("-h", "{}"), ("--json", "{}", "bench.seed=3", "-h")])
def test_the_help_of_a_kind_has_its_keys_and_its_flags_and_no_others(
    capsys: pytest.CaptureFixture[str], kind: str, order: tuple[str, ...]
) -> None:
    text = help_of(capsys, *(word.format(kind) for word in order))
    own = text.partition("\nengine:")[0]
    assert own.startswith(f"usage: tokenyard bench {kind} ")
    assert set(re.findall(r"^  bench\.(\w+)=", own, re.MULTILINE)) == {
        key.name for key in dataclasses.fields(SETTINGS[kind])
    }
    assert set(re.findall(r"^  (--[\w-]+) N\b", own, re.MULTILINE)) == FLAGS[kind]


def test_every_key_has_a_default_and_a_meaning_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys, "attention", "-h")
    assert "  bench.shapes=[32x512,1x16384,256+256]\n      SEQUENCESxCONTEXT, or [SEQUENCESx]QUERY+CACHED\n" in text
    assert "  bench.sliding_window=null\n" in text
    assert set(SETTINGS) == set(KINDS)
    for settings_type in SETTINGS.values():
        assert all(meaning_of(key) for key in dataclasses.fields(settings_type))


def test_the_help_of_the_command_says_where_the_keys_are(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys, "--help")
    assert "tokenyard bench KIND --help" in " ".join(text.split())
    assert "--batch-size N        latency: requests at once" in text


@pytest.mark.parametrize("kind", ["scheduler", "attention"])
def test_a_mistake_beside_a_key_that_changes_nothing_is_told_alone(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    assert "unknown key 'model.device'" in refused(capsys, "bench", kind, "engine=overlap", "model.device=cuda")
    assert caplog.messages == []
