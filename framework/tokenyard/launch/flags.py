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

_ONLY_VALUES = {
    ("-pp", "--pipeline-parallel-size"): "1",
    ("-dp", "--data-parallel-size"): "1",
    ("--api-server-count", "-asc"): "1",
    ("--kv-cache-dtype",): "auto",
    ("--load-format",): "auto",
    ("--config-format",): "auto",
    ("--tokenizer-mode",): "auto",
    ("--generation-config",): "auto",
    ("--chat-template-content-format",): "auto",
    ("--runner",): "auto",
    ("--convert",): "auto",
    ("--cpu-offload-gb",): "0",
}
"""vLLM's flags that are available with one value: what happens anyway."""

_UNAVAILABLE_TEXT = """
--quantization -q --trust-remote-code --code-revision --tokenizer --tokenizer-revision
--skip-tokenizer-init --hf-overrides --hf-config-path --hf-token --download-dir
--override-generation-config --max-cudagraph-capture-size --max-seq-len-to-capture
--swap-space --prefix-caching-hash-algo --disable-sliding-window
--max-num-scheduled-tokens --max-num-partial-prefills --max-long-partial-prefills --scheduler-cls --async-scheduling
--no-async-scheduling --stream-interval --enable-expert-parallel --data-parallel-size-local --data-parallel-address
--data-parallel-rpc-port --data-parallel-backend --headless --disable-custom-all-reduce
--max-parallel-loading-workers --attention-config --speculative-config --compilation-config -O --kv-transfer-config
--kv-events-config --ec-transfer-config --structured-outputs-config --guided-decoding-backend
--logits-processor-pattern --reasoning-parser --tool-call-parser --tool-parser-plugin --enable-auto-tool-choice
--enable-lora --max-loras --max-lora-rank --max-cpu-loras --lora-modules --lora-dtype --fully-sharded-loras
--enable-prompt-embeds --limit-mm-per-prompt --mm-processor-kwargs --allowed-local-media-path --task
--return-tokens-as-token-ids --enable-prompt-tokens-details --exclude-tools-when-tool-choice-none
--disable-frontend-multiprocessing --pooler-config --middleware --max-log-len --logprobs-mode --kv-cache-metrics
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


class _OnlyValue(argparse.Action):
    """A flag of `_ONLY_VALUES`; the value is its `const`."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        if values != self.const:
            raise ConfigError(
                f"{option_string} {values} is not available in this version; the only value is {self.const}"
            )


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
        if flag.is_inverted:
            group.add_argument(flag.name, dest=flag.dest, action="store_true", default=None, help=flag.help)
        elif flag.convert is None:
            action = argparse.BooleanOptionalAction
            group.add_argument(flag.name, dest=flag.dest, action=action, default=None, help=flag.help)
        else:
            action_name = "append" if flag.is_list else "store"
            group.add_argument(
                *flag.spellings, dest=flag.dest, action=action_name, metavar=flag.metavar, default=None, help=flag.help
            )


def _add_unavailable(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    hidden = argparse.SUPPRESS
    for name in names:
        parser.add_argument(name, action=_Refused, nargs="?", dest=hidden, default=hidden, help=hidden)
    for spellings, only in _ONLY_VALUES.items():
        parser.add_argument(*spellings, action=_OnlyValue, const=only, dest=hidden, default=hidden, help=hidden)


def flags_to_overrides(namespace: argparse.Namespace) -> list[Flagged]:
    """The overrides that the given flags stand for, in the order of the table. Raises ConfigError naming the flag."""
    return list(_given(vars(namespace)))


def _given(arguments: Mapping[str, object]) -> Iterator[Flagged]:
    for flag in (*_FLAGS, *SERVER_FLAGS):
        value = arguments.get(flag.dest)
        if value is None:
            continue
        if flag.convert is None:
            name = flag.spellings[0 if value else -1]
            yield Flagged(f"{flag.key}={str(bool(value) != flag.is_inverted).lower()}", name)
        elif isinstance(value, list):
            items = [flag.convert(flag.key, str(one), flag.name) for one in value]
            yield Flagged(f"{flag.key}=[{','.join(items)}]", flag.name)
        else:
            yield Flagged(flag.convert(flag.key, str(value), flag.name), flag.name)


def refuse_unknown_flags(arguments: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """Raise ConfigError for the first flag among the arguments that the parser left over."""
    for argument in arguments:
        if not argument.startswith("-") or argument == "-":
            continue
        name = argument.partition("=")[0]
        if _is_unavailable(name):
            raise _not_available(name)
        raise ConfigError(f"unknown flag {name}{did_you_mean(name, visible_options(parser))}; see --help")


def _is_unavailable(name: str) -> bool:
    """Also for --speculative-config.method and --no-enable-lora."""
    return name.partition(".")[0].replace("--no-", "--", 1) in _UNAVAILABLE


def visible_options(parser: argparse.ArgumentParser) -> list[str]:
    """The spellings of all flags that `--help` shows: not of those that are there to be refused."""
    shown = [action for action in parser._actions if action.help is not argparse.SUPPRESS]
    return [option for action in shown for option in action.option_strings]


_SERVE_ONLY = frozenset(
    [*(spelling for flag in SERVER_FLAGS for spelling in flag.spellings), "--api-key", "--api-key-file"]
)
