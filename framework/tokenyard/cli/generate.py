"""`tokenyard generate "prompt" [MODEL] [overrides]`: one prompt, one answer, streamed to stdout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokenyard.cli.arguments import Given, Parser, make_parser, parse, tell_progress
from tokenyard.cli.phases import Phases
from tokenyard.cli.sampling_flags import add_choice_flags, add_sampling_flags, sampling_params
from tokenyard.cli.terminal import read_stdin, say
from tokenyard.errors import TokenyardError, UserError

if TYPE_CHECKING:
    from tokenyard.engine.input_processor import TokenizedPrompt
    from tokenyard.llm import LLM
    from tokenyard.outputs import CompletionOutput, LogprobsOfPosition, RequestOutput


def command_parser() -> Parser:
    """The command's own flags."""
    description = "Answer one prompt; `-` reads it from stdin."
    parser = make_parser("generate", '"PROMPT" [MODEL] [flags] [overrides]', description, model_at=1)
    parser.add_argument("--raw", action="store_true", help="complete the prompt as it is: no chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the text")
    add_choice_flags(add_sampling_flags(parser))
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
    _check_shown(given)
    tell_progress("tokenyard.front_end")
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
    streams = params.n == 1 and not given.flags.json  # several answers come at once, and are shown one after the other

    def on_text(piece: str) -> None:
        if "first token" not in phases.seconds:
            phases.end("first token")
        if piece and streams:
            print(piece, end="", flush=True)

    output = llm.stream(prompt, params, on_text)
    phases.end("rest")
    if output.error is not None:
        raise TokenyardError(output.error)
    if given.flags.json:
        print(json.dumps(_as_json(output, llm, phases)))
    else:
        print("" if streams else _all_texts(output))
        say(_summary(output, phases))
    return 0


def _check_shown(given: Given) -> None:
    for flag, value in (("--logprobs", given.flags.logprobs), ("--prompt-logprobs", given.flags.prompt_logprobs)):
        if value is not None and not given.flags.json:
            raise UserError(f"{flag} needs --json, which prints them")


def _all_texts(output: RequestOutput) -> str:
    return "\n\n".join(f"[{completion.index}] {completion.text}" for completion in output.outputs)


def _prompt(llm: LLM, text: str, raw: bool) -> TokenizedPrompt:
    if raw or not llm.get_tokenizer().has_chat_template:
        return llm.tokenize(text)
    return llm.tokenize_chat([{"role": "user", "content": text}])


def _summary(output: RequestOutput, phases: Phases) -> str:
    seconds, num_tokens = phases.seconds, sum(len(completion.token_ids) for completion in output.outputs)
    num_rest = num_tokens - len(output.outputs)
    rate = f" ({num_rest / seconds['rest']:.1f} tokens/s after the first)" if num_rest > 0 and seconds["rest"] else ""
    first = phases.total - seconds["rest"]
    reasons = dict.fromkeys(str(completion.finish_reason) for completion in output.outputs)
    return (
        f"[{phases}; first token {first:.2f} s after the start; {len(output.prompt_token_ids)} + "
        f"{num_tokens} tokens{rate}; finish reason {', '.join(reasons)}]"
    )


def _as_json(output: RequestOutput, llm: LLM, phases: Phases) -> dict[str, object]:
    return {
        "model": llm.model_config.model,
        **_choice(output.outputs[0]),
        **({"choices": [_choice(completion) for completion in output.outputs]} if len(output.outputs) > 1 else {}),
        "prompt_token_ids": output.prompt_token_ids,
        **({} if output.prompt_logprobs is None else {"prompt_logprobs": list(map(_position, output.prompt_logprobs))}),
        "num_cached_tokens": output.num_cached_tokens,
        "phases": {name: round(seconds, 4) for name, seconds in phases.seconds.items()},
    }


def _choice(completion: CompletionOutput) -> dict[str, object]:
    found: dict[str, object] = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if completion.logprobs is not None:
        found["cumulative_logprob"] = completion.cumulative_logprob
        found["logprobs"] = list(map(_position, completion.logprobs))
    return found


def _position(found: LogprobsOfPosition | None) -> list[dict[str, object]] | None:
    """The tokens of one position, the text's own first; None for the first of a prompt."""
    if found is None:
        return None
    return [
        {"token_id": token_id, "logprob": one.logprob, "rank": one.rank, "token": one.decoded_token}
        for token_id, one in found.items()
    ]
