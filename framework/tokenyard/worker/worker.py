"""Worker: one device with its share of the model and of the K/V cache."""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, NamedTuple

import torch

from tokenyard.errors import CapacityError, ConfigError, PluginError
from tokenyard.interfaces.attention import AttentionBackend, AttentionBackendContext, AttentionSpec, KVCacheLayout
from tokenyard.interfaces.executor import KVCacheGroupSpec, KVCachePlan, WorkerReport
from tokenyard.model.files import resolve_model
from tokenyard.model.loader import load_model
from tokenyard.model.ranks import ONE_RANK, RankGroup
from tokenyard.platform import Platform
from tokenyard.plugins import load_catalogue
from tokenyard.worker.accelerator import accelerator_of
from tokenyard.worker.attention_choice import AttentionChoice, attention_spec, check_attention, choose_attention
from tokenyard.worker.device import (
    available_kv_bytes,
    choose_dtype,
    device_of_rank,
    num_bytes_of,
    set_threads,
    spare_address_space,
    zeros,
)
from tokenyard.worker.device_memory import first_line
from tokenyard.worker.graph_start import graph_sizes, record_graphs
from tokenyard.worker.host_blocks import make_host_blocks
from tokenyard.worker.input_batch import InputBatch
from tokenyard.worker.kv_groups import KVGroups, group_layers
from tokenyard.worker.logits_processors import LogitsProcessors, load_logits_processors
from tokenyard.worker.memory_profile import MemoryProfile
from tokenyard.worker.model_runner import ModelRunner
from tokenyard.worker.profile_step import NUM_BLOCKS, first_steps, largest_step
from tokenyard.worker.sampler import Sampler
from tokenyard.worker.stream import HostStream

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tokenyard.catalogue import Catalogue
    from tokenyard.config import EngineConfig
    from tokenyard.model.causal_lm import CausalLM, ModelShape
    from tokenyard.model.files import ModelFiles
    from tokenyard.scheduler_output import SchedulerOutput
    from tokenyard.worker.accelerator import Accelerator
    from tokenyard.worker.sampled_step import SampledStep

logger = logging.getLogger(__name__)

_SHARE_THAT_FITS = 0.9  # of what a process may still map: steps need some too


class _Loaded(NamedTuple):
    """What `Worker.load` leaves behind."""

    model: CausalLM
    backend: AttentionBackend
    backend_name: str
    spec: AttentionSpec
    groups: KVGroups
    processors: LogitsProcessors
    max_model_len: int
    graph_sizes: tuple[int, ...]  # numbers of rows; () = no CUDA graphs


