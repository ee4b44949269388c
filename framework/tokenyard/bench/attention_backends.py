"""Which attention backends a benchmark measures, made for its heads, and why the others are left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenyard.descriptors import AttentionBackendDescriptor
from tokenyard.errors import ConfigError, PluginError
from tokenyard.interfaces.attention import AttentionBackend, AttentionSpec
from tokenyard.parts import make_part
from tokenyard.platform import Platform
from tokenyard.worker.attention_choice import AUTO, KIND, Skipped, refusals
from tokenyard.worker.device import choose_dtype

if TYPE_CHECKING:
    import torch

    from tokenyard.bench.settings import AttentionBench
    from tokenyard.catalogue import Catalogue
    from tokenyard.config import EngineConfig
    from tokenyard.interfaces.attention import AttentionBackendContext


@dataclass(frozen=True, slots=True)
class Candidate:
    """A backend that runs here."""

    name: str
    backend: AttentionBackend


def spec_of(settings: AttentionBench, config: EngineConfig, device: torch.device) -> AttentionSpec:
    """What the layers ask of every backend."""
    window = settings.sliding_window
    return AttentionSpec(
        device_type=device.type,
        dtype=str(choose_dtype(config.model.dtype, "bfloat16")).removeprefix("torch."),
        num_heads=settings.num_heads,
        num_kv_heads=settings.num_kv_heads,
        head_dim=settings.head_dim,
        v_head_dim=settings.head_dim,
        block_size=config.kv_cache.block_size,
        sliding_windows=frozenset() if window is None else frozenset({window}),
    )


def find_candidates(
    settings: AttentionBench, config: EngineConfig, catalogue: Catalogue, context: AttentionBackendContext
) -> tuple[list[Candidate], list[Skipped]]:
    """Raises PluginError when one that is named cannot run, or none can."""
    named = _named(settings, config)
    found: list[Candidate] = []
    skipped: list[Skipped] = []
    for name in named or catalogue.names(KIND):
        made = _made(config, catalogue, name, context)
        if isinstance(made, Candidate):
            found.append(made)
        elif named:
            raise PluginError(f"attention '{name}' cannot be measured here: {'; '.join(made.reasons)}")
        else:
            skipped.append(made)
    if not found:
        told = "; ".join(f"{one.name}: {', '.join(one.reasons)}" for one in skipped)
        raise PluginError(f"no attention backend can be measured here: {told or 'none is installed'}")
    return found, skipped


def _named(settings: AttentionBench, config: EngineConfig) -> tuple[str, ...]:
    """Empty = all."""
    chosen = config.attention.name
    if settings.names is None:
        return () if chosen == AUTO else (chosen,)
    if chosen not in (AUTO, *settings.names):
        raise ConfigError(
            f"attention={chosen} is not among bench.backends=[{','.join(settings.names)}]; add it, or remove it"
        )
    return settings.names


def _made(
    config: EngineConfig, catalogue: Catalogue, name: str, context: AttentionBackendContext
) -> Candidate | Skipped:
    try:
        entry = catalogue.get(KIND, name)
        if reasons := refusals(entry, context.spec, Platform()):
            return Skipped(name=name, reasons=tuple(reasons))
        descriptor = entry.descriptor
        if not isinstance(descriptor, AttentionBackendDescriptor):
            return Skipped(name=name, reasons=(f"it is registered as attention but described as {descriptor.kind}",))
        options = _options(config, descriptor)
        return Candidate(name, make_part(descriptor, AttentionBackend, lambda part: part.factory(options, context)))
    except PluginError as error:
        return Skipped(name=name, reasons=(str(error),))


def _options(config: EngineConfig, descriptor: AttentionBackendDescriptor[object]) -> object:
    """The config's if it names this backend, else the backend's defaults."""
    if config.attention.name == descriptor.name:
        return config.attention.options
    try:
        return descriptor.options_type()
    except TypeError as error:
        raise PluginError(f"its options need values; name it with attention={descriptor.name} ({error})") from error
