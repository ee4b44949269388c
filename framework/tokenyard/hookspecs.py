"""Every hook of Tokenyard, grouped by the phase in which what it names is used.

A plugin is a module with functions of these names, each marked with `hookimpl`, and one entry point in the group
`tokenyard` that names the module. The hooks are called once per process, at launch, never in a step. Each takes no
argument and returns an iterable of descriptors; a generator will do. A hook imports nothing heavy: the descriptor's
factory does, when the component is built. Nothing that a hook yields runs unless the config names it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

import pluggy

from tokenyard.descriptors import (
    AttentionBackendDescriptor,
    ComponentDescriptor,
    Descriptor,
    EngineCoreDescriptor,
    ExecutorDescriptor,
    KVCacheManagerDescriptor,
    ObserverDescriptor,
    PolicyDescriptor,
    SchedulerDescriptor,
)

hookspec = pluggy.HookspecMarker("tokenyard")
hookimpl = pluggy.HookimplMarker("tokenyard")

# `Any` stands for the options type, which differs from descriptor to descriptor.


class TokenyardHooks(Protocol):
    """The hooks; a plugin implements those it needs, as functions of a module (without `self`)."""

    # ---- Launch: before the config is composed -------------------------------------------------------------------

    @hookspec
    def tokenyard_config_paths(self) -> Iterable[str]:
        """Packages whose YAML files join the config groups, as `pkg://PACKAGE`.

        Only a plugin that wants more than its options' defaults needs one.

            @hookimpl
            def tokenyard_config_paths():
                yield "pkg://my_package.configs"
        """

    # ---- Assembly: the parts of an engine, chosen by name --------------------------------------------------------

    @hookspec
    def tokenyard_engine_cores(self) -> Iterable[EngineCoreDescriptor[Any]]:
        """Engine loops, chosen by `engine=NAME`.

        @hookimpl
        def tokenyard_engine_cores():
            yield EngineCoreDescriptor(name="eager", api_version=(1, 7), factory=build_eager_loop)
        """

    @hookspec
    def tokenyard_schedulers(self) -> Iterable[SchedulerDescriptor[Any]]:
        """Whole schedulers, chosen by `scheduler=NAME`; most plugins want a policy instead.

        @hookimpl
        def tokenyard_schedulers():
            yield SchedulerDescriptor(name="static", api_version=(1, 7), factory=build_static, takes_policy=False)
        """

    @hookspec
    def tokenyard_policies(self) -> Iterable[PolicyDescriptor[Any]]:
        """Scheduling policies, chosen by `scheduler=NAME`; their options live under `scheduler.policy`.

        @hookimpl
        def tokenyard_policies():
            yield PolicyDescriptor(name="sjf", api_version=(1, 7), options_type=SJFOptions, factory=build_sjf)
        """

    @hookspec
    def tokenyard_kv_cache_managers(self) -> Iterable[KVCacheManagerDescriptor[Any]]:
        """K/V cache managers, chosen by `kv_cache=NAME`.

        @hookimpl
        def tokenyard_kv_cache_managers():
            yield KVCacheManagerDescriptor(name="radix", api_version=(1, 7), factory=build_radix)
        """

    @hookspec
    def tokenyard_attention_backends(self) -> Iterable[AttentionBackendDescriptor[Any]]:
        """Attention backends, chosen by `attention=NAME`, or walked by `attention=auto` in the order of `auto_rank`.

        @hookimpl
        def tokenyard_attention_backends():
            yield AttentionBackendDescriptor(
                name="my_kernel", api_version=(1, 7), factory=build, supports=supports, requires=needs_gpu
            )
        """

    @hookspec
    def tokenyard_executors(self) -> Iterable[ExecutorDescriptor[Any]]:
        """Executors, chosen by `executor=NAME`.

        @hookimpl
        def tokenyard_executors():
            yield ExecutorDescriptor(name="cluster", api_version=(1, 7), factory=build_cluster)
        """

    @hookspec
    def tokenyard_components(self) -> Iterable[ComponentDescriptor[Any]]:
        """Components of any other kind, named by `component_kind`: eviction rules, predictors, workloads, ...

        @hookimpl
        def tokenyard_components():
            yield ComponentDescriptor(
                component_kind="eviction", name="lfu", api_version=(1, 7), factory=build_lfu
            )
        """

    # ---- Running: told what the engine did -----------------------------------------------------------------------

    @hookspec
    def tokenyard_observers(self) -> Iterable[ObserverDescriptor[Any]]:
        """Observers, switched on by `observers=[NAME]`.

        @hookimpl
        def tokenyard_observers():
            yield ObserverDescriptor(name="csv_log", api_version=(1, 7), factory=build_csv_log)
        """


CONFIG_PATHS_HOOK = "tokenyard_config_paths"

DESCRIPTOR_TYPES: Mapping[str, type[Descriptor[Any]]] = MappingProxyType(
    {
        "tokenyard_engine_cores": EngineCoreDescriptor,
        "tokenyard_schedulers": SchedulerDescriptor,
        "tokenyard_policies": PolicyDescriptor,
        "tokenyard_kv_cache_managers": KVCacheManagerDescriptor,
        "tokenyard_attention_backends": AttentionBackendDescriptor,
        "tokenyard_executors": ExecutorDescriptor,
        "tokenyard_observers": ObserverDescriptor,
        "tokenyard_components": ComponentDescriptor,
    }
)
"""The descriptor class that each hook yields. `tokenyard_config_paths` is not here: it yields strings."""

HOOK_NAMES: tuple[str, ...] = (*DESCRIPTOR_TYPES, CONFIG_PATHS_HOOK)
