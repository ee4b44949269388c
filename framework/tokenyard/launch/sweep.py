"""Overrides that name several values, as Hydra's multirun takes them: every combination is a run."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from tokenyard.errors import ConfigError
from tokenyard.launch.compose import load_plugins_for
from tokenyard.launch.flags import Flagged
from tokenyard.launch.nodes import generated_nodes
from tokenyard.launch.session import hydra_session
from tokenyard.launch.sources import own_source, plugin_sources

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hydra.core.override_parser.types import Override

MOST_RUNS = 10_000
_SWEEP_CHARACTERS = (",", "(")  # no sweep is written without one of them


def expand_sweeps(overrides: Sequence[str | Flagged]) -> list[tuple[list[str | Flagged], list[str]]]:
    """A run for each combination, the last override changing fastest: its overrides, and those of them that vary.

    `a=1,2`, `choice(...)`, `range(...)` and `glob(...)` name several values, as in Hydra; what a flag stands for names
    one. Raises ConfigError for an interval, for `shuffle`, whose order could not be repeated, and for more than
    MOST_RUNS runs. What is no override at all is left for the composition to tell.
    """
    choices = [[override] if isinstance(override, Flagged) else _values(override, overrides) for override in overrides]
    num_runs = math.prod(map(len, choices))
    if num_runs > MOST_RUNS:
        raise ConfigError(f"these overrides make {num_runs} runs, more than {MOST_RUNS}; name fewer values")
    varying = [len(values) > 1 for values in choices]
    return [
        (list(values), [_text(value) for value, varies in zip(values, varying, strict=True) if varies])
        for values in itertools.product(*choices)
    ]


def names_several(override: str | Flagged) -> bool:
    """Whether an override is a sweep."""
    return not isinstance(override, Flagged) and _sweep(override) is not None


def _text(override: str | Flagged) -> str:
    return override.override if isinstance(override, Flagged) else override


def _sweep(text: str) -> Override | None:
    if not any(character in text for character in _SWEEP_CHARACTERS):
        return None  # most are none, and parsing takes time
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException:
        return None
    return override if override.is_sweep_override() else None


def _values(text: str, overrides: Sequence[str | Flagged]) -> list[str | Flagged]:
    override = _sweep(text)
    if override is None:
        return [text]
    if override.is_interval_sweep():
        raise ConfigError(f"cannot run {text!r}: an interval has no end of values; write range(START,STOP,STEP)")
    if getattr(override.value(), "shuffle", False):  # of Hydra's ChoiceSweep and RangeSweep; Glob has none
        raise ConfigError(f"cannot run {text!r}: a shuffled order could not be made again; leave out shuffle")
    values = list(itertools.islice(_iterate(override, text, overrides), MOST_RUNS + 1))
    if not values:
        raise ConfigError(f"cannot run {text!r}: it names no value")
    key = override.get_key_element()
    return [f"{key}={value}" for value in values]


def _iterate(override: Override, text: str, overrides: Sequence[str | Flagged]) -> Iterator[str]:
    if "glob" not in text:
        return override.sweep_string_iterator()
    catalogue = load_plugins_for([one for one in overrides if not names_several(one)])
    sources = plugin_sources(catalogue)
    nodes = generated_nodes(catalogue, lambda path: any(source.file(path) for source in (own_source(), *sources)))
    with hydra_session(nodes, [source.path for source in sources]):
        loader = GlobalHydra.instance().config_loader()
        (known,) = OverridesParser.create(loader).parse_overrides([text])  # parse_override would forget the loader
        return iter(list(known.sweep_string_iterator()))
