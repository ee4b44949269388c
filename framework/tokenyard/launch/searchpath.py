"""Tokenyard's config groups in Hydra scripts of the user's own.

The script's primary config, for instance `conf/app.yaml`, is

    defaults:
      - tokenyard      # the whole engine: groups engine, scheduler, kv_cache, attention, executor, model, plugins
      - _self_
    hydra:
      searchpath: [pkg://tokenyard.configs]
    scheduler:
      max_num_seqs: 8
    prompts: [Hello]   # the script's own

and `app.py scheduler=wspt scheduler.policy.ageing=2` works for every installed plugin. The alias `config` of
`tokenyard` is hidden by a file `config.yaml` of the script's own.

Our Hydra plugin calls `extend` before the script's config is composed, when a YAML file directly in the primary config
folder, a config stored in Python or the command line names `tokenyard.configs`. A notebook that uses `hydra.initialize`
and names it only in `compose` calls `register_nodes` itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from tokenyard.errors import ConfigError
from tokenyard.launch.build import build_plugins_config
from tokenyard.launch.nodes import generated_nodes, store_nodes
from tokenyard.launch.sources import Source, own_source, parse_yaml, plugin_sources
from tokenyard.paths import expose_configs
from tokenyard.plugins import load_catalogue

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hydra.core.config_search_path import ConfigSearchPath

    from tokenyard.config import PluginsConfig

_PROVIDER = "tokenyard"


def extend(search_path: ConfigSearchPath, *, texts: Iterable[str], arguments: Sequence[str]) -> None:
    """Add our configs and those of plugins to the search path, and the generated nodes to Hydra's ConfigStore.

    `texts` are the YAML files that name our configs and `arguments` the command line: what they say about `plugins`
    holds for what is loaded here. Ours come before those of plugins, so no plugin replaces a built-in file.
    """
    expose_configs()
    paths = [element.path for element in search_path.get_path() if element.path]
    for path, provider in register_nodes(paths, plugins_config(texts, arguments)):
        search_path.append(provider=provider, path=path)


def register_nodes(search_path: Iterable[str] = (), config: PluginsConfig | None = None) -> list[tuple[str, str]]:
    """Load the plugins and store their generated nodes; returns config folders, ours and theirs, and their providers.

    A component for which a folder of `search_path` has a file gets no node beside it.
    """
    catalogue = load_catalogue(config)
    added = [own_source(), *plugin_sources(catalogue)]
    sources = [*(Source(path, path) for path in search_path), *added]
    nodes = generated_nodes(catalogue, lambda path: any(source.file(path) for source in sources))
    store_nodes(ConfigStore.instance(), nodes)
    return [(source.path, _PROVIDER if source == added[0] else source.label) for source in added]


def plugins_config(texts: Iterable[str], arguments: Sequence[str]) -> PluginsConfig:
    """What YAML files and the command line say about `plugins`.

    Which of the files is the script's primary config is not known yet, so the most restrictive of them holds. Raises
    ConfigError on values that are none.
    """
    merged: dict[str, object] = {}
    for text in texts:
        merged = _restricted(merged, _plugins_of(text))
    return build_plugins_config({**merged, **_plugins_in(arguments)})


def _restricted(first: Mapping[str, object], second: Mapping[str, object]) -> dict[str, object]:
    merged = {**first, **second}
    both = (first.get("allow"), second.get("allow"))
    if isinstance(both[0], list) and isinstance(both[1], list):
        merged["allow"] = [name for name in both[0] if name in both[1]]
    elif isinstance(both[0], list):
        merged["allow"] = both[0]
    disabled = (first.get("disabled"), second.get("disabled"))
    if isinstance(disabled[0], list) and isinstance(disabled[1], list):
        merged["disabled"] = [*disabled[0], *disabled[1]]
    return merged


def _plugins_of(text: str) -> dict[str, object]:
    try:
        content = parse_yaml(text)
    except ConfigError:
        return {}  # Hydra tells what is wrong with the file, if it is the primary config
    node = content.get("plugins") if isinstance(content, dict) else None
    return {str(name): value for name, value in node.items()} if isinstance(node, dict) else {}


def _plugins_in(arguments: Sequence[str]) -> dict[str, object]:
    parser = OverridesParser.create()
    values: dict[str, object] = {}
    for argument in arguments:
        if not argument.lstrip("+").startswith("plugins."):
            continue
        try:
            override = parser.parse_override(argument)
        except HydraException:
            continue  # Hydra tells
        values[override.key_or_group.partition(".")[2]] = override.value()
    return values
