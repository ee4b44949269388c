"""Flags that people know from vLLM, as overrides; those it has and we do not are refused by name."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenyard.errors import ConfigError, did_you_mean
from tokenyard.launch import flag_values as values
from tokenyard.launch.flag_values import Flag, parse_length
from tokenyard.launch.overrides import quote_override
from tokenyard.launch.server_flags import SERVER_FLAGS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

__all__ = [
    "Flagged",
    "add_engine_flags",
    "flags_to_overrides",
    "parse_length",
    "quote_override",
    "refuse_unknown_flags",
]


@dataclass(frozen=True, slots=True)
class Flagged:
    """An override that a flag stands for."""

    override: str
    flag: str


_FLAGS = (
    Flag("--model", "model.name", values.text, "MODEL", "a name, a folder, a .gguf file or a Hub id, taken verbatim"),
    Flag("--revision", "model.revision", values.text, "REVISION", "of a Hub id: a branch, tag or commit"),
    Flag("--dtype", "model.dtype", values.text, "TYPE", "auto, float32, bfloat16 or float16"),
    Flag(
        "--max-model-len",
        "model.max_model_len",
        values.count_or_auto,
        "N",
        "prompt and output tokens; 2k = 2000, 2K = 2048; auto = what fits",
    ),
    Flag("--seed", "seed", values.integer, "N", "of everything that is random"),
    Flag("--max-num-seqs", "scheduler.max_num_seqs", values.count, "N", "requests running at once"),
    Flag("--max-num-batched-tokens", "scheduler.max_num_batched_tokens", values.count, "N", "tokens of one step"),
    Flag("--enable-chunked-prefill", "scheduler.enable_chunked_prefill", None, "", "split long prompts over steps"),
    Flag(
        "--long-prefill-token-threshold",
        "scheduler.long_prefill_token_threshold",
        values.count,
        "N",
        "longest chunk of a prompt",
    ),
    Flag("--scheduling-policy", "scheduler", values.text, "NAME", "a scheduling policy, or a whole scheduler"),
    Flag("--block-size", "kv_cache.block_size", values.count, "N", "tokens of a K/V block"),
    Flag("--num-gpu-blocks-override", "kv_cache.num_blocks", values.count, "N", "K/V blocks, on any device"),
    Flag("--gpu-memory-utilization", "kv_cache.gpu_memory_utilization", values.number, "SHARE", "of a GPU's memory"),
    Flag("--kv-cache-memory-bytes", "kv_cache.memory", values.memory, "BYTES", "of the K/V cache; also 512MiB, 2GB"),
    Flag("--enable-prefix-caching", "kv_cache.enable_prefix_caching", None, "", "share the K/V of equal beginnings"),
    Flag("--attention-backend", "attention", values.text, "NAME", "an attention backend, or auto"),
    Flag("--distributed-executor-backend", "executor", values.text, "NAME", "an executor"),
    Flag(
        "--tensor-parallel-size",
        "executor.tensor_parallel_size",
        values.count,
        "N",
        "ranks that share the model; needs executor=multiproc",
        short="-tp",
    ),
    Flag("--enforce-eager", "executor.enforce_eager", None, "", "never record CUDA graphs"),
    Flag(
        "--cudagraph-capture-sizes",
        "executor.cudagraph_capture_sizes",
        values.counts,
        "SIZES",
        "numbers of requests with CUDA graphs, such as 1,2,4,8",
    ),
    Flag("--max-logprobs", "model.max_logprobs", values.integer, "N", "most logprobs of a position; -1 = no limit"),
    Flag(
        "--logits-processors",
        "logits_processors",
        values.names,
        "NAMES",
        "by name, with commas between; with options as logits_processors=[{name: NAME, OPTION: VALUE}]",
    ),
)

_PARALLEL_SIZES = (
    ("-pp", "--pipeline-parallel-size"),
    ("-dp", "--data-parallel-size"),
)
"""Available with the value 1 only."""

_UNAVAILABLE_TEXT = """
--quantization -q --trust-remote-code --code-revision --tokenizer --tokenizer-revision --tokenizer-mode
--skip-tokenizer-init --hf-overrides --hf-config-path --hf-token --load-format --download-dir --config-format
--generation-config --override-generation-config --max-cudagraph-capture-size --max-seq-len-to-capture
--kv-cache-dtype --cpu-offload-gb --swap-space --prefix-caching-hash-algo --disable-sliding-window
--max-num-scheduled-tokens --max-num-partial-prefills --max-long-partial-prefills --scheduler-cls --async-scheduling
--no-async-scheduling --stream-interval --enable-expert-parallel --data-parallel-size-local --data-parallel-address
--data-parallel-rpc-port --data-parallel-backend --headless --api-server-count -asc --disable-custom-all-reduce
--max-parallel-loading-workers --attention-config --speculative-config --compilation-config -O --kv-transfer-config
--kv-events-config --ec-transfer-config --structured-outputs-config --guided-decoding-backend
--logits-processor-pattern --reasoning-parser --tool-call-parser --tool-parser-plugin --enable-auto-tool-choice
--enable-lora --max-loras --max-lora-rank --max-cpu-loras --lora-modules --lora-dtype --fully-sharded-loras
--enable-prompt-embeds --limit-mm-per-prompt --mm-processor-kwargs --allowed-local-media-path --runner --convert
--pooler-config --chat-template-content-format --middleware --max-log-len --logprobs-mode --kv-cache-metrics
--kv-cache-metrics-sample --collect-detailed-traces --enable-offline-docs --disable-fastapi-docs --additional-config
--enable-sleep-mode --worker-cls --worker-extension-cls --device --profiler-config --num-lookahead-slots
--ssl-cert-reqs --ssl-ciphers --enable-ssl-refresh --allow-credentials --allowed-methods --allowed-headers
--uvicorn-log-level --disable-uvicorn-access-log --enable-request-id-headers --enable-server-load-tracking
--h11-max-header-count --h11-max-incomplete-event-size --tool-server --log-config-file --chat-template-kwargs
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
    if flag in _SERVE_ONLY:
        return ConfigError(f"{flag} is a flag of `tokenyard serve`; remove it")
    return ConfigError(f"{flag} is not available in this version; remove it")


