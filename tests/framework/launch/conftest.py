"""A catalogue built by hand, so that these tests need no installed plugin, and a third-party package on disk."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NoReturn, Protocol

import pytest
from tokenyard.catalogue import Catalogue, Entry, Failure, Provider
from tokenyard.descriptors import (
    AttentionBackendDescriptor,
    Descriptor,
    EngineCoreDescriptor,
    ExecutorDescriptor,
    KVCacheManagerDescriptor,
    ObserverDescriptor,
    PolicyDescriptor,
    SchedulerDescriptor,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

BUILTIN = Provider(distribution="tokenyard", version="0.1.0", entry_point="builtin")
THIRD_PARTY = Provider(distribution="tokenyard-wspt", version="1.0", entry_point="wspt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    size: int = 4
    unit: Literal["tokens", "requests"] = "requests"


@dataclass(frozen=True, slots=True, kw_only=True)
class WSPTOptions:
    aging: float = 2.0
    window: Window = field(default_factory=Window)
    weights: dict[str, float] = field(default_factory=dict)
    tiers: tuple[str, ...] = ("gold",)


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeOptions:
    lanes: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedyOptions:
    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClashingOptions:
    block_size: int = 1


def _unused(*arguments: object) -> NoReturn:
    raise NotImplementedError


def _make_catalogue() -> Catalogue:
    builtin: list[Descriptor[object]] = [
        EngineCoreDescriptor(name="sync", api_version=(1, 1), factory=_unused),
        SchedulerDescriptor(name="batch", api_version=(1, 1), factory=_unused, takes_policy=True),
        PolicyDescriptor(name="fcfs", api_version=(1, 1), factory=_unused),
        KVCacheManagerDescriptor(name="paged", api_version=(1, 1), factory=_unused),
        AttentionBackendDescriptor(name="torch_native", api_version=(1, 1), factory=_unused, supports=_unused),
        ExecutorDescriptor(name="inproc", api_version=(1, 1), factory=_unused),
        ExecutorDescriptor(name="multiproc", api_version=(1, 1), factory=_unused),
    ]
    third_party: list[Descriptor[object]] = [
        PolicyDescriptor(name="wspt", api_version=(1, 1), factory=_unused, options_type=WSPTOptions),
        PolicyDescriptor(name="needy", api_version=(1, 1), factory=_unused, options_type=NeedyOptions),
        SchedulerDescriptor(name="whole", api_version=(1, 1), factory=_unused, options_type=WholeOptions),
        KVCacheManagerDescriptor(name="clashing", api_version=(1, 1), factory=_unused, options_type=ClashingOptions),
        ObserverDescriptor(name="recorder", api_version=(1, 1), factory=_unused, options_type=WholeOptions),
    ]
    broken = Provider(distribution="tokenyard-broken", version="2.0", entry_point="broken")
    return Catalogue(
        [
            *(Entry(descriptor=item, provider=BUILTIN) for item in builtin),
            *(Entry(descriptor=item, provider=THIRD_PARTY) for item in third_party),
        ],
        failures=[Failure(provider=broken, error="ImportError: no module named 'nothing'")],
    )


@pytest.fixture(scope="session")
def catalogue() -> Catalogue:
    """The built-in components without their code, and those of a third party."""
    return _make_catalogue()


_MODULE = """
from dataclasses import dataclass
from tokenyard import PolicyDescriptor, hookimpl
@dataclass(frozen=True, kw_only=True)
class Options:
    aging: float = 2.0
@hookimpl
def tokenyard_policies():
    yield PolicyDescriptor(name="wspt", api_version=(1, 1), options_type=Options, factory=lambda options, context: None)
@hookimpl
def tokenyard_config_paths():
    return ["pkg://tokenyard_wspt_configs"]
"""

_TUNED = """
defaults: [wspt, _self_]
max_num_seqs: 5
policy: {aging: 9.5}
"""


@pytest.fixture(scope="session")
def third_party(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH in which the distribution tokenyard-wspt looks installed."""
    root = tmp_path_factory.mktemp("third_party")
    (root / "tokenyard_wspt.py").write_text(_MODULE)
    (root / "tokenyard_wspt_configs" / "scheduler").mkdir(parents=True)
    (root / "tokenyard_wspt_configs" / "__init__.py").touch()
    (root / "tokenyard_wspt_configs" / "scheduler" / "wspt_tuned.yaml").write_text(_TUNED)
    (root / "tokenyard_wspt_configs" / "scheduler" / "wspt_wrong.yaml").write_text(_TUNED.replace("9.5", "much"))
    info = root / "tokenyard_wspt-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tokenyard-wspt\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[tokenyard]\nwspt = tokenyard_wspt\n")
    return root


class RunPython(Protocol):
    """Run Python with arguments in a folder; the third-party package is installed there."""

    def __call__(
        self, *arguments: str, cwd: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]: ...


@pytest.fixture
def run_python(third_party: Path) -> RunPython:
    def run(
        *arguments: str, cwd: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        variables = {**os.environ, "PYTHONPATH": str(third_party), "OMP_NUM_THREADS": "1", **(environment or {})}
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=cwd,
            env=variables,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run
