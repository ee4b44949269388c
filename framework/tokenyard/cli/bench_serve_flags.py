"""The flags of `tokenyard bench serve`: those of `vllm bench serve`, each for a key of the group `bench`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tokenyard.bench.keys import GROUP
from tokenyard.cli.arguments import Given, Parser
from tokenyard.errors import UserError
from tokenyard.launch.flags import refuse_unknown_flags

_DEST = "serve_"  # keeps the flags' values apart from the command's own


def _text(values: Sequence[str]) -> str:
    return json.dumps(values[-1])


def _plain(values: Sequence[str]) -> str:
    return values[-1]


def _numbers(values: Sequence[str]) -> str:
    return f"[{','.join(values)}]"


def _texts(values: Sequence[str]) -> str:
    return json.dumps(list(values))


class _Flag(NamedTuple):
    name: str
    metavar: str  # "" = on and off, --x and --no-x
    write: Callable[[Sequence[str]], str] = _plain  # what was given, as a value of the key

    @property
    def key(self) -> str:
        return self.name.removeprefix("--").replace("-", "_")


_FLAGS = (
    _Flag("--base-url", "URL", _text),
    _Flag("--host", "HOST", _text),
    _Flag("--port", "N"),
    _Flag("--model", "NAME", _text),
    _Flag("--backend", "NAME", _text),
    _Flag("--endpoint", "PATH", _text),
    _Flag("--tokenizer", "MODEL", _text),
    _Flag("--dataset-name", "NAME", _text),
    _Flag("--random-input-len", "N"),
    _Flag("--random-output-len", "N"),
    _Flag("--random-range-ratio", "R"),
    _Flag("--random-prefix-len", "N"),
    _Flag("--num-prompts", "N"),
    _Flag("--request-rate", "RATE"),
    _Flag("--burstiness", "SHAPE"),
    _Flag("--max-concurrency", "N"),
    _Flag("--seed", "N"),
    _Flag("--ignore-eos", ""),
    _Flag("--temperature", "T"),
    _Flag("--extra-body", "JSON"),
    _Flag("--header", "NAME=VALUE", _texts),
    _Flag("--num-warmups", "N"),
    _Flag("--percentile-metrics", "NAMES", _text),
    _Flag("--metric-percentiles", "P", _numbers),
    _Flag("--goodput", "METRIC:MS", _texts),
    _Flag("--ready-check-timeout-sec", "SECONDS"),
    _Flag("--insecure", ""),
)
_SEVERAL = ("--header", "--goodput")
_UNAVAILABLE_TEXT = """
--label --use-beam-search --logprobs --probe-request-rate --profile --append-result --metadata --self-timed
--request-id-prefix --tokenizer-mode --trust-remote-code --skip-tokenizer-init --lora-modules --lora-assignment
--ramp-up-strategy --ramp-up-start-rps --ramp-up-end-rps --plot-timeline --timeline-itl-thresholds
--plot-dataset-stats --dataset-path --custom-output-len --sharegpt-output-len --sonnet-input-len
--random-batch-size --no-stream --input-len --output-len
"""
_UNAVAILABLE = tuple(_UNAVAILABLE_TEXT.split())
_INSTEAD = {
    "--input-len": "--random-input-len",
    "--output-len": "--random-output-len",
    "--dataset-path": "--dataset-name random, the only one",
}
_IN_BODY = ("--top-p", "--top-k", "--min-p", "--frequency-penalty", "--presence-penalty", "--repetition-penalty")


def add_serve_flags(parser: Parser) -> None:
    """Add the flags; there are none of an engine, as the one that is measured runs already."""
    parser.allow_abbrev = False
    for flag in _FLAGS:
        about = f"the same as {GROUP}.{flag.key}"
        if not flag.metavar:
            action = argparse.BooleanOptionalAction
            parser.add_argument(flag.name, dest=_DEST + flag.key, action=action, default=None, help=about)
        else:
            nargs = "+" if flag.name in _SEVERAL else 1
            parser.add_argument(
                flag.name, dest=_DEST + flag.key, metavar=flag.metavar, nargs=nargs, action="extend", help=about
            )
    for name in (*_UNAVAILABLE, *_IN_BODY):
        parser.add_argument(name, nargs="*", dest=argparse.SUPPRESS, action=_Refused, help=argparse.SUPPRESS)


class _Refused(argparse.Action):
    """A flag of vLLM's that is not served."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        name = str(option_string)
        if name in _IN_BODY:
            field = name.removeprefix("--").replace("-", "_")
            raise UserError(f"{name} is a field of the request: --extra-body '{{\"{field}\": ...}}'")
        instead = f"; there is {_INSTEAD[name]}" if name in _INSTEAD else "; remove it"
        raise UserError(f"{name} is not available in this version{instead}")


def parse_serve(parser: Parser, arguments: Sequence[str]) -> Given:
    """The kind, keys and flags in any order; the flags become keys, before those that were given as keys."""
    flags, unknown = parser.parse_known_intermixed_args(list(arguments))
    refuse_unknown_flags(unknown, parser)
    keys = [word for word in flags.words if word.startswith(f"{GROUP}.") and "=" in word]
    words = [word for word in flags.words if word not in keys]
    if len(words) > 2:
        raise UserError(f"unexpected argument '{words[2]}'; keys are written {GROUP}.KEY=VALUE")
    if len(words) == 2:
        keys.insert(0, f"{GROUP}.model={_text([_model(words[1])])}")
    given = vars(flags)
    texts = [
        f"{GROUP}.{flag.key}={_written(flag, given[_DEST + flag.key])}"
        for flag in _FLAGS
        if given[_DEST + flag.key] is not None
    ]
    return Given(flags=flags, words=words[:1], overrides=(), config_file=None, own_overrides=(*texts, *keys))


def _written(flag: _Flag, value: bool | Sequence[str]) -> str:
    return str(value).lower() if isinstance(value, bool) else flag.write(value)


def _model(word: str) -> str:
    if "://" in word:
        raise UserError(f"'{word}' is a URL; give it as --base-url {word}")
    if "=" in word:
        raise UserError(
            f"'{word}' is for an engine, and `bench serve` measures a server that runs: give it to `tokenyard serve`"
        )
    return word
