"""`tokenyard generate "prompt" [MODEL] [overrides]`: one prompt, one answer, streamed to stdout."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokenyard.cli.arguments import Given, Parser, make_parser, parse
from tokenyard.cli.phases import Phases
from tokenyard.cli.sampling_flags import add_sampling_flags, sampling_params
from tokenyard.cli.terminal import read_stdin, say
from tokenyard.errors import TokenyardError, UserError

if TYPE_CHECKING:
    from tokenyard.engine.input_processor import TokenizedPrompt
    from tokenyard.llm import LLM
    from tokenyard.outputs import RequestOutput


def command_parser() -> Parser:
    """The command's own flags."""
    description = "Answer one prompt; `-` reads it from stdin."
    parser = make_parser("generate", '"PROMPT" [MODEL] [flags] [overrides]', description, model_at=1)
    parser.add_argument("--raw", action="store_true", help="complete the prompt as it is: no chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the text")
    add_sampling_flags(parser)
    return parser


def main(arguments: Sequence[str]) -> int:
    """The answer goes to stdout, everything else to stderr."""
    phases = Phases()
    given = parse(command_parser(), arguments)
    if not given.words:
        raise UserError('a prompt is missing: tokenyard generate "PROMPT"')
    text = read_stdin() if given.words[0] == "-" else given.words[0]
    if not text:
        raise UserError("the prompt is empty; give at least one token")
    logging.getLogger("tokenyard.llm").setLevel(logging.INFO)  # a first start fetches the model: say so
    config = given.load()
    phases.end("config")
    # Only once everything given has been checked; torch by name, so that its second is not counted as the model's.
    import torch  # noqa: F401

    from tokenyard.llm import LLM

    phases.end("imports")
    with LLM.from_parts(*config) as llm:
        phases.end("model")
        return _answer(llm, text, given, phases)


def _answer(llm: LLM, text: str, given: Given, phases: Phases) -> int:
    params = sampling_params(given.flags, llm.get_default_sampling_params())
    prompt = _prompt(llm, text, given.flags.raw)

    def on_text(piece: str) -> None:
        if "first token" not in phases.seconds:
            phases.end("first token")
        if piece and not given.flags.json:
            print(piece, end="", flush=True)

    output = llm.stream(prompt, params, on_text)
    phases.end("rest")
    if output.error is not None:
        raise TokenyardError(output.error)
    if given.flags.json:
        print(json.dumps(_as_json(output, llm, phases)))
    else:
        print()
        say(_summary(output, phases))
    return 0


def _prompt(llm: LLM, text: str, raw: bool) -> TokenizedPrompt:
    if raw or not llm.get_tokenizer().has_chat_template:
        return llm.tokenize(text)
    return llm.tokenize_chat([{"role": "user", "content": text}])


def _summary(output: RequestOutput, phases: Phases) -> str:
    completion, seconds = output.outputs[0], phases.seconds
    num_rest = len(completion.token_ids) - 1
    rate = f" ({num_rest / seconds['rest']:.1f} tokens/s after the first)" if num_rest > 0 and seconds["rest"] else ""
    first = phases.total - seconds["rest"]
    return (
        f"[{phases}; first token {first:.2f} s after the start; {len(output.prompt_token_ids)} + "
        f"{len(completion.token_ids)} tokens{rate}; finish reason {completion.finish_reason}]"
    )


def _as_json(output: RequestOutput, llm: LLM, phases: Phases) -> dict[str, object]:
    completion = output.outputs[0]
    return {
        "model": llm.model_config.model,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "prompt_token_ids": output.prompt_token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "num_cached_tokens": output.num_cached_tokens,
        "phases": {name: round(seconds, 4) for name, seconds in phases.seconds.items()},
    }
