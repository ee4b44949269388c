"""Axes: the keys in which the configs of runs differ, and what each of them means to a comparison."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

DEFAULT = "default"
"""The value of a key that a run was not given."""
_LOAD_KEYS = ("time_scale", "rate", "request_rate", "requests_per_second", "concurrency")
_UNCOMPARED = ("trace", "server", "hydra", "plugins", "experiment.dir", "experiment.jobs", "experiment.sinks", "seed")

CONFIG, COMMIT = "config", "commit"
"""The last axes: a hash of everything, where runs differ in what no override tells; and of the code."""

Values = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Configured:
    """What is known of how a run was configured, keys dotted, values as they are written in an override."""

    overrides: Values
    components: Values  # by group, what its option names; and `config`, which stands for all else that may differ
    seed: int


def parse_overrides(overrides: Iterable[str]) -> dict[str, str]:
    """`scheduler=sjf` by key; the last one of a key wins, as with Hydra."""
    found: dict[str, str] = {}
    for override in overrides:
        key, _, value = override.partition("=")
        found[key.lstrip("+~")] = value
    return found


def find_axes(runs: Sequence[Configured]) -> tuple[str, ...]:
    """The keys that tell the runs' configs apart, without the seed: those of overrides first, as they were given.

    A component that follows from other axes is none of its own: `workload=azure_conv` names `workload=trace`. Neither
    is an override in which runs differ whose configs are the same.
    """
    given = dict.fromkeys(key for one in runs for key in one.overrides)
    axes = [key for key in given if not _is_uncompared(key) and _differs(key, runs) and not _says_nothing(key, runs)]
    for key in dict.fromkeys(key for one in runs for key in one.components):
        if key not in axes and _differs(key, runs) and not _follows(key, axes, runs):
            axes.append(key)
    return tuple(axes)


def common_overrides(runs: Sequence[Configured]) -> str:
    """What every run was given alike, as it would be typed: what the axes do not tell of a config."""
    first, *others = runs
    return " ".join(
        f"{key}={value}"
        for key, value in first.overrides.items()
        if not _is_uncompared(key) and all(other.overrides.get(key) == value for other in others)
    )


def axis_value(key: str, run: Configured) -> str:
    """What a run has on an axis."""
    return run.overrides.get(key, run.components.get(key, DEFAULT))


def is_workload(key: str) -> bool:
    """Whether runs that differ in it have other requests, or the same ones at other times."""
    return key.partition(".")[0] == "workload"


def is_loop(key: str) -> bool:
    """Whether runs that differ in it have other engine loops."""
    return key.partition(".")[0] == "engine"


def is_load(key: str) -> bool:
    """Whether it is how many requests come, not which."""
    return is_workload(key) and key.rpartition(".")[2] in _LOAD_KEYS


def _is_uncompared(key: str) -> bool:
    return any(key == one or key.startswith((f"{one}.", f"{one}/")) for one in _UNCOMPARED)


def _differs(key: str, runs: Sequence[Configured]) -> bool:
    return len({axis_value(key, one) for one in runs}) > 1


def _says_nothing(key: str, runs: Sequence[Configured]) -> bool:
    """Whether runs of one config have several values: some were given what is the default anyway."""
    values: dict[str, str] = {}
    for one in runs:
        value = axis_value(key, one)
        if values.setdefault(one.components[CONFIG], value) != value:
            return True
    return False


def _follows(key: str, axes: Sequence[str], runs: Sequence[Configured]) -> bool:
    """Whether the values on `axes` tell the one of `key`; a hash, which depends on the seed, together with that."""
    known: dict[tuple[object, ...], str] = {}
    for one in runs:
        given = (one.seed if key in (CONFIG, COMMIT) else 0, *(axis_value(axis, one) for axis in axes))
        value = one.components.get(key, DEFAULT)
        if known.setdefault(given, value) != value:
            return False
    return True
