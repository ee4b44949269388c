"""Jobs handed to one of Hydra's launchers, which may run them elsewhere: `hydra/launcher=joblib`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.types import HydraContext
from omegaconf.errors import OmegaConfBaseException

from tokenyard.errors import ConfigError
from tokenyard.launch.overrides import quote_text
from tokenyard.launch.session import hydra_session

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from hydra.plugins.launcher import Launcher
    from omegaconf import DictConfig

_EXTRAS: Mapping[str, str] = {"joblib": "joblib", "submitit_local": "submitit", "submitit_slurm": "submitit"}
_LAUNCHER = re.compile(r"(?:\+\+|\+)?hydra(?:/launcher=|\.launcher\.[\w.]+=)")
_CHOICE = re.compile(r"hydra/launcher=([\w-]+)")
_FOLDERS = re.compile(r"hydra\.(?:sweep|run)\.dir=")


class HydraOverrides(NamedTuple):
    """What a command line says to Hydra itself."""

    launcher: Sequence[str]  # overrides; none = our own
    others: Sequence[str]  # all other words


def split_hydra_overrides(words: Sequence[str]) -> HydraOverrides:
    """Take Hydra's own overrides out. Raises ConfigError for those that have no use here."""
    own = [word for word in words if re.match(r"[+~]*hydra[./]", word)]
    for word in own:
        if _FOLDERS.match(word):
            raise ConfigError(f"{word}: give the folder of an experiment as experiment.dir=DIR or --out DIR")
        if not _LAUNCHER.match(word):
            raise ConfigError(f"{word}: of Hydra's own settings hydra/launcher and hydra.launcher.* alone hold here")
    if own and not any(_CHOICE.match(word) for word in own):
        raise ConfigError(f"{own[0]}: name the launcher too, with hydra/launcher=NAME")
    return HydraOverrides(own, [word for word in words if word not in own])


def run_by_launcher(
    launcher_overrides: Sequence[str], folder: Path, num_jobs: int, task: Callable[[int], None]
) -> None:
    """Have a launcher call `task` with 0, ..., num_jobs - 1, maybe in other processes; returns when all have ended.

    `task` is pickled by the launcher, so it is best an object of a class of a module. Raises ConfigError for a launcher
    that there is not, or that does not take its options.
    """
    with hydra_session([], []) as session:
        try:
            config = session.compose_job([*launcher_overrides, *_settings(folder)])
            launcher = _launcher(config, _Task(task))
        except (HydraException, OmegaConfBaseException) as error:
            raise _unknown(launcher_overrides, error) from error
        launcher.launch([[] for _ in range(num_jobs)], initial_job_idx=0)


def check_launcher(launcher_overrides: Sequence[str]) -> None:
    """Raise ConfigError as `run_by_launcher` does, before anything is made."""
    with hydra_session([], []) as session:
        try:
            session.compose_job(launcher_overrides)
        except (HydraException, OmegaConfBaseException) as error:
            raise _unknown(launcher_overrides, error) from error


class _Task:
    """What Hydra calls with a job's config, of which the number is all that matters: the plan says the rest."""

    def __init__(self, task: Callable[[int], None]) -> None:
        self._task = task

    def __call__(self, config: DictConfig) -> None:
        self._task(int(HydraConfig.get().job.num))


def _settings(folder: Path) -> list[str]:
    """Hydra makes no files and logs nothing; what a launcher keeps goes into a folder of its own."""
    return [
        f"hydra.sweep.dir={quote_text(str(folder))}",
        "hydra.sweep.subdir=${hydra.job.num}",
        "hydra.output_subdir=null",
        "hydra.mode=MULTIRUN",
        "hydra.job.chdir=false",
        "hydra.job.name=tokenyard",
        "hydra/job_logging=none",
        "hydra/hydra_logging=none",
    ]


def _launcher(config: DictConfig, task: _Task) -> Launcher:
    hydra = GlobalHydra.instance().hydra
    if hydra is None:
        raise RuntimeError("Hydra is not initialised inside its session")
    context = HydraContext(config_loader=hydra.config_loader, callbacks=Callbacks(config))
    return Plugins.instance().instantiate_launcher(hydra_context=context, task_function=task, config=config)


def _unknown(launcher_overrides: Sequence[str], error: Exception) -> ConfigError:
    name = next((match[1] for word in launcher_overrides if (match := _CHOICE.match(word))), "")
    if f"hydra/launcher/{name}" in str(error) and name in _EXTRAS:
        return ConfigError(f"hydra/launcher={name}: is not installed; pip install 'tokenyard[{_EXTRAS[name]}]'")
    told = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
    return ConfigError(f"{' '.join(launcher_overrides)}: Hydra cannot launch with this: {told}")
