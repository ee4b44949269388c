"""What a worker reports once its model is loaded, and the K/V cache that it is told to allocate, as messages."""

from __future__ import annotations

import msgspec

from tokenyard.interfaces.executor import KVCacheGroupSpec, KVCachePlan, WorkerReport


class GroupMessage(msgspec.Struct, frozen=True, array_like=True):
    """A KVCacheGroupSpec."""

    num_layers: int
    bytes_per_token: int
    sliding_window: int | None


class ReportMessage(msgspec.Struct, frozen=True, tag="report"):
    """A WorkerReport: the model is loaded."""

    kv_cache_groups: tuple[GroupMessage, ...]
    available_bytes: int
    vocab_size: int
    decoder: str
    attention_backend: str
    device: str
    dtype: str
    load_seconds: float
    attention_description: str


class PlanMessage(msgspec.Struct, frozen=True, tag="plan"):
    """A KVCachePlan: allocate it."""

    num_blocks: int
    block_size: int
    max_model_len: int | None
    num_host_blocks: int = 0


def report_to_message(report: WorkerReport) -> ReportMessage:
    """What crosses processes."""
    groups = tuple(
        GroupMessage(group.num_layers, group.bytes_per_token, group.sliding_window) for group in report.kv_cache_groups
    )
    return ReportMessage(
        kv_cache_groups=groups,
        available_bytes=report.available_bytes,
        vocab_size=report.vocab_size,
        decoder=report.decoder,
        attention_backend=report.attention_backend,
        device=report.device,
        dtype=report.dtype,
        load_seconds=report.load_seconds,
        attention_description=report.attention_description,
    )


def report_from_message(message: ReportMessage) -> WorkerReport:
    """The same."""
    groups = tuple(
        KVCacheGroupSpec(
            num_layers=group.num_layers, bytes_per_token=group.bytes_per_token, sliding_window=group.sliding_window
        )
        for group in message.kv_cache_groups
    )
    return WorkerReport(
        kv_cache_groups=groups,
        available_bytes=message.available_bytes,
        vocab_size=message.vocab_size,
        decoder=message.decoder,
        attention_backend=message.attention_backend,
        device=message.device,
        dtype=message.dtype,
        load_seconds=message.load_seconds,
        attention_description=message.attention_description,
    )


def plan_to_message(plan: KVCachePlan) -> PlanMessage:
    """What crosses processes."""
    return PlanMessage(plan.num_blocks, plan.block_size, plan.max_model_len, plan.num_host_blocks)


def plan_from_message(message: PlanMessage) -> KVCachePlan:
    """The same."""
    return KVCachePlan(
        num_blocks=message.num_blocks,
        block_size=message.block_size,
        max_model_len=message.max_model_len,
        num_host_blocks=message.num_host_blocks,
    )
