"""`latency=fitted`: a step's time as `tokenyard calibrate` measured it on a machine."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenyard import ComponentDescriptor, hookimpl
from tokenyard.errors import ConfigError
from tokenyard.interfaces import LatencyModel

if TYPE_CHECKING:
    from tokenyard.interfaces import LatencyModelContext, StepLoad
    from tokenyard.latency_fit import FitFile

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedOptions:
    """Options of `latency=fitted`."""

    path: str | None = None  # the file that `tokenyard calibrate` has written

    def __post_init__(self) -> None:
        if self.path is not None and not self.path:
            raise ConfigError("latency.path is empty; it takes a file that `tokenyard calibrate` has written")


class FittedLatency(LatencyModel):
    """The sum of what a step costs by itself, by its tokens, its rows and its attention."""

    def __init__(self, file: FitFile) -> None:
        from tokenyard.latency_fit import LatencyFit

        self._seconds = LatencyFit(file.fit).seconds
        self._file = file

    def step_seconds(self, load: StepLoad) -> float:
        return self._seconds(load)

    @property
    def calibration(self) -> str:
        file = self._file
        machine = ", ".join(str(file.machine[key]) for key in ("cpu", "device", "dtype") if key in file.machine)
        return (
            f"fitted on {file.settings.get('model.name')} on {machine}, {file.created[:10]}; a step is off by "
            f"{file.in_sample.mean:.1%} in-sample and {file.held_out.mean:.1%} held-out, all together by "
            f"{file.in_sample.total:+.1%} and {file.held_out.total:+.1%}"
        )


def _make(options: FittedOptions, context: LatencyModelContext) -> LatencyModel:
    from tokenyard.latency_fit import differences, read_fit  # not for those who only list plugins

    if options.path is None:
        raise ConfigError(
            "latency=fitted needs latency.path=FILE: a file that `tokenyard calibrate MODEL --to FILE` writes"
        )
    file = read_fit(options.path)
    if context.config is not None and (found := differences(file, context.config)):
        logger.warning("latency.path=%s was measured with other settings: %s", options.path, "; ".join(found))
    return FittedLatency(file)


@hookimpl
def tokenyard_components() -> Iterator[ComponentDescriptor[FittedOptions]]:
    yield ComponentDescriptor(
        component_kind="latency",
        name="fitted",
        api_version=(1, 7),
        summary="seconds of a step as `tokenyard calibrate` measured them with our own engine: latency.path=FILE",
        options_type=FittedOptions,
        factory=_make,
    )
