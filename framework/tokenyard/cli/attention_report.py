"""What `tokenyard doctor` says of attention: the backend that would run, made for the model. Reads no weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenyard.errors import UserError
from tokenyard.platform import Platform
from tokenyard.worker.attention_choice import AUTO, auto_walk, check_attention, choose_attention

if TYPE_CHECKING:
    from tokenyard.catalogue import Catalogue
    from tokenyard.config import EngineConfig
    from tokenyard.model.files import ModelFiles


def attention_report(config: EngineConfig, catalogue: Catalogue, *, fetch: bool) -> dict[str, object]:
    """Facts by name; "problem" is among them when none could run. `fetch` allows to download a model's configs."""
    try:
        check_attention(catalogue, config.attention.name, Platform())
        files = _fast_files(config, fetch)
        return {"backend": _before_the_model(config, catalogue) if files is None else _made(config, catalogue, files)}
    except UserError as error:
        return {"problem": str(error)}


def _fast_files(config: EngineConfig, fetch: bool) -> ModelFiles | None:
    """The model's files if the fast decoder runs it: what its layers ask is then known from its config."""
    from tokenyard.model.decoder_config import fast_decoder_reasons
    from tokenyard.model.default_model import DEFAULT_MODEL, is_cached
    from tokenyard.model.files import resolve_model

    if config.model.name == DEFAULT_MODEL and not fetch and not is_cached():
        return None
    try:
        files = resolve_model(config.model.name, revision=config.model.revision, weights=False)
        return None if fast_decoder_reasons(files.config) else files
    except UserError:  # which the part about the model tells
        return None


def _before_the_model(config: EngineConfig, catalogue: Catalogue) -> str:
    if config.attention.name != AUTO:
        return f"{config.attention.name}, if it serves the model"
    names = [entry.name for entry in auto_walk(catalogue) if not entry.unavailable_reasons(Platform())]
    return f"the first that serves the model of: {', '.join(names)}"


def _made(config: EngineConfig, catalogue: Catalogue, files: ModelFiles) -> str:
    from tokenyard.interfaces.attention import AttentionBackendContext
    from tokenyard.model.decoder import shape_of
    from tokenyard.model.decoder_config import parse_decoder_config
    from tokenyard.worker.attention_choice import attention_spec
    from tokenyard.worker.device import choose_device, choose_dtype, set_threads

    device = choose_device(config.executor.device)
    spec = attention_spec(
        shape_of(parse_decoder_config(files.config)),
        dtype=choose_dtype(config.model.dtype, files.torch_dtype),
        device=device,
        block_size=config.kv_cache.block_size,
    )
    threads = set_threads(config.executor.num_threads)
    context = AttentionBackendContext(spec=spec, device=device, num_threads=threads)
    return str(choose_attention(catalogue, config.attention, context, Platform()))
