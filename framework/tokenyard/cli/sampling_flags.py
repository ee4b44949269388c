"""Sampling parameters as flags."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenyard.sampling_params import SamplingParams

_DEFAULT_MAX_TOKENS = 256


def add_sampling_flags(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """The flags of every command that generates; what is not given is the model's own default. Returns their group."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens", type=int, default=_DEFAULT_MAX_TOKENS, metavar="N", help="longest answer, default %(default)s"
    )
    group.add_argument("--min-tokens", type=int, metavar="N", help="shortest answer: nothing ends it before")
    group.add_argument("--temperature", type=float, metavar="T", help="0 = always the most likely token")
    group.add_argument("--top-p", type=float, metavar="P", help="sample among the most likely tokens that reach P")
    group.add_argument("--top-k", type=int, metavar="K", help="sample among the K most likely tokens")
    group.add_argument(
        "--min-p", type=float, metavar="P", help="no token below this share of the likeliest one's chance"
    )
    _add_penalties(group)
    group.add_argument("--sampling-seed", dest="seed", type=int, metavar="N", help="seed of this request alone")
    _add_ends(group)
    _add_tokens(group)
    return group


def add_choice_flags(group: argparse._ArgumentGroup) -> None:
    """Those of a command that shows more of a request than one text."""
    group.add_argument("--n", type=int, metavar="N", help="answers to the one prompt")
    group.add_argument(
        "--logprobs", type=int, metavar="K", help="log probabilities of each token and the K likeliest; needs --json"
    )
    group.add_argument("--prompt-logprobs", type=int, metavar="K", help="the same of the prompt; needs --json")


def _add_penalties(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--presence-penalty", type=float, metavar="X", help="off the logits of tokens in the answer")
    group.add_argument("--frequency-penalty", type=float, metavar="X", help="the same, as often as they are in it")
    group.add_argument(
        "--repetition-penalty", type=float, metavar="X", help="above 1: tokens of prompt and answer are less likely"
    )


def _add_ends(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be given again")
    group.add_argument(
        "--stop-token-id",
        dest="stop_token_ids",
        type=int,
        action="append",
        metavar="ID",
        help="end after this token; may be given again",
    )
    group.add_argument(
        "--include-stop-str-in-output", action="store_true", default=None, help="show the text that ended the answer"
    )
    group.add_argument("--ignore-eos", action="store_true", help="go on after the model's end-of-sequence token")
    group.add_argument(
        "--skip-special-tokens", action=argparse.BooleanOptionalAction, help="leave control tokens out of the text"
    )


def _add_tokens(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--logit-bias", type=_json, metavar="JSON", help="added to tokens' logits, such as '{\"42\": -100}'"
    )
    group.add_argument(
        "--allowed-token-id",
        dest="allowed_token_ids",
        type=int,
        action="append",
        metavar="ID",
        help="sample no other token; may be given again",
    )
    group.add_argument(
        "--bad-word", dest="bad_words", action="append", metavar="TEXT", help="never say this; may be given again"
    )
    group.add_argument("--extra-args", type=_json, metavar="JSON", help="what logits processors are told")


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"takes JSON, got {text[:200]!r} ({error})") from error


PARAMETERS = (
    "n",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "max_tokens",
    "min_tokens",
    "logprobs",
    "prompt_logprobs",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "extra_args",
)
"""As SamplingParams and the bodies of requests name them."""


def sampling_params(flags: argparse.Namespace, defaults: SamplingParams) -> SamplingParams:
    """The model's defaults with what was given; raises ValidationError."""
    given = vars(flags)
    return dataclasses.replace(defaults, **{name: given[name] for name in PARAMETERS if given.get(name) is not None})
