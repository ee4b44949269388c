"""Which attention backend runs: the named one, or the first of `attention=auto`'s walk that can."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenyard.descriptors import AttentionBackendDescriptor
from tokenyard.errors import PluginError

if TYPE_CHECKING:
    from tokenyard.catalogue import Catalogue
    from tokenyard.interfaces.attention import AttentionSpec
    from tokenyard.platform import Platform

logger = logging.getLogger(__name__)

AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionChoice:
    """The backend that runs and, for `auto`, why each one before it does not: (name, reasons)."""

    descriptor: AttentionBackendDescriptor[object]
    skipped: tuple[tuple[str, tuple[str, ...]], ...] = ()


def choose_attention(catalogue: Catalogue, name: str, spec: AttentionSpec, platform: Platform) -> AttentionChoice:
    """Raises PluginError with the reasons when the named backend, or every one of the walk, cannot serve `spec`."""
    if name != AUTO:
        descriptor = _attention(catalogue, name)
        if reasons := refusals(descriptor, spec, platform):
            others = [other.name for other in auto_walk(catalogue) if not refusals(other, spec, platform)]
            instead = f"; here would run: {', '.join(others)}" if others else ""
            raise PluginError(f"attention '{name}' cannot run here: {'; '.join(reasons)}{instead}")
        return AttentionChoice(descriptor=descriptor)
    skipped: list[tuple[str, tuple[str, ...]]] = []
    for descriptor in auto_walk(catalogue):
        reasons = refusals(descriptor, spec, platform)
        if not reasons:
            logger.info("attention=auto takes %s%s", descriptor.name, _told(skipped))
            return AttentionChoice(descriptor=descriptor, skipped=tuple(skipped))
        skipped.append((descriptor.name, tuple(reasons)))
    raise PluginError(f"attention=auto found no backend that runs here{_told(skipped) or ': none is installed'}")


def auto_walk(catalogue: Catalogue) -> list[AttentionBackendDescriptor[object]]:
    """The backends that `auto` tries, in order."""
    found = [_attention(catalogue, name) for name in catalogue.names("attention")]
    ranked = [(descriptor.auto_rank, descriptor.name, descriptor) for descriptor in found]
    return [
        descriptor for rank, _, descriptor in sorted(ranked, key=lambda row: (row[0] or 0, row[1])) if rank is not None
    ]


def refusals(descriptor: AttentionBackendDescriptor[object], spec: AttentionSpec, platform: Platform) -> list[str]:
    """Why a backend cannot run: what the machine lacks, and only if it lacks nothing what the model asks."""
    return list(descriptor.requires(platform)) or list(descriptor.supports(spec))


def _attention(catalogue: Catalogue, name: str) -> AttentionBackendDescriptor[object]:
    descriptor = catalogue.get("attention", name).descriptor
    if not isinstance(descriptor, AttentionBackendDescriptor):
        raise PluginError(f"'{name}' is registered as attention but described as {descriptor.kind}")
    return descriptor


def _told(skipped: list[tuple[str, tuple[str, ...]]]) -> str:
    return "".join(f"; not {name}: {', '.join(reasons)}" for name, reasons in skipped)
