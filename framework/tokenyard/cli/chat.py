"""`tokenyard chat [MODEL] [overrides]`, or `--url URL`: a conversation in the terminal, each answer as it comes."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tokenyard.cli.arguments import Parser, make_parser, parse, tell_progress
from tokenyard.cli.conversation import HELP, Conversation, converse
from tokenyard.cli.sampling_flags import add_sampling_flags, sampling_params
from tokenyard.cli.terminal import say
from tokenyard.errors import UserError

if TYPE_CHECKING:
    from types import FrameType

    from tokenyard.llm import LLM
    from tokenyard.sampling_params import SamplingParams


def command_parser() -> Parser:
    """The command's own flags."""
    parser = make_parser("chat", "[MODEL] [flags] [overrides]", f"Talk with a model. {HELP}.", model_at=0)
    parser.add_argument("--url", metavar="URL", help="talk with a server of OpenAI's API; no model is loaded here")
    parser.add_argument("--insecure", action="store_true", help="with --url: take any TLS certificate")
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    parser.add_argument("--raw", action="store_true", help="no chat template: each message is completed as it is")
    add_sampling_flags(parser)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Reads a message a line from stdin until it ends; 1 when there was no answer to one and nobody at a terminal."""
    parser = command_parser()
    is_remote = any(word.partition("=")[0] == "--url" for word in arguments)
    if is_remote:
        parser.model_at = None  # a name that the server knows, and no part of a config
    given = parse(parser, arguments)
    if sys.stdin is None:
        raise UserError("stdin is closed; chat reads its messages from it")
    if given.flags.raw and given.flags.system is not None:
        raise UserError("--system needs the chat template that --raw turns off; give one of the two")
    if is_remote:
        from tokenyard.cli.chat_url import chat_with_server  # imports what talks to servers

        return chat_with_server(given)
    if given.flags.insecure:
        raise UserError("--insecure is for the TLS certificate of a server; give --url too, or remove it")
    tell_progress("tokenyard.front_end")
    config = given.load()
    from tokenyard.llm import LLM  # torch is imported only once everything given has been checked

    with LLM.from_parts(*config) as llm:
        params = sampling_params(given.flags, llm.get_default_sampling_params())
        if given.flags.system is not None and not llm.get_tokenizer().has_chat_template:
            raise UserError(f"model '{llm.model_config.model}' has no chat template, which --system needs")
        conversation = LocalConversation(llm, params, system=given.flags.system, raw=given.flags.raw)
        return 0 if converse(conversation, llm.model_config.model) else 1


class LocalConversation(Conversation):
    """With a model of this process; a turn that fails or is refused leaves the messages as they were."""

    def __init__(self, llm: LLM, params: SamplingParams, *, system: str | None, raw: bool) -> None:
        super().__init__(system)
        self._llm = llm
        self._params = params
        self._raw = raw or not llm.get_tokenizer().has_chat_template

    def say(self, text: str) -> bool:
        asked = self._asked(text)
        try:
            prompt = self._llm.tokenize(text) if self._raw else self._llm.tokenize_chat(asked)
        except UserError as error:
            say(f"error: {error} (/reset starts over)")
            return False
        with _interruptible() as interrupted:

            def on_text(piece: str) -> bool:
                print(piece, end="", flush=True)
                return not interrupted

            output = self._llm.stream(prompt, self._params, on_text)
        print()
        if output.error is not None:
            say(f"error: {output.error}")
            return False
        if output.outputs[0].finish_reason == "length":
            say("(cut: --max-tokens allows more)")
        self._keep(asked, output.outputs[0].text)
        return True


@contextmanager
def _interruptible() -> Iterator[list[int]]:
    """Ctrl-C fills the list instead of tearing a step apart in the middle."""
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, before)
