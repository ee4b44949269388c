"""Each sampling flag of `generate` and `chat` reaches the request; what is not given is the model's own default."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenyard import LLM, RequestOutput, SamplingParams
from tokenyard.cli import run
from tokenyard.engine.input_processor import TokenizedPrompt

DEFAULTS = SamplingParams(temperature=0.7, top_p=0.9, top_k=20, max_tokens=2)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[SamplingParams]:
    """The parameters of each request that a command runs."""
    found: list[SamplingParams] = []
    stream = LLM.stream

    def record(
        self: LLM, prompt: TokenizedPrompt, params: SamplingParams, on_text: Callable[[str], bool | None]
    ) -> RequestOutput:
        found.append(params)
        return stream(self, prompt, params, on_text)

    monkeypatch.setattr(LLM, "stream", record)
    return found


@pytest.fixture
def model(make_llama: Callable[..., Path]) -> Path:
    """A model whose own defaults are DEFAULTS."""
    folder = make_llama()
    values = {"eos_token_id": 2, "temperature": 0.7, "top_p": 0.9, "top_k": 20}
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


def run_command(command: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    words = ["generate", "hi"] if command == "generate" else ["chat"]
    assert run([*words, "kv_cache.num_blocks=16", *arguments]) == 0


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize(
    ("flags", "changes"),
    [
        ([], {}),
        (["--max-tokens", "3"], {"max_tokens": 3}),
        (["--temperature", "0.5"], {"temperature": 0.5}),
        (["--temperature", "0"], {"temperature": 0.0}),
        (["--top-p", "0.25"], {"top_p": 0.25}),
        (["--top-k", "7"], {"top_k": 7}),
        (["--sampling-seed", "11"], {"seed": 11}),
        (["--sampling-seed", "0"], {"seed": 0}),
        (["--stop", "zzz", "--stop", "a b=c"], {"stop": ["zzz", "a b=c"]}),
        (["--min-tokens", "1"], {"min_tokens": 1}),
        (["--stop-token-id", "7", "--stop-token-id", "5"], {"stop_token_ids": [7, 5]}),
        (["--ignore-eos"], {"ignore_eos": True}),
        (["--min-p", "0.05"], {"min_p": 0.05}),
        (["--presence-penalty", "0.5"], {"presence_penalty": 0.5}),
        (["--frequency-penalty", "-0.5"], {"frequency_penalty": -0.5}),
        (["--repetition-penalty", "1.2"], {"repetition_penalty": 1.2}),
        (["--include-stop-str-in-output"], {"include_stop_str_in_output": True}),
        (["--no-skip-special-tokens"], {"skip_special_tokens": False}),
        (["--skip-special-tokens"], {"skip_special_tokens": True}),
        (["--logit-bias", '{"42": -100, "7": 3.5}'], {"logit_bias": {42: -100.0, 7: 3.5}}),
        (["--allowed-token-id", "7", "--allowed-token-id", "5"], {"allowed_token_ids": [7, 5]}),
        (["--bad-word", "one", "--bad-word", " two"], {"bad_words": ["one", " two"]}),
        (
            ["--extra-args", '{"no_repeat_ngram_size": 2}', "--logits-processors", "no_repeat_ngram"],
            {"extra_args": {"no_repeat_ngram_size": 2}},
        ),
    ],
    ids=lambda value: " ".join(value) or "nothing" if isinstance(value, list) else "",
)
def test_a_sampling_flag_changes_its_parameter_and_no_other(
    model: Path,
    used: list[SamplingParams],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    flags: list[str],
    changes: dict[str, object],
) -> None:
    run_command(command, monkeypatch, str(model), "--max-tokens", "2", *flags)
    assert used == [dataclasses.replace(DEFAULTS, **changes)]  # type: ignore[arg-type]


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_an_answer_has_256_tokens_at_most_unless_told(
    tiny_llama_dir: Path, used: list[SamplingParams], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    run_command(command, monkeypatch, str(tiny_llama_dir), "--max-model-len", "64")
    assert used == [SamplingParams(max_tokens=256)]


def test_a_stop_string_and_a_sampling_seed_do_what_they_say(
    capsys: pytest.CaptureFixture[str], tiny_llama_dir: Path
) -> None:
    def answer(*flags: str) -> dict[str, object]:
        arguments = ["hi", str(tiny_llama_dir), "--raw", "--json", "--ignore-eos", "--max-tokens", "12", *flags]
        assert run(["generate", *arguments, "kv_cache.num_blocks=16"]) == 0
        found: dict[str, object] = json.loads(capsys.readouterr().out)
        return found

    whole = str(answer("--sampling-seed", "3")["text"])
    assert answer("--sampling-seed", "3", "--seed", "9")["text"] == whole
    assert answer("--sampling-seed", "4")["text"] != whole
    stop = whole[4:6]
    stopped = answer("--sampling-seed", "3", "--stop", stop, "--stop", "never there")
    assert stopped["text"] == whole[: whole.index(stop)]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", stop)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--logit-bias", "{5: 1}"], "argument --logit-bias: takes JSON, got '{5: 1}'"),
        (["--logit-bias", '{"a": 1}'], "logit_bias: keys 'a' are not token ids"),
        (["--logit-bias", "[1]"], r"logit_bias=\[1\] is not valid"),
        (["--extra-args", '{"a": 1}'], "extra_args=.*: only logits processors read it"),
        (["--repetition-penalty", "0"], "repetition_penalty=0"),
        (["--min-p", "x"], "--min-p"),
    ],
)
def test_a_sampling_flag_that_cannot_be_is_one_line(
    capsys: pytest.CaptureFixture[str], tiny_llama_dir: Path, flags: list[str], told: str
) -> None:
    assert run(["generate", "hi", str(tiny_llama_dir), "kv_cache.num_blocks=16", "--max-model-len", "64", *flags]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert re.search(told, line)


def test_generate_shows_every_answer(capsys: pytest.CaptureFixture[str], tiny_llama_dir: Path) -> None:
    words = [
        "generate",
        "hi",
        str(tiny_llama_dir),
        "--raw",
        "--max-tokens",
        "5",
        "--ignore-eos",
        "--sampling-seed",
        "3",
    ]
    words.append("kv_cache.num_blocks=16")
    assert run([*words, "--n", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["text"] == found["choices"][0]["text"]
    assert len({tuple(choice["token_ids"]) for choice in found["choices"]}) == 3
    assert [choice["finish_reason"] for choice in found["choices"]] == ["length"] * 3
    assert run([*words, "--n", "3"]) == 0
    shown = capsys.readouterr()
    texts = [f"[{index}] {choice['text']}" for index, choice in enumerate(found["choices"])]
    assert shown.out == "\n\n".join(texts) + "\n"
    assert "+ 15 tokens" in shown.err
    assert run([*words, "--json"]) == 0
    assert "choices" not in json.loads(capsys.readouterr().out)


def test_generate_prints_log_probabilities_as_json_alone(
    capsys: pytest.CaptureFixture[str], tiny_llama_dir: Path
) -> None:
    words = ["generate", "hi", str(tiny_llama_dir), "--raw", "--max-tokens", "3", "--ignore-eos", "--temperature", "0"]
    words += ["--logprobs", "2", "--prompt-logprobs", "1", "kv_cache.num_blocks=16"]
    assert run([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row[0]["token_id"] for row in found["logprobs"]] == found["token_ids"]
    assert all(len(row) == 2 and row[0]["rank"] == 1 for row in found["logprobs"])
    assert found["cumulative_logprob"] == pytest.approx(sum(row[0]["logprob"] for row in found["logprobs"]))
    assert found["prompt_logprobs"][0] is None
    assert len(found["prompt_logprobs"]) == len(found["prompt_token_ids"])
    assert run(words) == 2
    assert "--logprobs needs --json" in capsys.readouterr().err


def test_a_conversation_has_one_answer_a_turn(capsys: pytest.CaptureFixture[str], tiny_llama_dir: Path) -> None:
    assert run(["chat", str(tiny_llama_dir), "--n", "2"]) == 2
    assert "--n" in capsys.readouterr().err
