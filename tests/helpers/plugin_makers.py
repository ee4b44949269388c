"""Descriptors and catalogue entries for tests of the plugin system."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from tokenyard.catalogue import Entry, Provider
from tokenyard.descriptors import (
    PLUGIN_API,
    AttentionBackendDescriptor,
    ComponentDescriptor,
    Descriptor,
    PolicyDescriptor,
    SchedulerDescriptor,
)
from tokenyard.interfaces import AttentionBackend, PolicyContext, Scheduler, SchedulerContext, SchedulingPolicy
from tokenyard.platform import Platform

if TYPE_CHECKING:
    from tokenyard.config import NoOptions


class CPUOnly(Platform):
    """A platform without a GPU, which imports nothing to know it."""

    device_type = "cpu"


def build_policy(options: NoOptions, context: PolicyContext) -> SchedulingPolicy:
    return SchedulingPolicy()


def build_scheduler(options: NoOptions, context: SchedulerContext) -> Scheduler:
    raise NotImplementedError


def build_attention(options: NoOptions, context: object) -> AttentionBackend:
    raise NotImplementedError


def build_component(options: NoOptions, context: object) -> object:
    return object()


def policy(name: str, api_version: tuple[int, int] = PLUGIN_API) -> PolicyDescriptor[NoOptions]:
    return PolicyDescriptor(name=name, api_version=api_version, factory=build_policy)


def scheduler(name: str) -> SchedulerDescriptor[NoOptions]:
    return SchedulerDescriptor(name=name, api_version=PLUGIN_API, factory=build_scheduler)


def attention(name: str, rank: int | None = None) -> AttentionBackendDescriptor[NoOptions]:
    return AttentionBackendDescriptor(
        name=name, api_version=PLUGIN_API, factory=build_attention, supports=lambda spec: (), auto_rank=rank
    )


def component(kind: str, name: str) -> ComponentDescriptor[NoOptions]:
    return ComponentDescriptor(component_kind=kind, name=name, api_version=PLUGIN_API, factory=build_component)


def provider(distribution: str = "alpha", entry_point: str = "point") -> Provider:
    return Provider(distribution=distribution, version="1.0", entry_point=entry_point)


def entry(descriptor: object, distribution: str = "alpha", entry_point: str = "point") -> Entry:
    return Entry(descriptor=cast("Descriptor[object]", descriptor), provider=provider(distribution, entry_point))
