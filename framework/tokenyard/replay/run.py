"""Replaying a trace file: the same calls, compared record by record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenyard.errors import PluginError, UserError
from tokenyard.ipc.handshake import own_identity
from tokenyard.launch.tracing import components_of
from tokenyard.replay.config import replayed_config
from tokenyard.replay.player import Player
from tokenyard.trace.difference import DECISIONS, find_difference
from tokenyard.trace.reader import TraceReader
from tokenyard.trace.records import Scheduled

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tokenyard.catalogue import Catalogue
    from tokenyard.config import EngineConfig
    from tokenyard.engine_outputs import ShadowStats
    from tokenyard.trace.difference import Difference
    from tokenyard.trace.records import Component, Header, Record


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """What came of a replay."""

    num_steps: int  # that were scheduled again, the one that differs included
    num_records: int  # that were compared
    difference: Difference | None  # None = identical
    notes: Sequence[str]  # what one should know of the trace and of this installation
    shadow: ShadowStats | None  # of the replay


def replay(path: Path, overrides: Sequence[str] = (), catalogue: Catalogue | None = None) -> ReplayResult:
    """Make the recorded calls again, until something differs or the trace ends.

    With overrides this says where another config would first have decided otherwise: who runs, with how many tokens,
    hits and preemptions. Beyond that the recorded tokens belong to other rows, so it stops there in any case. Which
    blocks are used, and why others wait, is not compared then. Raises UserError for a file that is no trace,
    ConfigError and PluginError for a config that cannot be built here.
    """
    with TraceReader(path) as reader:
        config, catalogue = replayed_config(reader.header, overrides, catalogue)
        notes = _installation_notes(reader.header, config, catalogue)
        player = Player(config, catalogue, reader.header)
        kinds = DECISIONS if overrides else None
        num_steps = num_records = 0
        difference = None
        last_step: int | None = None
        for record in reader.records():
            num_records += 1
            made = _play(player, record, reader)
            if isinstance(record, Scheduled) and record.step is not None:
                num_steps, last_step = num_steps + 1, record.step
            difference = find_difference(record, made, step=last_step, record=num_records, kinds=kinds)
            if difference is not None:
                break
        return ReplayResult(
            num_steps=num_steps,
            num_records=num_records,
            difference=difference,
            notes=[*notes, *([] if difference else reader.notes())],
            shadow=player.stats().shadow,
        )


def _play(player: Player, record: Record, reader: TraceReader) -> Record | None:
    try:
        return player.play(record)
    except UserError as error:
        raise UserError(f"{reader.path}, line {reader.line}: {error}") from error


def _installation_notes(header: Header, config: EngineConfig, catalogue: Catalogue) -> list[str]:
    """Where what runs here is of another version than what was recorded."""
    notes = []
    own = own_identity().tokenyard_version
    if header.tokenyard != own:
        notes.append(f"recorded by Tokenyard {header.tokenyard}, replayed by {own}: what differs may be the version's")
    here = {(one.kind, one.name): one for one in _components(config, catalogue)}
    for there in header.components:
        one = here.get((there.kind, there.name))
        if one is not None and one != there:
            notes.append(
                f"{there.kind} '{there.name}' was recorded from {there.distribution} {there.version}, "
                f"here it is from {one.distribution} {one.version}"
            )
    return notes


def _components(config: EngineConfig, catalogue: Catalogue) -> Sequence[Component]:
    try:
        return components_of(config, catalogue)
    except PluginError:  # the loop, which a replay does not need
        return ()
