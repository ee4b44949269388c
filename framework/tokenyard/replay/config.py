"""The config of a recorded engine, with what a replay is asked to change in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tokenyard.errors import ConfigError, PluginError, UserError
from tokenyard.launch.build import build_engine_config, build_plugins_config
from tokenyard.launch.compose import compose_config
from tokenyard.launch.overrides import Given, format_value, parse_overrides
from tokenyard.launch.schema import COMPONENT_GROUPS, core_fields, group_values, takes_policy
from tokenyard.plugins import load_catalogue

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tokenyard.catalogue import Catalogue
    from tokenyard.config import EngineConfig
    from tokenyard.launch.overrides import ParsedOverride
    from tokenyard.trace.records import Header

_GROUPS = ("scheduler", "kv_cache", "latency")
_CHANGEABLE = (*_GROUPS, "seed")
_NEEDS_A_MODEL = ("kv_cache.memory", "kv_cache.gpu_memory_utilization", "kv_cache.host_memory")


def replayed_config(
    header: Header, overrides: Sequence[str], catalogue: Catalogue | None = None
) -> tuple[EngineConfig, Catalogue]:
    """The recorded config as far as a scheduler depends on it. Raises ConfigError, PluginError, UserError.

    Of an override that chooses a component (`scheduler=sjf`) the component and its own options are taken; the limits
    of the group stay those of the trace, unless another override changes them.
    """
    recorded = _recorded_values(header)
    if catalogue is None:
        catalogue = load_catalogue(build_plugins_config(group_values(recorded, "plugins")))
    try:
        values = _changed(recorded, overrides, catalogue) if overrides else recorded
        config = build_engine_config(values, catalogue)
    except PluginError as error:
        if missing := _missing(header, catalogue):
            raise PluginError(f"the trace was recorded with {missing}, not installed here; {error}") from error
        raise
    if config.scheduler.preempt_mode == "swap" and not header.sizes.num_host_blocks:
        raise ConfigError(
            "scheduler.preempt_mode=swap needs kv_cache.host_memory, and the trace was recorded without; record one "
            "with it, or choose recompute or pause"
        )
    return config, catalogue


def parse_changes(overrides: Sequence[str]) -> list[ParsedOverride]:
    """Checked: a replay has no model and no executor that could be changed."""
    parsed = parse_overrides([Given(text, f"override {text}") for text in overrides])
    for one in parsed:
        if one.key.partition(".")[0] not in _CHANGEABLE:
            raise UserError(f"{one.text}: a replay can change {', '.join(_CHANGEABLE)}; the rest is the trace's own")
        if one.key in _NEEDS_A_MODEL:
            raise UserError(f"{one.text}: no model tells here what a block costs; give kv_cache.num_blocks")
    return parsed


def _recorded_values(header: Header) -> dict[str, object]:
    """Without what a replay does not start: backends, executor, server, observers, loop."""
    config, sizes = header.config, header.sizes
    engine, model = group_values(config, "engine"), group_values(config, "model")
    kv_cache = {**group_values(config, "kv_cache"), "num_blocks": sizes.num_blocks, "memory": None}
    return {
        "engine": {"log_stats": engine.get("log_stats", True)},
        "scheduler": config.get("scheduler", {}),
        "kv_cache": kv_cache,
        "latency": config.get("latency", {}),
        "model": {"max_model_len": sizes.max_model_len, "seed": model.get("seed")},
        "plugins": config.get("plugins", {}),
        "seed": config.get("seed", 0),
    }


def _changed(recorded: Mapping[str, object], overrides: Sequence[str], catalogue: Catalogue) -> dict[str, object]:
    """Composed of what the trace was recorded with, and the overrides after it."""
    parsed = parse_changes(overrides)
    chosen = {one.key for one in parsed if one.is_choice}
    base = [text for group in _GROUPS for text in _as_overrides(group, recorded, catalogue, group in chosen)]
    composed = compose_config([*base, f"seed={recorded['seed']}", *overrides], catalogue=catalogue).values
    return {**recorded, **{name: composed[name] for name in _CHANGEABLE}}


def _as_overrides(
    group: str, recorded: Mapping[str, object], catalogue: Catalogue, is_chosen_anew: bool
) -> Iterator[str]:
    """Of a group's recorded values: all of them, or, where another component is chosen, the limits alone."""
    node = dict(group_values(recorded, group))
    name, policy = node.pop("name", None), node.pop("policy", None)
    if is_chosen_anew:
        limits = core_fields(COMPONENT_GROUPS[group])
        yield from _assignments(group, {key: value for key, value in node.items() if key in limits})
        return
    if not isinstance(name, str):
        return
    if isinstance(policy, Mapping) and takes_policy(catalogue.get("scheduler", name)):
        yield f"{group}={policy.get('name', name)}"
        yield from _assignments(f"{group}.policy", {key: value for key, value in policy.items() if key != "name"})
    else:
        yield f"{group}={name}"
    yield from _assignments(group, node)


def _assignments(prefix: str, values: Mapping[str, object]) -> Iterator[str]:
    return (f"{prefix}.{name}={format_value(value)}" for name, value in values.items())


def _missing(header: Header, catalogue: Catalogue) -> str:
    absent = [one for one in header.components if one.kind != "engine" and one.name not in catalogue.names(one.kind)]
    return ", ".join(f"{one.kind} '{one.name}' of {one.distribution} {one.version}" for one in absent)
