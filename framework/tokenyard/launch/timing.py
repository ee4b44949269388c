"""The timers around an engine's plugins."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from tokenyard.errors import PluginError
from tokenyard.plugin_times import PluginTimes

if TYPE_CHECKING:
    from collections.abc import Callable

    from tokenyard.catalogue import Catalogue
    from tokenyard.clock import Clock
    from tokenyard.config import EngineConfig
    from tokenyard.launch.steering import Steering

NeedT = TypeVar("NeedT")
PartT = TypeVar("PartT")


def plugin_times_of(config: EngineConfig, catalogue: Catalogue, clock: Clock) -> PluginTimes | None:
    """None where nobody would be told: without stats and without a budget."""
    budget_us = config.plugins.budget_us
    if budget_us is None and not config.engine.log_stats:
        return None
    return PluginTimes(clock, budget_us=budget_us, owner=lambda kind, plugin: distribution_of(catalogue, kind, plugin))


def distribution_of(catalogue: Catalogue, kind: str, plugin: str) -> str | None:
    """What a plugin came with; None where the catalogue does not know."""
    try:
        return catalogue.get("policy" if kind == "shadow" else kind, plugin).provider.distribution
    except PluginError:
        return None


def watched(times: PluginTimes | None, part: PartT, kind: str, plugin: str) -> PartT:
    """The part, with timers where they are wanted."""
    return part if times is None else times.watch(part, kind, plugin)


def watched_maker(
    times: PluginTimes | None, make: Callable[[NeedT], PartT] | None, kind: str, plugin: str
) -> Callable[[NeedT], PartT] | None:
    """The same for a part that others make; None where there is none."""
    if times is None or make is None:
        return make
    return lambda need: times.watch(make(need), kind, plugin)


def watched_steering(times: PluginTimes | None, steering: Steering, config: EngineConfig) -> Steering:
    """With timers around the predictor and the latency model; a scheduler times its calls of a policy by itself."""
    if steering.latency is not None:
        watched(times, steering.latency, "latency", config.latency.name)
    make = watched_maker(times, steering.make_predictor, "predictor", config.scheduler.predictor)
    return replace(steering, make_predictor=make)
