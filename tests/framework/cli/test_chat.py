"""`tokenyard chat`: which messages each answer is given, and when they are forgotten."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from tokenyard import LLM, RequestOutput, SamplingParams
from tokenyard.cli import run
from tokenyard.engine.input_processor import Prompt, TokenizedPrompt

Message = Mapping[str, object]


class Talk:
    """Runs `chat` on lines of input, and keeps what the model was asked and what it answered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.asked: list[list[Message]] = []
        self.raw: list[Prompt] = []
        self.answers: list[str] = []
        self._watch_prompts()
        self._watch_answers()

    def say(self, lines: str, *arguments: str, code: int = 0) -> None:
        self._monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        assert run(["chat", "--max-tokens", "3", "--ignore-eos", "kv_cache.num_blocks=16", *arguments]) == code

    def _watch_prompts(self) -> None:
        tokenize_chat, tokenize = LLM.tokenize_chat, LLM.tokenize

        def record_chat(llm: LLM, conversation: Sequence[Message]) -> TokenizedPrompt:
            self.asked.append([dict(message) for message in conversation])
            return tokenize_chat(llm, conversation)

        def record_raw(llm: LLM, prompt: Prompt) -> TokenizedPrompt:
            self.raw.append(prompt)
            return tokenize(llm, prompt)

        self._monkeypatch.setattr(LLM, "tokenize_chat", record_chat)
        self._monkeypatch.setattr(LLM, "tokenize", record_raw)

    def _watch_answers(self) -> None:
        stream = LLM.stream

        def record(
            llm: LLM, prompt: TokenizedPrompt, params: SamplingParams, on_text: Callable[[str], bool | None]
        ) -> RequestOutput:
            output = stream(llm, prompt, params, on_text)
            self.answers.append(output.outputs[0].text)
            return output

        self._monkeypatch.setattr(LLM, "stream", record)


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch) -> Talk:
    return Talk(monkeypatch)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def test_each_answer_is_given_every_turn_before_it(
    talk: Talk, tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    talk.say("hi\n\n  the  \nhe\n", str(tiny_llama_dir))
    first, second, third = talk.answers
    assert talk.asked == [
        [user("hi")],
        [user("hi"), assistant(first), user("the")],
        [user("hi"), assistant(first), user("the"), assistant(second), user("he")],
    ]
    assert capsys.readouterr().out == f"{first}\n{second}\n{third}\n"


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_reset_forgets_the_turns_and_keeps_the_system_message(
    talk: Talk, tiny_llama_dir: Path, system: str | None
) -> None:
    flags = [] if system is None else ["--system", system]
    opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    talk.say("hi\n/reset\nhe\nt\n/reset\n/reset\nhi\n", str(tiny_llama_dir), *flags)
    assert talk.asked == [
        [*opening, user("hi")],
        [*opening, user("he")],
        [*opening, user("he"), assistant(talk.answers[1]), user("t")],
        [*opening, user("hi")],
    ]


@pytest.mark.parametrize("end", ["/exit", "/quit"])
def test_nothing_after_the_end_is_said(talk: Talk, tiny_llama_dir: Path, end: str) -> None:
    talk.say(f"hi\n/help\n{end}\nhe\n", str(tiny_llama_dir))
    assert talk.asked == [[user("hi")]]


def test_a_refused_message_leaves_the_conversation_as_it_was(
    talk: Talk, tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    talk.say(f"hi\n{'long ' * 60}\nhe\n", str(tiny_llama_dir), code=1)  # as there was nobody to see the error
    assert "the prompt has" in capsys.readouterr().err
    assert len(talk.answers) == 2
    assert talk.asked[2] == [user("hi"), assistant(talk.answers[0]), user("he")]


def test_raw_completes_each_message_alone(talk: Talk, tiny_llama_dir: Path) -> None:
    talk.say("hi\nhe\n", str(tiny_llama_dir), "--raw")
    assert (talk.raw, talk.asked) == (["hi", "he"], [])


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_at_a_terminal_a_refused_message_is_no_failure_of_the_command(
    monkeypatch: pytest.MonkeyPatch, tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = iter([" ".join(["long"] * 400)])

    def ask(prompt: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("sys.stdin", _Terminal())
    monkeypatch.setattr("builtins.input", ask)
    assert run(["chat", "kv_cache.num_blocks=16", str(tiny_llama_dir)]) == 0
    assert "the prompt has" in capsys.readouterr().err


def test_insecure_is_for_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["chat", "--insecure"]) == 2
    assert "--insecure is for the TLS certificate of a server; give --url too" in capsys.readouterr().err
