"""Sinks: where the metrics of a run go besides its folder; each is another project, imported when it is named."""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, cast

from tokenyard.errors import ConfigError, TokenyardError

_PROJECT = "tokenyard"
_MODULES: Mapping[str, str] = {"mlflow": "mlflow", "tensorboard": "tensorboard", "wandb": "wandb"}
_MAX_PARAMETER_LENGTH = 500  # characters: the least that a version of MLflow takes


def check_sinks(sinks: Sequence[str]) -> None:
    """Before a run begins. Raises ConfigError for a sink that is unknown or not installed."""
    for name in sinks:
        if name not in _MODULES:
            raise ConfigError(f"experiment.sinks: unknown sink '{name}'; there is: {', '.join(_MODULES)}")
        if importlib.util.find_spec(_MODULES[name]) is None:
            raise ConfigError(f"experiment.sinks: '{name}' is not installed; pip install 'tokenyard[{name}]'")


def send(sinks: Sequence[str], facts: Mapping[str, object], metrics: Mapping[str, object], *, folder: Path) -> None:
    """Hand what came of the run in `folder` to each sink, under the folder's name.

    Raises ConfigError as `check_sinks` does, and TokenyardError when a sink fails; the run's own folder is not touched,
    but that TensorBoard's files lie in a folder `tensorboard` of it.
    """
    check_sinks(sinks)
    parameters = dict(_texts(facts))
    numbers = dict(_numbers(metrics))
    for name in sinks:
        try:
            _SENDERS[name](folder, parameters, numbers)
        except Exception as error:  # whatever another project may raise
            raise TokenyardError(f"sink '{name}' did not take the run {folder}: {error}") from error


def _leaves(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _texts(facts: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    return ((key, str(value)[:_MAX_PARAMETER_LENGTH]) for key, value in _leaves(facts))


def _numbers(metrics: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    for key, value in _leaves(metrics):
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            yield _plain(key), float(value)


def _plain(key: str) -> str:
    """A key as all sinks take it: a client may be called anything."""
    return re.sub(r"[^A-Za-z0-9_./-]", "_", key)


class _MLflow(Protocol):
    def start_run(self, *, run_name: str) -> object: ...
    def log_params(self, params: Mapping[str, str]) -> object: ...
    def log_metrics(self, metrics: Mapping[str, float]) -> object: ...
    def end_run(self, status: str) -> object: ...


def _to_mlflow(folder: Path, parameters: Mapping[str, str], numbers: Mapping[str, float]) -> None:
    """To where MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME say."""
    mlflow = cast(_MLflow, importlib.import_module("mlflow"))
    mlflow.start_run(run_name=folder.name)
    status = "FAILED"
    try:
        mlflow.log_params({_plain(key): value for key, value in parameters.items()})
        mlflow.log_metrics(numbers)
        status = "FINISHED"
    finally:
        mlflow.end_run(status)


class _Writer(Protocol):
    def add_text(self, tag: str, text_string: str) -> object: ...
    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object: ...
    def close(self) -> object: ...


class _TensorBoard(Protocol):
    SummaryWriter: Callable[[str], _Writer]


def _to_tensorboard(folder: Path, parameters: Mapping[str, str], numbers: Mapping[str, float]) -> None:
    board = cast(_TensorBoard, importlib.import_module("torch.utils.tensorboard"))
    writer = board.SummaryWriter(str(folder / "tensorboard"))
    try:
        for key, value in parameters.items():
            writer.add_text(f"facts/{key}", value)
        for key, number in numbers.items():
            writer.add_scalar(key.replace(".", "/"), number, 0)
    finally:
        writer.close()


class _WandbRun(Protocol):
    def log(self, data: Mapping[str, float]) -> object: ...
    def finish(self, exit_code: int) -> object: ...


class _Wandb(Protocol):
    def init(self, *, project: str, name: str, config: Mapping[str, str]) -> _WandbRun: ...


def _to_wandb(folder: Path, parameters: Mapping[str, str], numbers: Mapping[str, float]) -> None:
    """To the project that WANDB_PROJECT names, else to one called tokenyard."""

    wandb = cast(_Wandb, importlib.import_module("wandb"))
    project = os.environ.get("WANDB_PROJECT") or _PROJECT
    run = wandb.init(project=project, name=folder.name, config=parameters)
    exit_code = 1
    try:
        run.log(numbers)
        exit_code = 0
    finally:
        run.finish(exit_code)


_SENDERS: Mapping[str, Callable[[Path, Mapping[str, str], Mapping[str, float]], None]] = {
    "mlflow": _to_mlflow,
    "tensorboard": _to_tensorboard,
    "wandb": _to_wandb,
}
