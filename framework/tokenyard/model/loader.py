"""Which decoder a model gets, and loading it. transformers is imported only when the adapter is needed."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from tokenyard.errors import ModelLoadError
from tokenyard.model.decoder_config import fast_decoder_reasons, parse_decoder_config
from tokenyard.model.ranks import ONE_RANK
from tokenyard.model.tensor_parallel import check_tensor_parallel_size

if TYPE_CHECKING:
    import torch

    from tokenyard.model.causal_lm import CausalLM
    from tokenyard.model.files import ModelFiles
    from tokenyard.model.ranks import RankGroup

logger = logging.getLogger(__name__)


def decoder_choice(files: ModelFiles) -> tuple[str, list[str]]:
    """The decoder that `load_model` would take, as its description, and why the fast one would not do.

    Reads only the config: no weights, no torch, no transformers. Raises ModelLoadError for a config that does not hold.
    """
    reasons = fast_decoder_reasons(files.config)
    if not reasons:
        return parse_decoder_config(files.config).description, []
    return f"adapter ({files.architecture})", reasons


def adapter_reasons(files: ModelFiles) -> list[str]:
    """Why the adapter could not run this model either, as far as that can be told without its weights; empty = it may.

    Imports transformers. What is left is checked when the weights are loaded: that a packed batch gives the logits of
    its sequences alone.
    """
    from tokenyard.model.hf_loading import build_config, class_reasons, config_reasons, find_class

    if files.format != "safetensors":
        return ["only the fast decoder runs GGUF files"]
    try:
        config = build_config(files)
        reasons = config_reasons(config)
        return reasons if config.is_encoder_decoder else [*class_reasons(find_class(files, config)), *reasons]
    except ModelLoadError as error:
        return [str(error)]


def load_model(files: ModelFiles, *, dtype: torch.dtype, device: torch.device, ranks: RankGroup = ONE_RANK) -> CausalLM:
    """The fast decoder where it can run the model, else transformers' own code behind the adapter.

    Of several ranks each loads its part of a model for the fast decoder; another model raises ConfigError.
    """
    if files.config.get("quantization_config"):
        raise ModelLoadError(f"{files.path}: quantised weights (quantization_config) are not available")
    check_tensor_parallel_size(files, ranks.size)
    started = time.perf_counter()
    description, reasons = decoder_choice(files)
    model = _load_adapter(files, dtype, device, reasons) if reasons else _load_fast(files, dtype, device, ranks)
    logger.info("%s: %s, loaded in %.2f s", files.name, description, time.perf_counter() - started)
    return model


def _load_fast(files: ModelFiles, dtype: torch.dtype, device: torch.device, ranks: RankGroup) -> CausalLM:
    # torch, which choosing a decoder does not need
    from tokenyard.model.decoder import FastDecoder
    from tokenyard.model.weights import open_weights

    config = parse_decoder_config(files.config)
    with open_weights(files) as weights:
        return FastDecoder(config, weights, dtype=dtype, device=device, ranks=ranks)


def _load_adapter(files: ModelFiles, dtype: torch.dtype, device: torch.device, reasons: list[str]) -> CausalLM:
    # transformers takes a second or more to import
    from tokenyard.model.adapter import load_adapter

    logger.info("%s: not the fast decoder, because %s", files.name, "; ".join(reasons))
    return load_adapter(files, dtype=dtype, device=device)
