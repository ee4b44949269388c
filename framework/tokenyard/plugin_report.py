"""What `tokenyard plugins` and `tokenyard plugins explain NAME` show: rows and explanations, ready for JSON."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, Field, asdict, dataclass, fields
from typing import TYPE_CHECKING, Literal, NamedTuple

from tokenyard.catalogue import Catalogue, Entry, Provider, format_api
from tokenyard.descriptors import AttentionBackendDescriptor, PolicyDescriptor
from tokenyard.errors import PluginError, did_you_mean

if TYPE_CHECKING:
    from tokenyard.platform import Platform

Status = Literal["active", "available", "unavailable", "broken", "blocked", "incompatible", "conflict"]

_SELECTED_BY: Mapping[str, str] = {
    "engine": "engine={name}",
    "scheduler": "scheduler={name}",
    "policy": "scheduler={name}",
    "kv_cache": "kv_cache={name}",
    "attention": "attention={name}",
    "executor": "executor={name}",
    "observer": "observers=[{name}]",
    "logits_processor": "logits_processors=[{name}]",
    "latency": "latency={name}",
    "predictor": "scheduler.predictor={name}",
    "eviction": "kv_cache.eviction={name}",
}


_OPTION_PREFIX: Mapping[str, str] = {
    "policy": "scheduler.policy.",
    **dict.fromkeys(("predictor", "eviction", "observer", "logits_processor"), ""),
}
"""Before the names of a kind's options; nothing where they stand beside the component's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginRow:
    """One line of the listing. Of a broken or blocked plugin only the entry point is known; it serves as the name."""

    name: str
    kind: str | None
    distribution: str
    version: str
    entry_point: str
    api_version: str | None
    status: Status
    reason: str | None  # why it cannot be chosen; None when it can
    summary: str = ""
    tested_on: tuple[str, ...] = ()  # device types on which the code has really run

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "tested_on": list(self.tested_on)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether one bearer of a name would run here, and what a person should know of it."""

    row: PluginRow
    can_be_chosen: bool
    selected_by: str | None  # the config line that chooses it; None where another component's option does
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "row": self.row.to_json(), "notes": list(self.notes)}

    def __str__(self) -> str:
        row = self.row
        head = f"{row.kind} '{row.name}'" if row.kind else f"plugin '{row.name}'"
        lines = [f"{head} of {row.distribution} {row.version}: {row.status}", *self.notes]
        return "\n  ".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """All that is known of a name; `str()` is for people, `to_json()` for programs."""

    name: str
    verdicts: tuple[Verdict, ...]

    def to_json(self) -> dict[str, object]:
        return {"name": self.name, "verdicts": [verdict.to_json() for verdict in self.verdicts]}

    def __str__(self) -> str:
        return "\n".join(str(verdict) for verdict in self.verdicts)


class _Line(NamedTuple):
    row: PluginRow
    provider: Provider
    entry: Entry | None  # None for a plugin that was left out whole
    remedy: str | None = None


def describe(catalogue: Catalogue, platform: Platform, active: Collection[tuple[str, str]] = ()) -> list[PluginRow]:
    """A row for every component and every plugin left out; `active` holds the (kind, name) that the config chooses."""
    return [line.row for line in _lines(catalogue, platform, active)]


def explain(
    catalogue: Catalogue, name: str, platform: Platform, active: Collection[tuple[str, str]] = ()
) -> Explanation:
    """Why what bears `name` would or would not be chosen here.

    Components of that name and plugins left out that bear it; when there are none, all that the entry point or
    distribution of that name provides. Raises PluginError for a name that nothing bears. Asks the platform for its
    device type, which imports torch.
    """
    lines = list(_lines(catalogue, platform, active))
    found = [line for line in lines if line.row.name == name or (line.entry is None and line.provider.bears(name))]
    found = found or [line for line in lines if line.provider.bears(name)]
    if not found:
        known = sorted({line.row.name for line in lines})
        raise PluginError(
            f"no plugin provides '{name}'{did_you_mean(name, known)}; known: {', '.join(known)}; "
            "is the plugin installed? see `tokenyard plugins`"
        )
    return Explanation(name=name, verdicts=tuple(_verdict(line, platform) for line in found))


def _lines(catalogue: Catalogue, platform: Platform, active: Collection[tuple[str, str]]) -> Iterator[_Line]:
    in_conflict = {
        (entry.kind, entry.name): str(conflict) for conflict in catalogue.conflicts for entry in conflict.entries
    }
    for entry in catalogue.entries():
        key = (entry.kind, entry.name)
        if conflict := in_conflict.get(key):
            row = _entry_row(entry, "conflict", conflict)
        elif reasons := entry.unavailable_reasons(platform):
            row = _entry_row(entry, "unavailable", "; ".join(reasons))
        else:
            row = _entry_row(entry, "active" if key in active else "available", None)
        yield _Line(row, entry.provider, entry)
    for entry in catalogue.incompatible:
        yield _Line(_entry_row(entry, "incompatible", entry.incompatibility), entry.provider, entry)
    for failure in catalogue.failures:
        row = _plugin_row(failure.provider, "broken", failure.error)
        yield _Line(row, failure.provider, None, f"repair or upgrade {failure.provider.distribution}")
    for blocked in catalogue.blocked:
        row = _plugin_row(blocked.provider, "blocked", blocked.reason)
        yield _Line(row, blocked.provider, None, f"to unblock it, {blocked.remedy}")


def _entry_row(entry: Entry, status: Status, reason: str | None) -> PluginRow:
    descriptor = entry.descriptor
    is_checked = status != "incompatible"  # what another plugin API put into the other fields is not known
    return PluginRow(
        name=entry.name,
        kind=entry.kind,
        distribution=entry.provider.distribution,
        version=entry.provider.version,
        entry_point=entry.provider.entry_point,
        api_version=format_api(descriptor.api_version),
        status=status,
        reason=reason,
        summary=descriptor.summary if is_checked else "",
        tested_on=tuple(sorted(descriptor.tested_on)) if is_checked else (),
    )


def _plugin_row(provider: Provider, status: Status, reason: str) -> PluginRow:
    return PluginRow(
        name=provider.entry_point,
        kind=None,
        distribution=provider.distribution,
        version=provider.version,
        entry_point=provider.entry_point,
        api_version=None,
        status=status,
        reason=reason,
    )


def _verdict(line: _Line, platform: Platform) -> Verdict:
    row = line.row
    can_be_chosen = row.status in ("active", "available")
    template = _SELECTED_BY.get(row.kind or "")
    selected_by = template.format(name=row.name) if template else None
    notes: list[str] = []
    if row.reason is not None:
        notes.append(f"cannot be chosen: {row.reason}")
    if line.remedy is not None:
        notes.append(line.remedy)
    if can_be_chosen:
        notes.append(_how_chosen(row, selected_by))
    if line.entry is not None and row.status != "incompatible":
        notes.extend(_entry_notes(line.entry, platform))
    return Verdict(row=row, can_be_chosen=can_be_chosen, selected_by=selected_by, notes=tuple(notes))


def _how_chosen(row: PluginRow, selected_by: str | None) -> str:
    verb = "is chosen" if row.status == "active" else "would be chosen"
    if selected_by is None:
        return f"{verb} by the option that names the {row.kind}"
    return f"{verb} by `{selected_by}`"


def _entry_notes(entry: Entry, platform: Platform) -> Iterator[str]:
    descriptor = entry.descriptor
    if descriptor.summary:
        yield descriptor.summary
    if options := fields(descriptor.options_type):  # type: ignore[arg-type]
        prefix = _OPTION_PREFIX.get(entry.kind, f"{entry.kind}.")
        yield "options: " + ", ".join(f"{prefix}{option.name}{_default(option)}" for option in options)
    if isinstance(descriptor, PolicyDescriptor) and (hints := fields(descriptor.metadata_type)):
        told = (f"{hint.name}: {_type(hint)}{_default(hint)}" for hint in hints)
        yield f"hints of a request, besides those that any scheduler takes: {', '.join(told)}"
    if isinstance(descriptor, AttentionBackendDescriptor):
        rank = descriptor.auto_rank
        yield "never taken by `attention=auto`" if rank is None else f"`attention=auto` tries it at rank {rank}"
    if not descriptor.tested_on:
        yield "never ran on a device: tested without one only"
    elif platform.device_type not in descriptor.tested_on:
        tested = ", ".join(sorted(descriptor.tested_on))
        yield f"never ran on a {platform.device_type} device: tested on {tested} only"


def _type(option: Field[object]) -> str:
    return option.type if isinstance(option.type, str) else inspect.formatannotation(option.type)


def _default(option: Field[object]) -> str:
    if option.default is not MISSING:
        return f" = {option.default}"
    return "" if option.default_factory is MISSING else f" = {option.default_factory()}"
