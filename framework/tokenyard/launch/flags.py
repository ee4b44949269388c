"""Flags that people know from vLLM, as overrides; those it has and we do not are refused by name."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenyard.errors import ConfigError, did_you_mean
from tokenyard.launch.overrides import quote_override

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

__all__ = [
    "Flagged",
    "add_engine_flags",
    "flags_to_overrides",
    "parse_length",
    "quote_override",
    "refuse_unknown_flags",
]

_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_LENGTH = re.compile(r"(\d+(?:\.\d+)?)([kmgtKMGT]?)", re.ASCII)
_NAME = re.compile(r"[a-z0-9_-]+", re.ASCII)
_DEST_PREFIX = "engine_"  # keeps the flags apart from a command's own arguments


@dataclass(frozen=True, slots=True)
class Flagged:
    """An override that a flag stands for."""

    override: str
    flag: str


def parse_length(text: str) -> int | None:
    """A count as vLLM's flags take it: `2048`, `2k` = 2000, `2K` = 2048, `1.5k`; None when it is none."""
    match = _LENGTH.fullmatch(text.strip())
    if match is None:
        return None
    number, factor = match[1], _SUFFIXES.get(match[2], 1)
    if "." not in number:
        return int(number) * factor
    scaled = round(float(number) * factor, 6)
    return int(scaled) if scaled.is_integer() else None


def _text(key: str, value: str, flag: str) -> str:
    return quote_override(key, value)


def _count(key: str, value: str, flag: str) -> str:
    number = parse_length(value)
    if number is None:
        raise ConfigError(
            f"{flag} takes a whole number, or one with a suffix such as 2k (2000) or 2K (2048), got {value!r}"
        )
    return f"{key}={number}"


def _count_or_auto(key: str, value: str, flag: str) -> str:
    if value in ("auto", "-1"):
        return f"{key}=-1"
    if parse_length(value) is None:
        raise ConfigError(
            f"{flag} takes a whole number, one with a suffix such as 2k (2000) or 2K (2048), or auto, got {value!r}"
        )
    return _count(key, value, flag)


def _integer(key: str, value: str, flag: str) -> str:
    try:
        return f"{key}={int(value)}"
    except ValueError:
        raise ConfigError(f"{flag} takes a whole number, got {value!r}") from None


def _names(key: str, value: str, flag: str) -> str:
    names = [name.strip() for name in value.split(",")]
    if not all(_NAME.fullmatch(name) for name in names):
        raise ConfigError(f"{flag} takes names of plugins with commas between, such as a,b; got {value!r}")
    return f"{key}=[{','.join(names)}]"


def _counts(key: str, value: str, flag: str) -> str:
    numbers = [parse_length(number) for number in value.split(",")]
    if None in numbers:
        raise ConfigError(f"{flag} takes whole numbers with commas between, such as 1,2,4,8; got {value!r}")
    return f"{key}=[{','.join(map(str, numbers))}]"


def _number(key: str, value: str, flag: str) -> str:
    try:
        return f"{key}={float(value)}"
    except ValueError:
        raise ConfigError(f"{flag} takes a number, got {value!r}") from None


def _memory(key: str, value: str, flag: str) -> str:
    return quote_override(key, value) if parse_length(value) is None else _count(key, value, flag)


@dataclass(frozen=True, slots=True)
class _Flag:
    name: str
    key: str
    convert: Callable[[str, str, str], str] | None  # None: on and off, --x and --no-x
    metavar: str
    help: str

    @property
    def dest(self) -> str:
        return _DEST_PREFIX + self.name.removeprefix("--").replace("-", "_")


