"""Descriptors: what a plugin yields. Building one imports nothing heavy; its factory imports inside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from tokenyard.config import NoOptions

if TYPE_CHECKING:
    from tokenyard.interfaces.attention import AttentionBackend, AttentionBackendContext, AttentionSpec
    from tokenyard.interfaces.engine_core import EngineCore, EngineCoreContext
    from tokenyard.interfaces.executor import Executor, ExecutorContext
    from tokenyard.interfaces.kv_cache import KVCacheManager, KVCacheManagerContext
    from tokenyard.interfaces.observer import Observer, ObserverContext
    from tokenyard.interfaces.policy import PolicyContext, SchedulingPolicy
    from tokenyard.interfaces.scheduler import Scheduler, SchedulerContext
    from tokenyard.platform import Platform

PLUGIN_API: tuple[int, int] = (1, 7)
"""(major, minor) of the plugin contract: another major is refused, an older minor loads."""

OptionsT = TypeVar("OptionsT")


def no_requirements(platform: Platform) -> Sequence[str]:
    """Runs everywhere."""
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptor(Generic[OptionsT]):
    """Common to all kinds. `name` is lower-case, unique in its kind (policies and schedulers share one name space).

    `api_version` is the PLUGIN_API that the plugin was written for, as a literal. `options_type` is a dataclass, filled
    from the config. `requires(platform)` returns reasons why the component cannot run here; it must not import
    anything heavy. `tested_on` (API 1.1) names the device types on which the code has really run.
    """

    kind: ClassVar[str]
    name: str
    api_version: tuple[int, int]
    summary: str = ""
    options_type: type[OptionsT] = field(default=NoOptions)  # type: ignore[assignment]
    requires: Callable[[Platform], Sequence[str]] = no_requirements
    tested_on: frozenset[str] = frozenset({"cpu"})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCoreDescriptor(Descriptor[OptionsT]):
    """An engine loop, chosen by `engine=NAME`; `steps_in_flight` (API 1.2) is the most it has at once."""

    kind = "engine"
    factory: Callable[[OptionsT, EngineCoreContext], EngineCore]
    steps_in_flight: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerDescriptor(Descriptor[OptionsT]):
    """A whole scheduler, chosen by `scheduler=NAME`; `takes_policy` says whether a policy steers it."""

    kind = "scheduler"
    factory: Callable[[OptionsT, SchedulerContext], Scheduler]
    takes_policy: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyDescriptor(Descriptor[OptionsT]):
    """A scheduling policy, chosen by `scheduler=NAME`; options live under `scheduler.policy`.

    `metadata_type` (API 1.3) is a dataclass of what users may tell the policy of a request, besides the hints that
    every policy gets: its fields are keys of the request's scheduling hints, checked and converted as options are, and
    come as `RequestView.metadata`.
    """

    kind = "policy"
    factory: Callable[[OptionsT, PolicyContext], SchedulingPolicy]
    metadata_type: type = NoOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheManagerDescriptor(Descriptor[OptionsT]):
    """A K/V cache manager, chosen by `kv_cache=NAME`."""

    kind = "kv_cache"
    factory: Callable[[OptionsT, KVCacheManagerContext], KVCacheManager]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBackendDescriptor(Descriptor[OptionsT]):
    """An attention backend, chosen by `attention=NAME`.

    `supports(spec)` imports the backend and asks it; `auto_rank` orders the walk of `attention=auto`, lowest first,
    None = never taken by it.
    """

    kind = "attention"
    factory: Callable[[OptionsT, AttentionBackendContext], AttentionBackend]
    supports: Callable[[AttentionSpec], Sequence[str]]
    auto_rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorDescriptor(Descriptor[OptionsT]):
    """An executor, chosen by `executor=NAME`; one that `is_simulated` (API 1.7) has no model, and virtual time."""

    kind = "executor"
    factory: Callable[[OptionsT, ExecutorContext], Executor]
    is_simulated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserverDescriptor(Descriptor[OptionsT]):
    """An observer, switched on by `observers=[NAME]`."""

    kind = "observer"
    factory: Callable[[OptionsT, ObserverContext], Observer]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentDescriptor(Descriptor[OptionsT]):
    """Any other kind (logits processors, predictors, latency models, workloads, ...), named by `component_kind`."""

    kind = "component"
    component_kind: str
    factory: Callable[[OptionsT, Any], Any]  # of the kind's own context and class


def kind_of(descriptor: Descriptor[Any]) -> str:
    """`policy`, `attention`, ...; for an open-ended component its own kind."""
    return descriptor.component_kind if isinstance(descriptor, ComponentDescriptor) else descriptor.kind