def add_engine_flags(parser: argparse.ArgumentParser, *, own: Collection[str] = (), is_server: bool = False) -> None:
    """Add the flags to a command's parser; `own` names those that the command adds itself, with a meaning of its own.

    Turns abbreviations off: one would be taken for another flag when a later version adds some. `--config FILE` is
    stored as `config_file`, a string or None. Those of the server are added with `is_server`, and otherwise refused.
    """
    parser.allow_abbrev = False
    group = parser.add_argument_group("engine", "the same as overrides; KEY=VALUE overrides reach every other setting")
    group.add_argument("--config", metavar="FILE", dest="config_file", help="a YAML of overrides")
    _add_flags(group, [flag for flag in _FLAGS if flag.name not in own])
    if is_server:
        _add_flags(parser.add_argument_group("server"), [flag for flag in SERVER_FLAGS if flag.name not in own])
    _add_unavailable(parser, [name for name in (*_UNAVAILABLE, *(() if is_server else _SERVE_ONLY)) if name not in own])


def _add_flags(group: argparse._ArgumentGroup, flags: Sequence[Flag]) -> None:
    for flag in flags:
        if flag.convert is None:
            action = argparse.BooleanOptionalAction
            group.add_argument(flag.name, dest=flag.dest, action=action, default=None, help=flag.help)
        else:
            action_name = "append" if flag.is_list else "store"
            names = [flag.name] if flag.short is None else [flag.short, flag.name]
            group.add_argument(
                *names, dest=flag.dest, action=action_name, metavar=flag.metavar, default=None, help=flag.help
            )


def _add_unavailable(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    hidden = argparse.SUPPRESS
    for name in names:
        parser.add_argument(name, action=_Refused, nargs="?", dest=hidden, default=hidden, help=hidden)
    for size_names in _PARALLEL_SIZES:
        parser.add_argument(*size_names, action=_OnlyOne, dest=hidden, default=hidden, help=hidden)


def flags_to_overrides(namespace: argparse.Namespace) -> list[Flagged]:
    """The overrides that the given flags stand for, in the order of the table. Raises ConfigError naming the flag."""
    return list(_given(vars(namespace)))


def _given(arguments: Mapping[str, object]) -> Iterator[Flagged]:
    for flag in (*_FLAGS, *SERVER_FLAGS):
        value = arguments.get(flag.dest)
        if value is None:
            continue
        if flag.convert is None:
            name = flag.name if value else "--no-" + flag.name.removeprefix("--")
            yield Flagged(f"{flag.key}={str(bool(value) != flag.is_inverted).lower()}", name)
        elif isinstance(value, list):
            items = [flag.convert(flag.key, str(one), flag.name) for one in value]
            yield Flagged(f"{flag.key}=[{','.join(items)}]", flag.name)
        else:
            yield Flagged(flag.convert(flag.key, str(value), flag.name), flag.name)


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
    return ["--config", *_spellings(_FLAGS)]


def _spellings(flags: Sequence[Flag]) -> list[str]:
    switches = ["--no-" + flag.name.removeprefix("--") for flag in flags if flag.convert is None]
    return [*(flag.name for flag in flags), *switches]


_SERVE_ONLY = frozenset([*_spellings(SERVER_FLAGS), "--api-key", "--api-key-file"])
