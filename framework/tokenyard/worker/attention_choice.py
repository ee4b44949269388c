"""Which attention backend runs: the named one, or the first of `attention=auto`'s walk that can."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenyard.descriptors import AttentionBackendDescriptor
from tokenyard.errors import PluginError

if TYPE_CHECKING:
    from tokenyard.catalogue import Catalogue, Entry
    from tokenyard.interfaces.attention import AttentionSpec
    from tokenyard.platform import Platform

logger = logging.getLogger(__name__)

AUTO = "auto"
KIND = "attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionChoice:
    """The backend that runs and, for `auto`, why each one before it does not: (name, reasons)."""

    descriptor: AttentionBackendDescriptor[object]
    skipped: tuple[tuple[str, tuple[str, ...]], ...] = ()


def choose_attention(catalogue: Catalogue, name: str, spec: AttentionSpec, platform: Platform) -> AttentionChoice:
    """Raises PluginError with the reasons when the named backend, or every one of the walk, cannot serve `spec`."""
    if name != AUTO:
        entry = catalogue.get(KIND, name)
        if reasons := refusals(entry, spec, platform):
            others = [other.name for other in auto_walk(catalogue) if not refusals(other, spec, platform)]
            instead = f"; here would run: {', '.join(others)}" if others else ""
            raise PluginError(f"attention '{name}' cannot run here: {'; '.join(reasons)}{instead}")
        return AttentionChoice(descriptor=_described(entry))
    skipped: list[tuple[str, tuple[str, ...]]] = []
    for entry in auto_walk(catalogue):
        reasons = refusals(entry, spec, platform)
        if not reasons:
            logger.info("attention=auto takes %s%s", entry.name, _told(skipped))
            return AttentionChoice(descriptor=_described(entry), skipped=tuple(skipped))
        skipped.append((entry.name, tuple(reasons)))
    blocked = ", ".join(str(blocked) for blocked in catalogue.blocked)
    none = f": none is loaded ({blocked})" if blocked else ": none is installed"
    raise PluginError(f"attention=auto found no backend that runs here{_told(skipped) or none}")


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
        return list(_described(entry).supports(spec))
    except Exception as error:
        return [f"its supports() failed: {type(error).__name__}: {error}"]


def _described(entry: Entry) -> AttentionBackendDescriptor[object]:
    if not isinstance(entry.descriptor, AttentionBackendDescriptor):
        raise PluginError(f"'{entry.name}' is registered as attention but described as {entry.descriptor.kind}")
    return entry.descriptor


def _told(skipped: list[tuple[str, tuple[str, ...]]]) -> str:
    return "".join(f"; not {name}: {', '.join(reasons)}" for name, reasons in skipped)
