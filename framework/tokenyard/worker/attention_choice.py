"""Which attention backend runs: the named one, or the first of `attention=auto`'s walk that can."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenyard.descriptors import AttentionBackendDescriptor
from tokenyard.errors import PluginError, TokenyardError
from tokenyard.interfaces.attention import AttentionBackend, AttentionSpec
from tokenyard.parts import make_part

if TYPE_CHECKING:
    import torch

    from tokenyard.catalogue import Catalogue, Entry
    from tokenyard.config import AttentionConfig
    from tokenyard.interfaces.attention import AttentionBackendContext
    from tokenyard.model.causal_lm import ModelShape
    from tokenyard.platform import Platform

logger = logging.getLogger(__name__)

AUTO = "auto"
KIND = "attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A backend that `auto` tried before it found one, and all that speaks against it."""

    name: str
    reasons: tuple[str, ...]  # never empty


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionChoice:
    """The backend that runs; `str()` is the line that tells people so."""

    name: str
    backend: AttentionBackend
    skipped: tuple[Skipped, ...] = ()
    is_auto: bool = False
    is_tested: bool = True  # whether its code ever ran on a device of this type

    def __str__(self) -> str:
        taken = f"{KIND}={AUTO} takes {self.name}" if self.is_auto else f"{KIND}={self.name}"
        about = f" ({self.backend.description})" if self.backend.description else ""
        untested = "" if self.is_tested else ", whose code never ran on a device of this type before"
        return f"{taken}{about}{untested}{_in_short(self.skipped)}"


def check_attention(catalogue: Catalogue, name: str, platform: Platform) -> None:
    """Raises PluginError when the machine lacks what the named backend, or each one of `auto`'s walk, needs.

    Reads no model: a mistake should not cost the time that loading one takes.
    """
    if name != AUTO:
        entry = catalogue.get(KIND, name)
        if reasons := entry.unavailable_reasons(platform):
            instead = [other.name for other in auto_walk(catalogue) if not other.unavailable_reasons(platform)]
            raise _cannot_run(name, reasons, instead)
        return
    skipped = []
    for entry in auto_walk(catalogue):
        if not (reasons := entry.unavailable_reasons(platform)):
            return
        skipped.append(Skipped(name=entry.name, reasons=tuple(reasons)))
    raise _none_runs(catalogue, skipped)


def choose_attention(
    catalogue: Catalogue, config: AttentionConfig, context: AttentionBackendContext, platform: Platform
) -> AttentionChoice:
    """Make the backend that the config names, or the first of `auto`'s walk that can be made.

    Raises PluginError when the named one, or every one of the walk, cannot run here. What a named one's factory raises
    is raised; `auto` goes on to the next, and warns.
    """
    spec = context.spec
    if config.name != AUTO:
        entry = catalogue.get(KIND, config.name)
        if reasons := refusals(entry, spec, platform):
            instead = [other.name for other in auto_walk(catalogue) if not refusals(other, spec, platform)]
            raise _cannot_run(config.name, reasons, instead)
        return _chosen(entry, config.options, context)
    skipped: list[Skipped] = []
    for entry in auto_walk(catalogue):
        reasons = refusals(entry, spec, platform)
        if not reasons:
            try:
                return _chosen(entry, None, context, skipped)
            except TokenyardError as error:
                reasons = [str(error).removeprefix(f"{KIND} '{entry.name}' ")]
                logger.warning("attention=auto goes on without %s: %s", entry.name, reasons[0])
        skipped.append(Skipped(name=entry.name, reasons=tuple(reasons)))
    raise _none_runs(catalogue, skipped)


def auto_walk(catalogue: Catalogue) -> list[Entry]:
    """The backends that `auto` tries, in order; a name that two distributions provide is not among them."""
    disputed = {entry.name for conflict in catalogue.conflicts for entry in conflict.entries if entry.kind == KIND}
    entries = [entry for entry in catalogue.entries() if entry.kind == KIND and entry.name not in disputed]
    ranked = [(rank, entry.name, entry) for entry in entries if (rank := _described(entry).auto_rank) is not None]
    return [entry for _, _, entry in sorted(ranked, key=lambda row: row[:2])]


def refusals(entry: Entry, spec: AttentionSpec, platform: Platform) -> list[str]:
    """Why a backend cannot run: what the machine lacks, and only if it lacks nothing what the model asks."""
    if reasons := entry.unavailable_reasons(platform):
        return reasons
    try:
        refused = _described(entry).supports(spec)
        return [refused] if isinstance(refused, str) else [str(reason) for reason in refused]
    except Exception as error:
        return [f"its supports() failed: {type(error).__name__}: {error}"]


def attention_spec(shape: ModelShape, *, dtype: torch.dtype, device: torch.device, block_size: int) -> AttentionSpec:
    """What a model's layers ask of a backend."""
    return AttentionSpec(
        device_type=device.type,
        dtype=str(dtype).removeprefix("torch."),
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        v_head_dim=shape.v_head_dim,
        block_size=block_size,
        sliding_windows=frozenset(layer.sliding_window for layer in shape.layers if layer.sliding_window),
        soft_caps=frozenset(layer.soft_cap for layer in shape.layers if layer.soft_cap),
        has_sinks=any(layer.sinks is not None for layer in shape.layers),
    )


def _chosen(
    entry: Entry, options: object | None, context: AttentionBackendContext, skipped: list[Skipped] | None = None
) -> AttentionChoice:
    """`options` None = the backend's defaults, and `skipped` is what `auto` tried before."""
    backend = make_part(
        _described(entry),
        AttentionBackend,
        lambda part: part.factory(part.options_type() if options is None else options, context),
    )
    return AttentionChoice(
        name=entry.name,
        backend=backend,
        skipped=tuple(skipped or ()),
        is_auto=skipped is not None,
        is_tested=context.spec.device_type in entry.descriptor.tested_on,
    )


def _described(entry: Entry) -> AttentionBackendDescriptor[object]:
    if not isinstance(entry.descriptor, AttentionBackendDescriptor):
        raise PluginError(f"'{entry.name}' is registered as attention but described as {entry.descriptor.kind}")
    return entry.descriptor


def _cannot_run(name: str, reasons: list[str], instead: list[str]) -> PluginError:
    others = f"; here would run: {', '.join(instead)}" if instead else ""
    return PluginError(f"attention '{name}' cannot run here: {'; '.join(reasons)}{others}")


def _none_runs(catalogue: Catalogue, skipped: list[Skipped]) -> PluginError:
    if skipped:
        told = "".join(f"; not {one.name}: {', '.join(one.reasons)}" for one in skipped)
    else:
        blocked = ", ".join(str(blocked) for blocked in catalogue.blocked)
        told = f": none is loaded ({blocked})" if blocked else ": none is installed"
    return PluginError(f"attention=auto found no backend that runs here{told}")


def _in_short(skipped: tuple[Skipped, ...]) -> str:
    """The first reason of each, up to where a remedy follows, told once for all that have it.

    `tokenyard plugins explain NAME` has the others.
    """
    names: dict[str, list[str]] = {}
    for one in skipped:
        names.setdefault(one.reasons[0].partition("; ")[0], []).append(one.name)
    return "".join(f"; not {', '.join(those)}: {reason}" for reason, those in names.items())
