"""Keyword arguments of `LLM(...)` as overrides, and vLLM's arguments that are taken only at their neutral value."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from tokenyard.errors import ConfigError, UnsupportedError, UserError, did_you_mean
from tokenyard.launch.flags import Flagged
from tokenyard.launch.overrides import format_value, quote_override

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

_COMPONENTS = ("scheduler", "attention", "engine", "kv_cache", "executor", "latency")

_KEYS: Mapping[str, str] = {
    "dtype": "model.dtype",
    "revision": "model.revision",
    "max_model_len": "model.max_model_len",
    "seed": "seed",
    "max_num_seqs": "scheduler.max_num_seqs",
    "max_num_batched_tokens": "scheduler.max_num_batched_tokens",
    "enable_chunked_prefill": "scheduler.enable_chunked_prefill",
    "long_prefill_token_threshold": "scheduler.long_prefill_token_threshold",
    "block_size": "kv_cache.block_size",
    "num_gpu_blocks_override": "kv_cache.num_blocks",
    "kv_cache_memory_bytes": "kv_cache.memory",
    "gpu_memory_utilization": "kv_cache.gpu_memory_utilization",
    "enable_prefix_caching": "kv_cache.enable_prefix_caching",
    "tensor_parallel_size": "executor.tensor_parallel_size",
    "enforce_eager": "executor.enforce_eager",
    "cudagraph_capture_sizes": "executor.cudagraph_capture_sizes",
    "max_logprobs": "model.max_logprobs",
    "logits_processors": "logits_processors",
}

_ALIASES: Mapping[str, str] = {
    "attention_backend": "attention",
    "scheduling_policy": "scheduler",
    "distributed_executor_backend": "executor",
}
_DTYPES: Mapping[str, str] = {"half": "float16", "float": "float32"}

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    # what vLLM's scripts pass although it changes nothing here; any other value is refused by name
    "disable_log_stats": (True,),
    "trust_remote_code": (False,),
    "pipeline_parallel_size": (1,),
    "data_parallel_size": (1,),
    "tokenizer": (None,),
    "tokenizer_mode": ("auto",),
    "skip_tokenizer_init": (False,),
    "quantization": (None,),
    "tokenizer_revision": (None,),
    "chat_template": (None,),
    "hf_overrides": (None, {}),
    "runner": ("auto", "generate"),
    "convert": ("auto",),
    "cpu_offload_gb": (0,),
    "disable_custom_all_reduce": (False, True),
    "allowed_local_media_path": ("",),
    "allowed_media_domains": (None,),
    "mm_processor_kwargs": (None,),
    "pooler_config": (None,),
    "structured_outputs_config": (None,),
    "profiler_config": (None,),
    "attention_config": (None,),
    "compilation_config": (None,),
    "quantization_config": (None,),
    "kv_cache_dtype": ("auto",),
    "load_format": ("auto",),
    "offload_group_size": (0,),
    "offload_num_in_group": (1,),
    "offload_prefetch_step": (1,),
    "offload_params": (None,),
    "enable_return_routed_experts": (False,),
    "return_sampling_mask": (False,),
    "spec_method": (None,),
    "spec_model": (None,),
    "spec_tokens": (None,),
    "download_dir": (None,),
    "swap_space": (0, 4),
    "device": ("auto",),
    "speculative_config": (None,),
    "enable_lora": (False,),
}


_CALL_NEUTRAL: Mapping[str, object] = {
    # the same for the arguments of generate and chat
    "lora_request": None,
    "mm_processor_kwargs": None,
}

_METHODS_NOT_YET = frozenset(
    {
        "apply_model",
        "beam_search",
        "classify",
        "collective_rpc",
        "embed",
        "encode",
        "reset_mm_cache",
        "reward",
        "score",
        "sleep",
        "start_profile",
        "stop_profile",
        "wake_up",
    }
)


def refuse_call_arguments(method: str, arguments: Mapping[str, object], owner: str = "LLM") -> None:
    """vLLM's other arguments of `generate` and `chat` are taken at the value that asks for nothing."""
    for name, value in arguments.items():
        if name not in _CALL_NEUTRAL:
            raise UserError(f"{owner}.{method} has no argument '{name}'{did_you_mean(name, _CALL_NEUTRAL)}")
        if not _is_same(value, _CALL_NEUTRAL[name]):
            raise UnsupportedError(
                f"{owner}.{method}: {name}={value!r} is not available in this version; leave it out",
                parameter=name,
                value=value,
            )


def refused_method(name: str, owner: str, instead: str) -> Callable[..., NoReturn]:
    """A method of vLLM's class that refuses to be called; AttributeError for a name that it has not either."""
    if name not in _METHODS_NOT_YET:
        raise AttributeError(f"{owner} has no attribute '{name}'")

    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise UnsupportedError(
            f"{owner}.{name} is not available in this version; it generates text: {instead}",
            parameter=name,
            value=None,
        )

    return refuse


def llm_overrides(model: str | Path | None, arguments: Mapping[str, object]) -> list[Flagged]:
    """Overrides in an order in which a component is chosen before its options are set."""
    for alias, name in _ALIASES.items():
        if arguments.get(alias) is not None and arguments.get(name) is not None:
            raise ConfigError(f"LLM: {alias} and {name} mean the same; give one of them")
    overrides = [] if model is None else [Flagged(quote_override("model.name", str(model)), "model=")]
    for name in sorted(arguments, key=lambda name: _ALIASES.get(name, name) not in _COMPONENTS):
        if (text := _override(name, arguments[name])) is not None:
            overrides.append(Flagged(text, f"{name}="))
    return overrides


def _is_same(value: object, neutral: object) -> bool:
    if value is not None and not isinstance(value, str | int | float | dict):
        return False  # an array has no truth value
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _check_processors(value: object) -> None:
    """vLLM takes classes and their paths here; a config never names code."""
    if not isinstance(value, list | tuple) or not all(isinstance(row, str | dict) for row in value):
        raise ConfigError(
            f"logits_processors={value!r}: give a list of plugins' names, or of dicts such as "
            "{'name': NAME, OPTION: VALUE}; see `tokenyard plugins`"
        )


def _override(name: str, value: object) -> str | None:
    name = _ALIASES.get(name, name)
    if name == "dtype" and value is not None:
        text = str(value).removeprefix("torch.")  # torch.float32 itself may be given
        value = _DTYPES.get(text, text)
    if name in _COMPONENTS:
        if value is None:
            return None
        if not isinstance(value, str):
            raise ConfigError(f"{name}={value!r}: give the name of a plugin as text; see `tokenyard plugins`")
        return f"{name}={value}"
    if name == "logits_processors" and value is not None:
        _check_processors(value)
    if name in _KEYS:
        return None if value is None else f"{_KEYS[name]}={format_value(value)}"
    if name in _NEUTRAL:
        if any(_is_same(value, neutral) for neutral in _NEUTRAL[name]):
            return None
        allowed = " or ".join(repr(allowed) for allowed in _NEUTRAL[name])
        raise ConfigError(f"LLM: {name}={value!r} is not available in this version; leave it out, or {allowed}")
    known = [*_COMPONENTS, *_ALIASES, *_KEYS, *_NEUTRAL, "model", "overrides"]
    raise ConfigError(
        f"LLM has no argument '{name}'{did_you_mean(name, known)}; other settings go in overrides=['key=value']"
    )
