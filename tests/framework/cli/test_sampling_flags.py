"""Each sampling flag of `generate` and `chat` reaches the request; what is not given is the model's own default."""

from __future__ import annotations

import dataclasses
import io
import json
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
