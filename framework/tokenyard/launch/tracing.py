"""What `trace.path` and `trace.chrome` ask for: a recorder around the scheduler."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from tokenyard.descriptors import PLUGIN_API
from tokenyard.errors import ConfigError
from tokenyard.interfaces import eviction, latency, predictor
from tokenyard.interfaces.observer import Observer
from tokenyard.ipc.config_values import config_to_values
from tokenyard.ipc.handshake import own_identity
from tokenyard.launch.convert import wrong
from tokenyard.launch.schema import NO_LATENCY
from tokenyard.trace.chrome import ChromeTrace
from tokenyard.trace.clock import CallClock
from tokenyard.trace.file import TraceFile, exists_already
from tokenyard.trace.recorder import Recorder
from tokenyard.trace.records import FORMAT, VERSION, Component, GroupSpec, Header, Sizes
from tokenyard.trace.scheduler import TracingScheduler
from tokenyard.trace.sinks import JsonLines, Sinks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenyard.catalogue import Catalogue
    from tokenyard.clock import Clock
    from tokenyard.config import EngineConfig, TraceConfig
    from tokenyard.interfaces.scheduler import Scheduler
    from tokenyard.launch.scheduler_parts import SchedulerFacts, SchedulerParts
    from tokenyard.trace.sinks import Sink

_OPTIONAL = (eviction.COMPONENT_KIND, predictor.COMPONENT_KIND)


def check_trace(trace: TraceConfig) -> None:
    """Raise ConfigError where a trace file could not be made, before anything is started for it."""
    for key, name in (("trace.path", trace.path), ("trace.chrome", trace.chrome)):
        if name is None:
            continue
        if not name.strip() or "\0" in name:
            raise wrong(key, name, "the name of a new file")
        try:
            _check_place(key, name)
        except OSError as error:  # too long, or in a folder that may not be looked at
            raise ConfigError(f"{key}={name}: no such file can be made: {error.strerror}; give another") from error
    names = [name for name in (trace.path, trace.chrome) if name is not None]
    if len({Path(name).absolute() for name in names}) < len(names):
        raise wrong("trace.chrome", trace.chrome, "another file than trace.path")


def _check_place(key: str, name: str) -> None:
    path = Path(name)
    if path.exists() or path.is_symlink():
        raise exists_already(path)
    if not path.absolute().parent.is_dir():
        raise wrong(key, name, "the name of a new file in a folder that exists")


def with_absolute_trace(config: EngineConfig) -> EngineConfig:
    """Files of this process's working folder, wherever another process writes them."""
    trace = config.trace
    settled = {
        name: None if value is None else str(Path(value).absolute())
        for name, value in (("path", trace.path), ("chrome", trace.chrome))
    }
    return replace(config, trace=replace(trace, **settled))


def with_numbered_trace(config: EngineConfig, number: int) -> EngineConfig:
    """For the `number`-th engine of this config, from 1: that of a restart does not overwrite the first one's files."""
    if number == 1:
        return config
    trace = config.trace
    settled = {
        name: None if value is None else str(Path(value).with_suffix(f".{number}{Path(value).suffix}"))
        for name, value in (("path", trace.path), ("chrome", trace.chrome))
    }
    return replace(config, trace=replace(trace, **settled))


class _CloseAtShutdown(Observer):
    """The engine's loop tells observers when it ends, and nobody else."""

    def __init__(self, scheduler: TracingScheduler) -> None:
        self._scheduler = scheduler

    def on_shutdown(self) -> None:
        self._scheduler.close()


class Tracing:
    """For one engine: `clock` is its scheduler's, then comes `wrap`. Around its assembly: what fails leaves no file."""

    def __init__(self, config: EngineConfig, catalogue: Catalogue, clock: Clock) -> None:
        self._config = config
        self._catalogue = catalogue
        self._call_clock = CallClock(clock)
        self._is_on = config.trace.path is not None or config.trace.chrome is not None
        self._files: list[TraceFile] = []
        self.clock: Clock = self._call_clock if self._is_on else clock

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            for file in self._files:
                file.abandon()
                file.path.unlink(missing_ok=True)

    def wrap(self, parts: SchedulerParts, facts: SchedulerFacts) -> tuple[Scheduler, Sequence[Observer]]:
        """The scheduler to use instead, and observers that close the files at the end. Raises ConfigError."""
        if not self._is_on:
            return parts.scheduler, ()
        try:
            header = self._header(facts)
        except TypeError as error:
            raise ConfigError(f"this config cannot be traced: {error}; leave out the group trace") from error
        sinks = Sinks(self._sinks())
        try:
            sinks.begin(header)
        except OSError as error:
            raise ConfigError(f"the trace cannot be written: {error}") from error
        recorder = Recorder(parts.scheduler, parts.kv_cache_manager, sinks)
        scheduler = TracingScheduler(parts.scheduler, self._call_clock, recorder, sinks)
        return scheduler, [_CloseAtShutdown(scheduler)]

    def _sinks(self) -> list[Sink]:
        trace = self._config.trace
        sinks: list[Sink] = []
        if trace.path is not None:
            sinks.append(JsonLines(self._new_file(trace.path)))
        if trace.chrome is not None:
            sinks.append(ChromeTrace(self._new_file(trace.chrome)))
        return sinks

    def _new_file(self, name: str) -> TraceFile:
        file = TraceFile(Path(name))
        self._files.append(file)
        return file

    def _header(self, facts: SchedulerFacts) -> Header:
        return Header(
            format=FORMAT,
            version=VERSION,
            tokenyard=own_identity().tokenyard_version,
            plugin_api=PLUGIN_API,
            started=self.clock.now(),
            config=config_to_values(self._config),
            components=tuple(components_of(self._config, self._catalogue)),
            sizes=Sizes(
                num_blocks=facts.size.num_blocks,
                num_host_blocks=facts.size.num_host_blocks,
                max_model_len=facts.size.max_model_len,
                vocab_size=facts.vocab_size,
                kv_cache_groups=tuple(
                    GroupSpec(group.num_layers, group.bytes_per_token, group.sliding_window)
                    for group in facts.kv_cache_groups
                ),
                records_kv_events=facts.records_kv_events,
            ),
        )


def components_of(config: EngineConfig, catalogue: Catalogue) -> list[Component]:
    """Who takes part in decisions, with the distributions that provide them."""
    found = []
    for kind, name in _named(config):
        if kind in _OPTIONAL and name not in catalogue.names(kind):
            continue  # the default, which is not installed and has nothing to do
        provider = catalogue.get(kind, name).provider
        found.append(Component(kind, name, provider.distribution, provider.version))
    return found


def _named(config: EngineConfig) -> list[tuple[str, str]]:
    scheduler = config.scheduler
    named = [
        ("engine", config.engine.name),
        ("scheduler", scheduler.name),
        ("kv_cache", config.kv_cache.name),
        (eviction.COMPONENT_KIND, config.kv_cache.eviction),
    ]
    if scheduler.policy is not None:
        named.append(("policy", scheduler.policy.name))
        named.append((predictor.COMPONENT_KIND, scheduler.predictor))
    if scheduler.shadow is not None:
        named.append(("policy", scheduler.shadow))
    if config.latency.name != NO_LATENCY:
        named.append((latency.COMPONENT_KIND, config.latency.name))
    return named
