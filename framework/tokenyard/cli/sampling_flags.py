"""Sampling parameters as flags."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenyard.sampling_params import SamplingParams

_DEFAULT_MAX_TOKENS = 256


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """The flags; what is not given is the model's own default."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens", type=int, default=_DEFAULT_MAX_TOKENS, metavar="N", help="longest answer, default %(default)s"
    )
    group.add_argument("--min-tokens", type=int, metavar="N", help="shortest answer: nothing ends it before")
    group.add_argument("--temperature", type=float, metavar="T", help="0 = always the most likely token")
    group.add_argument("--top-p", type=float, metavar="P", help="sample among the most likely tokens that reach P")
    group.add_argument("--top-k", type=int, metavar="K", help="sample among the K most likely tokens")
    group.add_argument("--sampling-seed", type=int, metavar="N", help="seed of this request alone")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be given again")
    group.add_argument(
        "--stop-token-id", type=int, action="append", metavar="ID", help="end after this token; may be given again"
    )
    group.add_argument("--ignore-eos", action="store_true", help="go on after the model's end-of-sequence token")


def sampling_params(flags: argparse.Namespace, defaults: SamplingParams) -> SamplingParams:
    """The model's defaults with what was given; raises ValidationError."""
    given = {
        "min_tokens": flags.min_tokens,
        "temperature": flags.temperature,
        "top_p": flags.top_p,
        "top_k": flags.top_k,
        "seed": flags.sampling_seed,
        "stop": flags.stop,
        "stop_token_ids": flags.stop_token_id,
    }
    found = {name: value for name, value in given.items() if value is not None}
    return dataclasses.replace(defaults, max_tokens=flags.max_tokens, ignore_eos=flags.ignore_eos, **found)
