"""Composing with Hydra without leaving a trace in it: a caller may itself be a Hydra application."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import JobRuntime
from hydra.types import RunMode
from hydra.version import VersionBase

from tokenyard.launch.nodes import Node, store_nodes
from tokenyard.launch.origins import Contribution
from tokenyard.launch.overrides import quote_text
from tokenyard.launch.sources import CONFIG_MODULE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from omegaconf import DictConfig

CONFIG_NAME = "config"
_VERSION_BASE = "1.3"
_JOB_NAME = "tokenyard"

is_composing: ContextVar[bool] = ContextVar("is_composing", default=False)
"""Read by our Hydra search-path plugin, which has nothing to do in here."""

_lock = threading.RLock()  # Hydra's state is global


class HydraSession:
    """Hydra as it is inside `hydra_session`."""

    def __init__(self, search_path: Sequence[str]) -> None:
        paths = ",".join(quote_text(path) for path in search_path)
        self._overrides = [f"hydra.searchpath=[{paths}]"] if search_path else []

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """The composed config; raises what Hydra raises."""
        return compose(CONFIG_NAME, overrides=[*self._overrides, *overrides])

    def compose_job(self, overrides: Sequence[str]) -> DictConfig:
        """Hydra's own config alone, as its launchers take it; raises what Hydra raises."""
        return compose(overrides=list(overrides), return_hydra_config=True)

    def contributions(self, choices: Sequence[str]) -> list[Contribution]:
        """The configs that are merged under these choices of groups, in order."""
        loader = GlobalHydra.instance().config_loader()
        defaults = loader.compute_defaults_list(CONFIG_NAME, [*self._overrides, *choices], RunMode.RUN).defaults
        return [
            Contribution(item.config_path, item.package or "")
            for item in defaults
            if item.config_path is not None and not item.config_path.startswith("hydra/")
        ]


@contextmanager
def hydra_session(nodes: Sequence[Node], search_path: Sequence[str]) -> Iterator[HydraSession]:
    """Initialise Hydra on our configs with these generated nodes; what was there before is back afterwards."""
    with _lock, _untouched():
        store = ConfigStore.instance()
        store.repo = {name: item for name, item in store.repo.items() if name in _HYDRAS_OWN}
        store_nodes(store, list(nodes))
        with initialize_config_module(CONFIG_MODULE, job_name=_JOB_NAME, version_base=_VERSION_BASE):
            yield HydraSession(search_path)


_HYDRAS_OWN = frozenset({"hydra", "_dummy_empty_config_.yaml"})


@contextmanager
def _untouched() -> Iterator[None]:
    """Put back Hydra's global state: the running application, version base, job name and stored configs."""
    running, store, version, job = GlobalHydra.instance(), ConfigStore.instance(), VersionBase.instance(), JobRuntime()
    hydra, repo, base, name = running.hydra, store.repo, version.version_base, job.get("name")
    running.clear()
    token = is_composing.set(True)
    try:
        yield
    finally:
        is_composing.reset(token)
        GlobalHydra.set_instance(running)
        running.hydra, store.repo, version.version_base = hydra, repo, base
        job.set("name", name)
