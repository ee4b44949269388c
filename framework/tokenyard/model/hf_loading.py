"""Building a transformers model from a folder: config, class, weights, and what is known beforehand to go wrong."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as transformers_logging

from tokenyard.errors import ModelLoadError, did_you_mean
from tokenyard.model.hf_attention import ATTENTION_NAME
from tokenyard.model.hf_calls import LoadingInfo, model_from_tensors
from tokenyard.model.weights import SafetensorsWeights

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

    from tokenyard.model.files import ModelFiles

_LAYER_TYPES = ("full_attention", "sliding_attention")
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")
_MAX_NAMES_SHOWN = 8


def build_config(files: ModelFiles) -> PreTrainedConfig:
    """transformers' config object from the sanitised config."""
    model_type = files.config.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        known = list(CONFIG_MAPPING.keys())
        raise ModelLoadError(
            f"{files.path}: transformers does not know the model type {model_type!r}"
            f"{did_you_mean(str(model_type), known)}; a newer transformers may"
        )
    try:
        values = {key: _with_floats(copy.deepcopy(value)) for key, value in files.config.items()}
        config: PreTrainedConfig = CONFIG_MAPPING[model_type].from_dict(values)
    except Exception as error:  # each config class checks itself, with errors of its own
        raise ModelLoadError(f"{files.path}: config.json is not valid: {one_line(error)}") from error
    return config


def _with_floats(value: object) -> object:
    """transformers writes numbers that JSON has no word for as {"__float__": "Infinity"}."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
            return float(value["__float__"])
        return {key: _with_floats(item) for key, item in value.items()}
    return [_with_floats(item) for item in value] if isinstance(value, list) else value


def find_class(files: ModelFiles, config: PreTrainedConfig) -> type[PreTrainedModel]:
    """transformers' class for causal language modeling, which must be the one that the config names."""
    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), ())
    several = found if isinstance(found, (list, tuple)) else (found,)
    candidates = cast("Sequence[type[PreTrainedModel]]", several)
    for candidate in candidates:
        if candidate.__name__ == files.architecture:
            return candidate
    known = ", ".join(candidate.__name__ for candidate in candidates) or "none"
    raise ModelLoadError(
        f"{files.path}: {files.architecture} is not a causal language model of model type "
        f"'{config.model_type}' in transformers; known: {known}"
    )


def class_reasons(model_class: type[PreTrainedModel]) -> list[str]:
    """Why models of this class cannot run over a paged K/V cache."""
    has_interface = model_class._supports_attention_backend
    checks = {
        "transformers does not declare that it uses the attention interface": not has_interface,
        "it keeps a recurrent state, which a K/V cache cannot hold": model_class._is_stateful,
    }
    return [reason for reason, holds in checks.items() if holds]


def config_reasons(config: PreTrainedConfig) -> list[str]:
    """Why a model of this config, or the text model in it, cannot run over a paged K/V cache."""
    if config.is_encoder_decoder:
        return ["it is an encoder-decoder"]
    reasons = []
    config = config.get_text_config()
    others = sorted(set(layer_types(config)) - set(_LAYER_TYPES))
    if others:
        reasons.append(f"its layers of type {', '.join(others)} need more than a K/V cache")
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, Mapping)] if isinstance(rope, Mapping) else []
    types = {str(part.get("rope_type")) for part in (rope, *nested) if isinstance(part, Mapping)}
    for name in sorted(types & set(_BATCH_DEPENDENT_ROPE)):
        reasons.append(f"its rope type '{name}' changes with the longest sequence of a batch")
    return reasons


def config_for(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedConfig:
    """What a class is built from: of a config for more than text the whole, or the part that is its text model's."""
    text = config.get_text_config()
    return text if model_class.config_class is type(text) else config


def layer_types(config: PreTrainedConfig) -> list[str]:
    """The kind of each layer; empty when the config does not say."""
    types = getattr(config, "layer_types", None)
    return list(types) if types else []


def load_weights(
    files: ModelFiles,
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> PreTrainedModel:
    """The model on its device, for evaluation. A tensor neither loaded nor declared tied is an error that names it."""
    try:
        with _quiet(), SafetensorsWeights(files.path) as weights:
            tensors = {name: weights.get_stored(name) for name in weights.names()}
            model, info = model_from_tensors(model_class, config, tensors, dtype=dtype, attention=ATTENTION_NAME)
    except ModelLoadError:
        raise
    except Exception as error:  # transformers raises whatever its parts raise
        raise ModelLoadError(f"{files.path}: {files.architecture} cannot be loaded: {one_line(error)}") from error
    _check_tensors(files, info)
    module: torch.nn.Module = model
    module.to(device).eval().requires_grad_(False)
    return model


def _check_tensors(files: ModelFiles, info: LoadingInfo) -> None:
    problems = [
        f"{what} tensors: {_shown(names)}"
        for what in ("missing", "unexpected", "mismatched")
        if (names := sorted(_described(key) for key in info[f"{what}_keys"]))
    ]
    if problems:
        raise ModelLoadError(f"{files.path}: the checkpoint does not fit its config.json: {'; '.join(problems)}")


def _described(key: object) -> str:
    """A parameter's name; transformers gives those that differ in size as (name, shape, expected shape)."""
    if not isinstance(key, tuple) or len(key) != 3:
        return str(key)
    name, shape, expected = key
    return f"{name} ({list(shape)}, the config asks for {list(expected)})"


def refuse(architecture: str, reasons: Sequence[str]) -> None:
    """Raise ModelLoadError with the reasons, if there are any."""
    if reasons:
        raise ModelLoadError(f"{architecture} cannot be run: {'; '.join(reasons)}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Neither progress bars nor reports of transformers while it loads; Tokenyard has its own."""
    shown, verbosity = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if shown:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def one_line(error: Exception) -> str:
    """An error's type and message on one line of bounded length."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


def _shown(names: Sequence[str]) -> str:
    rest = len(names) - _MAX_NAMES_SHOWN
    return ", ".join(names[:_MAX_NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
