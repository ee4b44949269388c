"""`latency=profiled`: kernel times that others measured, interpolated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tokenyard import ComponentDescriptor, hookimpl
from tokenyard.errors import ConfigError
from tokenyard.interfaces import LatencyModel

if TYPE_CHECKING:
    from tokenyard.interfaces import LatencyModelContext, StepLoad

    from tokenyard_plugins._latency.manifest import Manifest

_MOST = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledOptions:
    """Options of `latency=profiled`."""

    profile: str = ""  # must be given: the name of one that ships, or a folder with a profile.json
    overhead: float = 0.0  # seconds that a step takes besides its kernels, such as launching them
    scale: float = 1.0  # how long a kernel takes, as a multiple of what was measured

    def __post_init__(self) -> None:
        if not 0 <= self.overhead <= _MOST:  # also refuses NaN
            raise ConfigError(f"latency.overhead={self.overhead} is not valid: it must be 0 to {_MOST} seconds")
        if not 0 < self.scale <= _MOST:
            raise ConfigError(f"latency.scale={self.scale} is not valid: it must be above 0 and at most {_MOST}")


class StepProfile(Protocol):
    """Tables of one format."""

    def seconds(self, load: StepLoad) -> float:
        """Of the kernels of a step; more for more prefill tokens, never less."""


class ProfiledLatency(LatencyModel):
    """Sums the kernels of a step. They run one after the other, and what a GPU does between them is the overhead."""

    def __init__(self, profile: StepProfile, options: ProfiledOptions, calibration: str) -> None:
        self._profile = profile
        self._overhead = options.overhead
        self._scale = options.scale
        self._calibration = calibration

    def step_seconds(self, load: StepLoad) -> float:
        return self._overhead + self._scale * self._profile.seconds(load)

    @property
    def calibration(self) -> str:
        return self._calibration


def _make(options: ProfiledOptions, context: LatencyModelContext) -> LatencyModel:
    from tokenyard.experiments.profiles import find_profile  # here: numpy and files are of nobody else's concern
    from tokenyard.interfaces import StepLoad

    from tokenyard_plugins._latency.manifest import read_manifest

    folder = find_profile("latency.profile", options.profile)
    manifest = read_manifest(folder)
    model = ProfiledLatency(_profiles()[manifest.format](folder, manifest), options, _told(manifest, options))
    least = model.step_seconds(StepLoad(num_decodes=1))
    most = model.step_seconds(StepLoad(num_prefills=1, num_prefill_tokens=context.max_num_batched_tokens))
    if not 0 < least < math.inf or not most < math.inf:
        raise ConfigError(
            f"latency.profile={options.profile}: a step of one decode would take {least:g} s, one of "
            f"{context.max_num_batched_tokens} tokens (scheduler.max_num_batched_tokens) {most:g} s; check its tables, "
            f"latency.overhead={options.overhead:g} and latency.scale={options.scale:g}"
        )
    return model


def _profiles() -> dict[str, Callable[[Path, Manifest], StepProfile]]:
    from tokenyard_plugins._latency.llmservingsim import LLMServingSimProfile
    from tokenyard_plugins._latency.splitwise import SplitwiseProfile
    from tokenyard_plugins._latency.vidur import VidurProfile

    return {
        "llmservingsim": LLMServingSimProfile,
        "vidur": VidurProfile,
        "frontier": VidurProfile,
        "splitwise": SplitwiseProfile,
    }


def _told(manifest: Manifest, options: ProfiledOptions) -> str:
    changed = [
        f"latency.{name}={value:g}"
        for name, value, default in (("overhead", options.overhead, 0.0), ("scale", options.scale, 1.0))
        if value != default
    ]
    ranks = f" x {manifest.tensor_parallel}" if manifest.tensor_parallel > 1 else ""
    return (
        f"{manifest.model} on {manifest.device}{ranks}, {manifest.measured} ({manifest.source}, {manifest.licence}); "
        f"error: {manifest.error or 'not known'}" + (f"; with {', '.join(changed)}" if changed else "")
    )


@hookimpl
def tokenyard_components() -> Iterator[ComponentDescriptor[ProfiledOptions]]:
    yield ComponentDescriptor(
        component_kind="latency",
        name="profiled",
        api_version=(1, 7),
        summary="seconds of a step: kernel times that were measured on a GPU, interpolated",
        options_type=ProfiledOptions,
        factory=_make,
    )
