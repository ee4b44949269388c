"""`tokenyard bench throughput`, `latency` and `startup`: figures that add up, and nothing that is reused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench_command import json_of, output_of, refused
from tokenyard import LLM
from tokenyard.bench.startup import Start
from tokenyard.outputs import RequestOutput


def small_model(folder: Path) -> tuple[str, ...]:
    """A model and sizes that make a fast benchmark."""
    return str(folder), "model.max_model_len=64", "kv_cache.num_blocks=40", "model.dtype=float32"


def test_throughput_counts_every_token_and_reuses_nothing(
    capsys: pytest.CaptureFixture[str], tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached: list[int] = []
    generate = LLM.generate

    def look(llm: LLM, *arguments: object, **keywords: object) -> list[RequestOutput]:
        outputs = generate(llm, *arguments, **keywords)  # type: ignore[arg-type]
        cached.extend(output.num_cached_tokens for output in outputs)
        return outputs

    monkeypatch.setattr(LLM, "generate", look)
    shapes = "bench.shapes=[2x16+4,3x16+5]"
    rest = [shapes, "bench.num_rounds=3", "attention=torch_native"]
    rows = json.loads(output_of(capsys, "throughput", "--json", *small_model(tiny_llama_dir), *rest)[0])
    assert [row["shape"] for row in rows] == ["2x16+4", "3x16+5"]
    for row in rows:
        assert (row["benchmark"], row["dtype"], row["attention"]) == ("throughput", "float32", "torch_native")
        assert row["attention_description"] == ""
        assert sorted(row["rounds_s"])[1] == row["seconds"]
        num_output = row["num_requests"] * row["output_len"]
        assert row["output_tokens_per_s"] == pytest.approx(num_output / row["seconds"], rel=0.02)
        num_total = num_output + row["num_requests"] * row["input_len"]
        assert row["total_tokens_per_s"] == pytest.approx(num_total / row["seconds"], rel=0.02)
        assert (row["warm_up"], row["num_cached_tokens"]) == ("1x8+4", 0)
        assert {"model", "device", "engine", "policy", "threads", "tokenyard", "torch", "python", "load"} <= set(row)
    assert len(cached) == 1 + 3 * (2 + 3)
    assert set(cached) == {0}


@pytest.mark.parametrize("engine", ["sync", "overlap"])
def test_a_shape_given_again_finds_an_empty_prefix_cache(
    capsys: pytest.CaptureFixture[str], tiny_llama_dir: Path, engine: str
) -> None:
    shapes = "bench.shapes=[2x33+4,2x33+5]"  # the same prompts, of two whole blocks
    out, _ = output_of(
        capsys, "throughput", "--json", *small_model(tiny_llama_dir), shapes, "bench.num_rounds=2", f"engine={engine}"
    )
    assert [row["num_cached_tokens"] for row in json.loads(out)] == [0, 0]


def test_throughput_for_people_is_a_table_and_progress_and_facts_on_stderr(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, tiny_llama_dir: Path
) -> None:
    shapes = ("bench.shapes=[2x16+4,1x3+2]", "bench.num_rounds=2")
    shown, about = output_of(capsys, "throughput", *small_model(tiny_llama_dir), *shapes)
    header, *rows = shown.splitlines()
    assert header.split()[:2] == ["shape", "output_tokens_per_s"]
    assert [row.split()[0] for row in rows] == ["2x16+4", "1x3+2"]
    assert "fast decoder (llama)" in about
    assert "1x8+4 to warm up" in about
    told = [record.getMessage() for record in caplog.records if record.name.startswith("tokenyard.bench")]
    assert told == [f"round {number} of 2: {shape}" for number in (1, 2) for shape in ("2x16+4", "1x3+2")]


def test_three_flags_are_one_shape(capsys: pytest.CaptureFixture[str], tiny_llama_dir: Path) -> None:
    flags = ("--num-prompts", "2", "--input-len", "5", "--output-len", "3")
    row = json_of(capsys, "throughput", *small_model(tiny_llama_dir), *flags)
    assert (row["shape"], row["num_requests"], row["input_len"], row["output_len"]) == ("2x5+3", 2, 5, 3)


def test_latency_tells_percentiles_in_order_with_the_names_of_vllm(
    capsys: pytest.CaptureFixture[str], tiny_llama_dir: Path
) -> None:
    flags = (
        "--batch-size",
        "2",
        "--input-len",
        "8",
        "--output-len",
        "5",
        "--num-iters",
        "4",
        "--num-iters-warmup",
        "1",
    )
    row = json_of(capsys, "latency", *small_model(tiny_llama_dir), *flags)
    latencies, percentiles = row["latencies"], row["percentiles"]
    assert isinstance(latencies, list)
    assert isinstance(percentiles, dict)
    values = list(percentiles.values())
    assert list(percentiles) == ["10", "25", "50", "75", "90", "99"]
    assert values == sorted(values)
    assert (values[0], values[-1]) == (min(latencies), max(latencies))
    assert row["avg_latency"] == pytest.approx(sum(latencies) / 4, abs=2e-4)  # each is rounded
    for name in ("ttft", "itl"):
        mean, median, p99 = (float(str(row[f"{figure}_{name}_ms"])) for figure in ("mean", "median", "p99"))
        assert 0 < median <= p99 <= 1000 * max(latencies)
        assert 0 < mean <= p99
    names = ("batch_size", "input_len", "output_len", "num_iters_warmup", "num_iters")
    assert [row[name] for name in names] == [2, 8, 5, 1, 4]


def test_first_token_and_gaps_are_within_the_latency_of_a_batch_of_one(
    capsys: pytest.CaptureFixture[str], tiny_llama_dir: Path
) -> None:
    sizes = ("bench.batch_size=1", "bench.input_len=8", "bench.output_len=40", "bench.num_iters=3")
    row = json_of(capsys, "latency", *small_model(tiny_llama_dir), *sizes)
    parts = float(str(row["mean_ttft_ms"])) + 39 * float(str(row["mean_itl_ms"]))
    whole = 1000 * float(str(row["avg_latency"]))
    assert 0 < parts <= whole + 0.2  # each is rounded


def test_a_single_token_has_no_gap(capsys: pytest.CaptureFixture[str], tiny_llama_dir: Path) -> None:
    sizes = ("bench.batch_size=2", "bench.input_len=4", "bench.output_len=1", "bench.num_iters=1")
    row = json_of(capsys, "latency", *small_model(tiny_llama_dir), *sizes)
    assert row["mean_itl_ms"] is row["median_itl_ms"] is row["p99_itl_ms"] is None
    assert float(str(row["mean_ttft_ms"])) > 0


def test_latency_for_people_has_the_lines_of_vllm(capsys: pytest.CaptureFixture[str], tiny_llama_dir: Path) -> None:
    sizes = ("bench.batch_size=2", "bench.input_len=4", "bench.output_len=3", "bench.num_iters=2")
    out, err = output_of(capsys, "latency", *small_model(tiny_llama_dir), *sizes)
    lines = out.splitlines()
    assert lines[0].startswith("Avg latency: ")
    assert [line.split("%")[0] for line in lines[1:7]] == ["10", "25", "50", "75", "90", "99"]
    assert lines[7].startswith("first token, ms: mean ")
    assert lines[8].startswith("between tokens, ms: mean ")
    assert "2x4+3, 2 batches after 2 to warm up" in err


def test_a_shape_that_the_model_or_the_cache_cannot_hold_is_refused(
    capsys: pytest.CaptureFixture[str], tiny_llama_dir: Path
) -> None:
    model = (str(tiny_llama_dir), "model.max_model_len=64")
    line = refused(capsys, "bench", "throughput", *model, "bench.shapes=1x60+5")
    assert "65 tokens a request" in line
    line = refused(capsys, "bench", "latency", *model, "kv_cache.num_blocks=2", "bench.output_len=30")
    assert "kv_cache" in line


@pytest.mark.slow
def test_a_start_is_measured_in_processes_of_their_own(
    capsys: pytest.CaptureFixture[str], tiny_llama_dir: Path
) -> None:
    row = json_of(capsys, "startup", str(tiny_llama_dir), "--num-iters", "1", "kv_cache.num_blocks=40")
    assert (row["benchmark"], row["model"], row["num_iters"]) == ("startup", str(tiny_llama_dir), 1)
    kinds = [row[name] for name in ("cold", "warm") if row[name] is not None]
    assert kinds
    for figures in kinds:
        assert isinstance(figures, dict)
        phases = figures["phases_s"]
        assert list(phases) == ["interpreter", "config", "imports", "model", "first token", "rest"]
        assert figures["first_token_s"] == pytest.approx(sum(phases.values()) - phases["rest"], abs=0.005)
        assert 0 < figures["first_token_s"] < figures["wall_s"]


def test_a_start_for_people_is_a_line_for_each_kind(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tiny_llama_dir: Path
) -> None:
    start = Start(2.5, {"interpreter": 0.25, "model": 1.0, "rest": 0.75}, "m")
    monkeypatch.setattr("tokenyard.bench.startup.timed_start", lambda arguments: start)
    out, err = output_of(capsys, "startup", str(tiny_llama_dir))
    for line in out.splitlines():
        assert line.endswith("start: first token after 1.25 s (interpreter 0.25, model 1.00), wall 2.50 s")
    assert "medians of 3 starts of each kind" in err


def test_a_process_that_fails_to_start_is_told(capsys: pytest.CaptureFixture[str], tiny_llama_dir: Path) -> None:
    line = refused(capsys, "bench", "startup", str(tiny_llama_dir), "bench.num_iters=1", "model.max_model_len=4")
    assert "the started process failed with exit code 2: " in line
    assert "4" in line.rpartition("exit code 2: ")[2]


def test_a_model_that_is_not_there_is_told_before_any_process(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tokenyard.bench.startup.timed_start", None)
    (tmp_path / "config.json").write_text("{}")
    assert "model.safetensors" in refused(capsys, "bench", "startup", str(tmp_path))