class Worker:
    """Created in its own process or in the engine's. Order: load, allocate_kv_cache, then execute / sample in turn.

    Of several ranks each has one, all of which are called in the same order with the same arguments.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_progress: Callable[[str], None] | None = None,
        ranks: RankGroup = ONE_RANK,
    ) -> None:
        self._config = config
        self._on_progress = on_progress
        self._ranks = ranks
        self._device = device_of_rank(config.executor.device, ranks)
        self._num_threads = set_threads(config.executor.num_threads, ranks.size)
        self._accelerator: Accelerator | None = accelerator_of(self._device)
        self._loaded: _Loaded | None = None
        self._runner: ModelRunner | None = None

    def load(self) -> WorkerReport:
        """Load the model and choose the attention backend."""
        started = time.perf_counter()
        # Each process that needs plugins loads them for itself; within one process that happens once.
        catalogue = load_catalogue(self._config.plugins)
        check_attention(catalogue, self._config.attention.name, Platform())
        files = resolve_model(self._config.model.name, self._on_progress, revision=self._config.model.revision)
        dtype = choose_dtype(self._config.model.dtype, files.torch_dtype)
        profile = self._memory_profile()
        model = self._load_model(files, dtype)
        choice, spec = self._choose_attention(catalogue, model.shape, dtype)
        max_model_len = self._longest_request(files)
        groups = group_layers(model.shape.layers, max_model_len)
        processors = self._load_processors(catalogue, model.shape.vocab_size)
        sizes = graph_sizes(self._config, self._accelerator, model, choice.backend, choice.name)
        loaded = _Loaded(model, choice.backend, choice.name, spec, groups, processors, max_model_len, sizes)
        self._loaded = loaded
        self._ranks.wait_for_all()  # what is free is seen once every rank has its weights
        available_bytes = self._available_bytes(loaded, profile)
        return self._report(loaded, dtype, available_bytes, time.perf_counter() - started)

    def allocate_kv_cache(self, plan: KVCachePlan) -> None:
        """Allocate the K/V cache, make the runner, and on a GPU have prepared what its steps need."""
        if self._loaded is None:
            raise RuntimeError("load() comes first")
        max_model_len = self._loaded.max_model_len if plan.max_model_len is None else plan.max_model_len
        self._runner = self._make_runner(self._loaded, plan, max_model_len)
        if self._accelerator is None:
            return
        self._run_first_steps(self._loaded, max_model_len)
        sizes = self._loaded.graph_sizes
        if sizes:
            record_graphs(self._runner, self._accelerator, sizes, max_model_len, self._loaded.backend_name)

    def execute(self, output: SchedulerOutput) -> None:
        """Forward pass of a step."""
        self._ready().execute(output)

    def sample(self) -> SampledStep:
        """Tokens of the executed step, as a future that may be asked from another thread."""
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

    def _report(self, loaded: _Loaded, dtype: torch.dtype, available_bytes: int, load_seconds: float) -> WorkerReport:
        shape = loaded.model.shape
        return WorkerReport(
            kv_cache_groups=_group_specs(loaded.groups, shape, dtype),
            available_bytes=available_bytes,
            vocab_size=shape.vocab_size,
            decoder=loaded.model.description,
            attention_backend=loaded.backend_name,
            device=str(self._device),
            dtype=loaded.spec.dtype,
            load_seconds=load_seconds,
            attention_description=loaded.backend.description,
        )

    def _make_runner(self, loaded: _Loaded, plan: KVCachePlan, max_model_len: int) -> ModelRunner:
        groups, layout = loaded.groups, loaded.backend.kv_cache_layout(loaded.spec, plan.num_blocks)
        _check_layout(loaded.backend_name, layout, loaded.spec, plan.num_blocks)
        tensors = self._kv_tensors(layout, loaded.spec.dtype, groups.num_tensors, plan)
        stream = HostStream() if self._accelerator is None else self._accelerator.stream
        host_blocks = make_host_blocks(
            plan.num_host_blocks,
            tensors,
            [len(group.layers) for group in groups.groups],
            stream,
            num_ranks=self._ranks.size,
            backend_name=loaded.backend_name,
            num_device_blocks=plan.num_blocks,
        )
        return ModelRunner(
            model=loaded.model,
            backend=loaded.backend,
            layers=groups.assign(loaded.model.shape.layers),
            kv_caches=[tensors[place] for place in groups.tensor_of()],
            batch=self._input_batch(plan.block_size, max_model_len, len(groups.groups), loaded.processors),
            sampler=Sampler(self._device),
            device=self._device,
            seed=self._seed(),
            ranks=self._ranks,
            stream=stream,
            num_slots=2 * self._config.scheduler.max_num_seqs,  # a scheduler keeps those of steps in flight besides
            host_blocks=host_blocks,
        )

    def _load_processors(self, catalogue: Catalogue, vocab_size: int) -> LogitsProcessors:
        if not self._ranks.is_leader:
            return LogitsProcessors([])  # the leader samples
        return load_logits_processors(self._config, catalogue, vocab_size, self._device.type, self._seed())

    def _load_model(self, files: ModelFiles, dtype: torch.dtype) -> CausalLM:
        try:
            return load_model(files, dtype=dtype, device=self._device, ranks=self._ranks)
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"the weights of {self._config.model.name} do not fit in the GPU's memory; free some, or take a "
                f"smaller model or model.dtype ({first_line(error)})"
            ) from error

    def _memory_profile(self) -> MemoryProfile | None:
        """Where the size of the K/V cache follows from what the rest leaves of a GPU."""
        kv_cache = self._config.kv_cache
        if self._accelerator is None or kv_cache.num_blocks is not None or kv_cache.memory is not None:
            return None
        return MemoryProfile(self._accelerator.memory, kv_cache.gpu_memory_utilization)

    def _available_bytes(self, loaded: _Loaded, profile: MemoryProfile | None) -> int:
        if profile is None:
            return available_kv_bytes(self._config.kv_cache, self._device, self._ranks.size)
        graph_rows = max(loaded.graph_sizes, default=0)
        return profile.kv_cache_bytes(lambda: self._run_largest_step(loaded), self._config.scheduler, graph_rows)

    def _run_largest_step(self, loaded: _Loaded) -> None:
        step = largest_step(
            num_tokens=self._config.scheduler.max_num_batched_tokens,
            num_seqs=self._config.scheduler.max_num_seqs,
            max_model_len=loaded.max_model_len,
            block_size=self._config.kv_cache.block_size,
            num_groups=len(loaded.groups.groups),
        )
        self._run_nobodys(loaded, step, loaded.max_model_len)

    def _run_first_steps(self, loaded: _Loaded, max_model_len: int) -> None:
        """So that a backend compiles its kernels, or fails, before there is a request."""
        steps = first_steps(
            num_tokens=self._config.scheduler.max_num_batched_tokens,
            num_seqs=self._config.scheduler.max_num_seqs,
            max_model_len=max_model_len,
            block_size=self._config.kv_cache.block_size,
            num_groups=len(loaded.groups.groups),
        )
        try:
            for step in steps:
                self._run_nobodys(loaded, step, max_model_len)
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"a small step behind {max_model_len} tokens does not fit in the GPU's memory beside the K/V cache; "
                "lower kv_cache.num_blocks, kv_cache.memory, kv_cache.gpu_memory_utilization or model.max_model_len "
                f"({first_line(error)})"
            ) from error

    def _run_nobodys(self, loaded: _Loaded, step: SchedulerOutput, max_model_len: int) -> None:
        """On a cache of its own, and without users' code, which is asked about users' requests alone."""
        plan = KVCachePlan(num_blocks=NUM_BLOCKS, block_size=self._config.kv_cache.block_size)
        runner = self._make_runner(loaded._replace(processors=LogitsProcessors([])), plan, max_model_len)
        runner.execute(step)
        runner.sample().result()

    def _longest_request(self, files: ModelFiles) -> int:
        """In tokens, as far as it is known before the cache's size is."""
        wanted = self._config.model.max_model_len
        return files.max_model_len if wanted is None or wanted < 0 else wanted  # below 0: fitted to the cache

    def _seed(self) -> int:
        return self._config.seed if self._config.model.seed is None else self._config.model.seed

    def _choose_attention(
        self, catalogue: Catalogue, shape: ModelShape, dtype: torch.dtype
    ) -> tuple[AttentionChoice, AttentionSpec]:
        spec = attention_spec(shape, dtype=dtype, device=self._device, block_size=self._config.kv_cache.block_size)
        context = AttentionBackendContext(spec=spec, device=self._device, num_threads=self._num_threads)
        choice = choose_attention(catalogue, self._config.attention, context, Platform())
        if choice.is_auto and self._on_progress is not None:
            self._on_progress(str(choice))
        else:
            logger.info("%s", choice)
        return choice, spec

    def _kv_tensors(
        self, layout: KVCacheLayout, dtype: str, count: int, plan: KVCachePlan
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Zeros, never what memory happens to hold: a mask alone would let NaN through."""
        shapes = (layout.key_shape, layout.value_shape)
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        try:
            for _ in range(count):
                key, value = (zeros(shape, dtype, self._device) for shape in shapes)
                pairs.append((key, value))
        except (RuntimeError, MemoryError) as error:
            pairs.clear()  # before it is asked what would fit
            raise CapacityError(
                f"a K/V cache of {plan.num_blocks} blocks of {plan.block_size} tokens does not fit in memory; "
                f"{self._smaller(layout, dtype, count, plan)} ({str(error).splitlines()[0]})"
            ) from error
        return pairs

    def _smaller(self, layout: KVCacheLayout, dtype: str, count: int, plan: KVCachePlan) -> str:
        """What to try instead, with a number where one is known."""
        spare = spare_address_space() if self._accelerator is None else None
        values = count * (math.prod(layout.key_shape) + math.prod(layout.value_shape))
        bytes_per_block = max(1, values * num_bytes_of(dtype) // plan.num_blocks)
        fitting = 0 if spare is None else int(_SHARE_THAT_FITS * spare) // bytes_per_block
        if fitting < 1:
            return "lower kv_cache.num_blocks or kv_cache.memory"
        return f"try kv_cache.num_blocks={fitting}, for which this process may map memory, or lower kv_cache.memory"

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

    def _ready(self) -> ModelRunner:
        if self._runner is None:
            raise RuntimeError("allocate_kv_cache() comes first")
        return self._runner


def _check_layout(name: str, layout: KVCacheLayout, spec: AttentionSpec, num_blocks: int) -> None:
    """Raises PluginError for caches of another size than memory is counted by."""
    rows = num_blocks * spec.block_size * spec.num_kv_heads
    shapes = {"key": (layout.key_shape, spec.head_dim), "value": (layout.value_shape, spec.v_head_dim)}
    for cache, (shape, size) in shapes.items():
        if math.prod(shape) != rows * size:
            raise PluginError(
                f"attention '{name}' lays out a {cache} cache of shape {tuple(shape)}, {math.prod(shape)} elements, "
                f"for {num_blocks} blocks; it must have {rows * size}: blocks * block size {spec.block_size} * "
                f"KV heads {spec.num_kv_heads} * head size {size}; choose another attention backend"
            )


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