_FLAGS = (
    _Flag("--model", "model.name", _text, "MODEL", "a name, a folder, a .gguf file or a Hub id, taken verbatim"),
    _Flag("--revision", "model.revision", _text, "REVISION", "of a Hub id: a branch, tag or commit"),
    _Flag("--dtype", "model.dtype", _text, "TYPE", "auto, float32, bfloat16 or float16"),
    _Flag(
        "--max-model-len",
        "model.max_model_len",
        _count_or_auto,
        "N",
        "prompt and output tokens; 2k = 2000, 2K = 2048; auto = what fits",
    ),
    _Flag("--seed", "seed", _integer, "N", "of everything that is random"),
    _Flag("--max-num-seqs", "scheduler.max_num_seqs", _count, "N", "requests running at once"),
    _Flag("--max-num-batched-tokens", "scheduler.max_num_batched_tokens", _count, "N", "tokens of one step"),
    _Flag("--enable-chunked-prefill", "scheduler.enable_chunked_prefill", None, "", "split long prompts over steps"),
    _Flag(
        "--long-prefill-token-threshold",
        "scheduler.long_prefill_token_threshold",
        _count,
        "N",
        "longest chunk of a prompt",
    ),
    _Flag("--scheduling-policy", "scheduler", _text, "NAME", "a scheduling policy, or a whole scheduler"),
    _Flag("--block-size", "kv_cache.block_size", _count, "N", "tokens of a K/V block"),
    _Flag("--num-gpu-blocks-override", "kv_cache.num_blocks", _count, "N", "K/V blocks, on any device"),
    _Flag("--gpu-memory-utilization", "kv_cache.gpu_memory_utilization", _number, "SHARE", "of a GPU's memory"),
    _Flag("--kv-cache-memory-bytes", "kv_cache.memory", _memory, "BYTES", "of the K/V cache; also 512MiB, 2GB"),
    _Flag("--enable-prefix-caching", "kv_cache.enable_prefix_caching", None, "", "share the K/V of equal beginnings"),
    _Flag("--attention-backend", "attention", _text, "NAME", "an attention backend, or auto"),
    _Flag("--distributed-executor-backend", "executor", _text, "NAME", "an executor"),
    _Flag("--enforce-eager", "executor.enforce_eager", None, "", "never record CUDA graphs"),
    _Flag(
        "--cudagraph-capture-sizes",
        "executor.cudagraph_capture_sizes",
        _counts,
        "SIZES",
        "numbers of requests with CUDA graphs, such as 1,2,4,8",
    ),
    _Flag("--max-logprobs", "model.max_logprobs", _integer, "N", "most logprobs of a position; -1 = no limit"),
    _Flag(
        "--logits-processors",
        "logits_processors",
        _names,
        "NAMES",
        "by name, with commas between; with options as logits_processors=[{name: NAME, OPTION: VALUE}]",
    ),
)

_PARALLEL_SIZES = (
    ("-tp", "--tensor-parallel-size"),
    ("-pp", "--pipeline-parallel-size"),
    ("-dp", "--data-parallel-size"),
)
"""Available with the value 1 only."""

_UNAVAILABLE_TEXT = """
--quantization -q --trust-remote-code --code-revision --tokenizer --tokenizer-revision --tokenizer-mode
--skip-tokenizer-init --hf-overrides --hf-config-path --hf-token --load-format --download-dir --config-format
--served-model-name --generation-config --override-generation-config --max-cudagraph-capture-size
--max-seq-len-to-capture --kv-cache-dtype --cpu-offload-gb --swap-space --prefix-caching-hash-algo
--disable-sliding-window
--max-num-scheduled-tokens --max-num-queued-reqs --max-num-queued-tokens --max-num-partial-prefills
--max-long-partial-prefills --scheduler-cls --async-scheduling --no-async-scheduling --stream-interval
--enable-expert-parallel --data-parallel-size-local --data-parallel-address --data-parallel-rpc-port
--data-parallel-backend --headless --api-server-count -asc --disable-custom-all-reduce
--max-parallel-loading-workers --attention-config --speculative-config --compilation-config -O --kv-transfer-config
--kv-events-config --ec-transfer-config --structured-outputs-config --guided-decoding-backend
--logits-processor-pattern --reasoning-parser --tool-call-parser --tool-parser-plugin --enable-auto-tool-choice
--enable-lora --max-loras --max-lora-rank --max-cpu-loras --lora-modules --lora-dtype --fully-sharded-loras
--enable-prompt-embeds --limit-mm-per-prompt --mm-processor-kwargs --allowed-local-media-path --runner --convert
--pooler-config --host --port --uds --api-key --chat-template-content-format --response-role --root-path
--ssl-keyfile --ssl-certfile --allowed-origins --middleware --max-log-len --logprobs-mode
--disable-log-stats --enable-log-requests --disable-log-requests --kv-cache-metrics --kv-cache-metrics-sample
--otlp-traces-endpoint --collect-detailed-traces --enable-offline-docs --disable-fastapi-docs --additional-config
--enable-sleep-mode --worker-cls --worker-extension-cls --device --profiler-config --num-lookahead-slots
"""
_UNAVAILABLE = tuple(_UNAVAILABLE_TEXT.split())


