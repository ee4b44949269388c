"""The backend: which wrapper serves a step, and what FlashInfer's kernels leave to be done.

K/V rows are written by torch's `index_copy_`: `append_paged_kv_cache` would need two more arrays a step (the sequence
and the position of each row) and one more kernel to compile, to save one launch a layer.

Sinks are added afterwards. The `sinks` argument of the wrappers' `run` is read by kernels for other GPUs only: those
used here (fa2, fa3 and the decode kernel) take it and leave it unread.

Legend: T = query rows, H / HK = query / KV heads, D = head size.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import torch
from tokenyard.errors import ConfigError
from tokenyard.interfaces import AttentionBackend, KVCacheLayout

from tokenyard_backends.flashinfer.kernels import Cache, KernelSettings, LayerKind
from tokenyard_backends.flashinfer.library import load_library
from tokenyard_backends.flashinfer.plugin import FlashInferOptions
from tokenyard_backends.flashinfer.steps import CapturePlan, KernelPool, Plan, StepPlan
from tokenyard_backends.shared.refusals import common_refusals, head_dim_refusals, nvidia_refusals
from tokenyard_backends.shared.sinks import add_sinks

if TYPE_CHECKING:
    from tokenyard.interfaces import AttentionBackendContext, AttentionBatch, AttentionLayer, AttentionSpec

    from tokenyard_backends.flashinfer.library import Library

logger = logging.getLogger(__name__)

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_HEAD_DIMS = (64, 128, 256)
_CUDA_CORE_GROUPS = (1, 2, 3, 4, 6, 8)  # query heads a KV head that the decode kernel is compiled for
_TENSOR_CORE_GROUP = 4  # from here on a tile of 16 query rows is a quarter full
_HOPPER = (9, 0)


class FlashInferBackend(AttentionBackend):
    """FlashInfer 0.7's paged kernels; log-sum-exp is supported and includes a layer's sinks."""

    has_lse = True
    can_capture = True

    def __init__(self, options: FlashInferOptions, context: AttentionBackendContext) -> None:
        _check_options(options, context.spec)
        library = load_library()
        settings = _settings(library=library, options=options, context=context)
        self._pool = KernelPool(settings)
        self._cascade_min_blocks = options.cascade_min_blocks if options.cascade else None
        cores = "tensor cores" if settings.decode_tensor_cores else "CUDA cores"
        cascade = f", shared prefixes of {options.cascade_min_blocks} blocks read once" if options.cascade else ""
        self.description = f"{library.__version__}, decode on {cores}, prefill {settings.prefill_backend}{cascade}"

    @classmethod
    def supports(cls, spec: AttentionSpec) -> list[str]:
        return [*nvidia_refusals(spec), *common_refusals(spec, _DTYPES), *head_dim_refusals(spec, _HEAD_DIMS)]

    def kv_cache_layout(self, spec: AttentionSpec, num_blocks: int) -> KVCacheLayout:
        shape = (num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
        return KVCacheLayout(key_shape=shape, value_shape=shape)

    def plan(self, batch: AttentionBatch) -> Plan:
        return StepPlan(self._pool, batch, self._cascade_min_blocks)

    def plan_capture(self, batch: AttentionBatch) -> Plan:
        return CapturePlan(self._pool, batch)

    def update_capture(self, plan: object, batch: AttentionBatch) -> None:
        if not isinstance(plan, CapturePlan):
            raise TypeError(f"plan must come from this backend's plan_capture(), got {type(plan).__name__}")
        plan.update(batch)

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: Cache,
        plan: object,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        if not isinstance(plan, Plan):
            raise TypeError(f"plan must come from this backend's plan(), got {type(plan).__name__}")
        for cache, new in zip(kv_cache, (key, value), strict=True):
            cache.view(-1, *cache.shape[2:]).index_copy_(0, plan.slots, new)
        wants_lse = lse is not None or layer.sinks is not None
        if wants_lse and lse is None:
            lse = query.new_empty(query.shape[:2], dtype=torch.float32)
        plan.attention(LayerKind.of(layer)).run(query, kv_cache, out, lse)
        if lse is not None:
            lse.mul_(math.log(2))  # FlashInfer's is in base 2
            if layer.sinks is not None:
                add_sinks(out, lse, layer.sinks)


class CascadeBackend(FlashInferBackend):
    """With the option `cascade`: how many blocks are shared changes from step to step, which no CUDA graph can hold."""

    can_capture = False


def make_backend(options: FlashInferOptions, context: AttentionBackendContext) -> FlashInferBackend:
    """Raises ConfigError for options that cannot hold, PluginError when the package cannot be imported."""
    return (CascadeBackend if options.cascade else FlashInferBackend)(options, context)


def _check_options(options: FlashInferOptions, spec: AttentionSpec) -> None:
    for name, number in (("workspace_mib", options.workspace_mib), ("cascade_min_blocks", options.cascade_min_blocks)):
        if number < 1:
            raise ConfigError(f"attention.{name}={number} must be at least 1")
    if not options.cascade and options.cascade_min_blocks != FlashInferOptions().cascade_min_blocks:
        logger.warning(
            "attention.cascade_min_blocks=%d has no effect without attention.cascade=true", options.cascade_min_blocks
        )
    group = spec.num_heads // spec.num_kv_heads
    if options.decode_tensor_cores is False and group not in _CUDA_CORE_GROUPS:
        raise ConfigError(
            f"attention.decode_tensor_cores=false: this model has {group} query heads a KV head, and without "
            f"tensor cores FlashInfer decodes {', '.join(map(str, _CUDA_CORE_GROUPS))}; leave the option out"
        )


def _settings(*, library: Library, options: FlashInferOptions, context: AttentionBackendContext) -> KernelSettings:
    spec, device = context.spec, context.device
    with torch.inference_mode(False):
        workspace = torch.zeros(options.workspace_mib << 20, dtype=torch.uint8, device=device)
    return KernelSettings(
        library=library,
        device=device,
        workspace=workspace,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_size=spec.block_size,
        dtype=_DTYPES[spec.dtype],
        prefill_backend=_prefill_backend(options, device),
        decode_tensor_cores=_decode_tensor_cores(options, spec.num_heads // spec.num_kv_heads),
    )


def _prefill_backend(options: FlashInferOptions, device: torch.device) -> str:
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == _HOPPER
    if options.prefill_kernel == "fa3" and not is_hopper:
        raise ConfigError("attention.prefill_kernel=fa3 needs a Hopper GPU (compute capability 9.0); use auto")
    if options.prefill_kernel == "auto" and not is_hopper:
        return "fa2"  # FlashInfer's own `auto` may take kernels of other packages on later GPUs
    return options.prefill_kernel


def _decode_tensor_cores(options: FlashInferOptions, group: int) -> bool:
    if options.decode_tensor_cores is not None:
        return options.decode_tensor_cores
    return group >= _TENSOR_CORE_GROUP or group not in _CUDA_CORE_GROUPS
