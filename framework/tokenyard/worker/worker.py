"""Worker: one device with its share of the model and of the K/V cache."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

import torch

from tokenyard.errors import CapacityError, ConfigError
from tokenyard.interfaces.attention import AttentionBackend, AttentionBackendContext, AttentionSpec, KVCacheLayout
from tokenyard.interfaces.executor import KVCacheGroupSpec, KVCachePlan, WorkerReport
from tokenyard.model.files import resolve_model
from tokenyard.model.loader import load_model
from tokenyard.parts import make_part
from tokenyard.platform import Platform
from tokenyard.plugins import load_catalogue
from tokenyard.worker.attention_choice import AttentionChoice, choose_attention
from tokenyard.worker.device import available_kv_bytes, choose_device, choose_dtype, set_threads, zeros
from tokenyard.worker.input_batch import InputBatch
from tokenyard.worker.kv_groups import KVGroups, group_layers
from tokenyard.worker.logits_processors import LogitsProcessors, load_logits_processors
from tokenyard.worker.model_runner import ModelRunner
from tokenyard.worker.sampler import Sampler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tokenyard.config import EngineConfig
    from tokenyard.model.causal_lm import CausalLM, ModelShape
    from tokenyard.model.files import ModelFiles
    from tokenyard.runner_output import ModelRunnerOutput
    from tokenyard.scheduler_output import SchedulerOutput


class _Loaded(NamedTuple):
    """What `Worker.load` leaves behind."""

    model: CausalLM
    backend: AttentionBackend
    spec: AttentionSpec
    groups: KVGroups
    processors: LogitsProcessors
    max_model_len: int


class Worker:
    """Created in its own process or in the engine's. Order: load, allocate_kv_cache, then execute / sample in turn."""

    def __init__(self, config: EngineConfig, on_progress: Callable[[str], None] | None = None) -> None:
        self._config = config
        self._on_progress = on_progress
        self._device = choose_device(config.executor.device)
        self._num_threads = set_threads(config.executor.num_threads)
        self._loaded: _Loaded | None = None
        self._runner: ModelRunner | None = None

    def load(self) -> WorkerReport:
        """Load the model and choose the attention backend."""
        started = time.perf_counter()
        files = resolve_model(self._config.model.name, self._on_progress, revision=self._config.model.revision)
        dtype = choose_dtype(self._config.model.dtype, files.torch_dtype)
        model = load_model(files, dtype=dtype, device=self._device)
        spec = self._attention_spec(model, dtype)
        # Each process that needs plugins loads them for itself; within one process that happens once.
        catalogue = load_catalogue(self._config.plugins)
        choice = choose_attention(catalogue, self._config.attention.name, spec, Platform())
        max_model_len = self._longest_request(files)
        groups = group_layers(model.shape.layers, max_model_len)
        processors = load_logits_processors(
            self._config, catalogue, model.shape.vocab_size, self._device.type, self._seed()
        )
        backend = self._make_backend(choice, spec)
        self._loaded = _Loaded(model, backend, spec, groups, processors, max_model_len)
        return WorkerReport(
            kv_cache_groups=_group_specs(groups, model.shape, dtype),
            available_bytes=available_kv_bytes(self._config.kv_cache, self._device),
            vocab_size=model.shape.vocab_size,
            decoder=model.description,
            attention_backend=choice.descriptor.name,
            device=str(self._device),
            dtype=str(dtype).removeprefix("torch."),
            load_seconds=time.perf_counter() - started,
            attention_description=backend.description,
        )

    def allocate_kv_cache(self, plan: KVCachePlan) -> None:
        """Allocate the K/V cache and make the runner."""
        if self._loaded is None:
            raise RuntimeError("load() comes first")
        model, backend, spec, groups, processors, max_model_len = self._loaded
        tensors = self._kv_tensors(backend.kv_cache_layout(spec, plan.num_blocks), spec.dtype, groups.num_tensors, plan)
        max_model_len = max_model_len if plan.max_model_len is None else plan.max_model_len
        self._runner = ModelRunner(
            model=model,
            backend=backend,
            layers=groups.assign(model.shape.layers),
            kv_caches=[tensors[place] for place in groups.tensor_of()],
            batch=self._input_batch(plan.block_size, max_model_len, len(groups.groups), processors),
            sampler=Sampler(self._device),
            device=self._device,
            seed=self._seed(),
        )

    def execute(self, output: SchedulerOutput) -> None:
        """Forward pass of a step."""
        self._ready().execute(output)

    def sample(self) -> ModelRunnerOutput:
        """Tokens of the executed step."""
        return self._ready().sample()

    def call(self, name: str, arguments: Sequence[object]) -> object:
        """A published function by name, for `Executor.collective_rpc`."""
        if name not in PUBLISHED:
            raise ConfigError(f"a worker has no function '{name}'; it has: {', '.join(sorted(PUBLISHED))}")
        return PUBLISHED[name](self, *arguments)

    def memory_allocated(self) -> int:
        """Bytes in use on a GPU by this process; 0 on a CPU."""
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0

    def device_name(self) -> str:
        return str(self._device)

    def _longest_request(self, files: ModelFiles) -> int:
        """In tokens, as far as it is known before the cache's size is."""
        wanted = self._config.model.max_model_len
        return files.max_model_len if wanted is None or wanted < 0 else wanted  # below 0: fitted to the cache

    def _seed(self) -> int:
        return self._config.seed if self._config.model.seed is None else self._config.model.seed

    def _make_backend(self, choice: AttentionChoice, spec: AttentionSpec) -> AttentionBackend:
        context = AttentionBackendContext(spec=spec, device=self._device, num_threads=self._num_threads)
        options = self._config.attention.options
        return make_part(choice.descriptor, AttentionBackend, lambda part: part.factory(options, context))

    def _kv_tensors(
        self, layout: KVCacheLayout, dtype: str, count: int, plan: KVCachePlan
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Zeros, never what memory happens to hold: a mask alone would let NaN through."""
        shapes = (layout.key_shape, layout.value_shape)
        try:
            pairs = [[zeros(shape, dtype, self._device) for shape in shapes] for _ in range(count)]
        except (RuntimeError, MemoryError) as error:
            raise CapacityError(
                f"a K/V cache of {plan.num_blocks} blocks of {plan.block_size} tokens does not fit in memory; "
                f"lower kv_cache.num_blocks or kv_cache.memory ({str(error).splitlines()[0]})"
            ) from error
        return [(key, value) for key, value in pairs]

    def _input_batch(
        self, block_size: int, max_model_len: int, num_groups: int, processors: LogitsProcessors
    ) -> InputBatch:
        num_slots = self._config.scheduler.max_num_seqs
        try:
            return InputBatch(
                num_slots=num_slots,
                max_model_len=max_model_len,
                block_size=block_size,
                num_groups=num_groups,
                processors=processors.start,
            )
        except (MemoryError, ValueError) as error:
            raise CapacityError(
                f"a batch of scheduler.max_num_seqs={num_slots} requests of up to {max_model_len} tokens does not fit "
                "in memory; lower scheduler.max_num_seqs or model.max_model_len"
            ) from error

    def _attention_spec(self, model: CausalLM, dtype: torch.dtype) -> AttentionSpec:
        shape = model.shape
        return AttentionSpec(
            device_type=self._device.type,
            dtype=str(dtype).removeprefix("torch."),
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            v_head_dim=shape.v_head_dim,
            block_size=self._config.kv_cache.block_size,
            sliding_windows=frozenset(layer.sliding_window for layer in shape.layers if layer.sliding_window),
            soft_caps=frozenset(layer.soft_cap for layer in shape.layers if layer.soft_cap),
            has_sinks=any(layer.sinks is not None for layer in shape.layers),
        )

    def _ready(self) -> ModelRunner:
        if self._runner is None:
            raise RuntimeError("allocate_kv_cache() comes first")
        return self._runner


def _group_specs(groups: KVGroups, shape: ModelShape, dtype: torch.dtype) -> tuple[KVCacheGroupSpec, ...]:
    bytes_per_layer = shape.num_kv_heads * (shape.head_dim + shape.v_head_dim) * dtype.itemsize
    return tuple(
        KVCacheGroupSpec(
            num_layers=len(group.layers),
            bytes_per_token=bytes_per_layer * len(group.layers),
            sliding_window=group.window,
        )
        for group in groups.groups
    )


PUBLISHED: dict[str, Callable[..., object]] = {
    "device_name": Worker.device_name,
    "memory_allocated": Worker.memory_allocated,
}
"""Functions that `collective_rpc` may call: named, so that nothing else of a worker can be reached from outside."""