class _Refused(argparse.Action):
    """A flag that is known and not available."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        raise _not_available(str(option_string))


class _OnlyOne(argparse.Action):
    """A number of ranks: 1 is what happens anyway."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        if values != "1":
            raise ConfigError(f"{option_string} {values} is not available in this version; the only value is 1")


def _not_available(flag: str) -> ConfigError:
    if flag == "--hf-token":
        return ConfigError("--hf-token is not available: everybody here can read a command line; set HF_TOKEN instead")
    return ConfigError(f"{flag} is not available in this version; remove it")


def add_engine_flags(parser: argparse.ArgumentParser, *, own: Collection[str] = ()) -> None:
    """Add the flags to a command's parser; `own` names those that the command adds itself, with a meaning of its own.

    Turns abbreviations off: one would be taken for another flag when a later version adds some. `--config FILE` is
    stored as `config_file`, a string or None.
    """
    parser.allow_abbrev = False
    group = parser.add_argument_group("engine", "the same as overrides; KEY=VALUE overrides reach every other setting")
    group.add_argument("--config", metavar="FILE", dest="config_file", help="a YAML of overrides")
    for flag in _FLAGS:
        if flag.name in own:
            continue
        if flag.convert is None:
            action = argparse.BooleanOptionalAction
            group.add_argument(flag.name, dest=flag.dest, action=action, default=None, help=flag.help)
        else:
            group.add_argument(flag.name, dest=flag.dest, metavar=flag.metavar, default=None, help=flag.help)
    _add_unavailable(parser, own)


def _add_unavailable(parser: argparse.ArgumentParser, own: Collection[str]) -> None:
    hidden = argparse.SUPPRESS
    for name in _UNAVAILABLE:
        if name not in own:
            parser.add_argument(name, action=_Refused, nargs="?", dest=hidden, default=hidden, help=hidden)
    for names in _PARALLEL_SIZES:
        parser.add_argument(*names, action=_OnlyOne, dest=hidden, default=hidden, help=hidden)


def flags_to_overrides(namespace: argparse.Namespace) -> list[Flagged]:
    """The overrides that the given flags stand for, in the order of the table. Raises ConfigError naming the flag."""
    return list(_given(vars(namespace)))


def _given(arguments: Mapping[str, object]) -> Iterator[Flagged]:
    for flag in _FLAGS:
        value = arguments.get(flag.dest)
        if value is None:
            continue
        if flag.convert is not None:
            yield Flagged(flag.convert(flag.key, str(value), flag.name), flag.name)
        elif value:
            yield Flagged(f"{flag.key}=true", flag.name)
        else:
            yield Flagged(f"{flag.key}=false", "--no-" + flag.name.removeprefix("--"))


def refuse_unknown_flags(arguments: Sequence[str], *, own: Collection[str] = ()) -> None:
    """Raise ConfigError for the first flag among the arguments that a parser left over; `own` are the command's."""
    for argument in arguments:
        if not argument.startswith("-") or argument == "-":
            continue
        name = argument.partition("=")[0]
        if name.partition(".")[0] in _UNAVAILABLE:  # --speculative-config.method
            raise _not_available(name)
        raise ConfigError(f"unknown flag {name}{did_you_mean(name, [*own, *_known_flags()])}; see --help")


def _known_flags() -> list[str]:
    switches = ["--no-" + flag.name.removeprefix("--") for flag in _FLAGS if flag.convert is None]
    return ["--config", *(flag.name for flag in _FLAGS), *switches]
