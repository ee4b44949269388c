"""`tokenyard bench attention`: attention backends alone, beside each other and beside the speed of the memory."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, cast

import torch

import tokenyard
from tokenyard.bench.attention_backends import Candidate, find_candidates, spec_of
from tokenyard.bench.attention_inputs import make_inputs
from tokenyard.bench.attention_lane import TOLERANCE, Cache, Lane, write_caches
from tokenyard.bench.device_time import ReadSpeed, last_level_cache
from tokenyard.bench.report import machine
from tokenyard.errors import CapacityError
from tokenyard.interfaces.attention import AttentionBackendContext
from tokenyard.memory_size import parse_bytes
from tokenyard.worker.device import choose_device, set_threads

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from tokenyard.bench.attention_inputs import AttentionInputs
    from tokenyard.bench.attention_shapes import AttentionShape
    from tokenyard.bench.settings import AttentionBench
    from tokenyard.catalogue import Catalogue
    from tokenyard.config import EngineConfig
    from tokenyard.worker.attention_choice import Skipped

logger = logging.getLogger(__name__)

BASELINE = "torch_native"
LEAST_ROUNDS, MOST_ROUNDS = 5, 1000
LEAST_LAYERS, MOST_LAYERS = 2, 64
BUSY = 1.3  # times the minimum; the median of a call on a quiet machine is below that
CACHES_IN_LAYERS = 4  # K/V of all layers together, in sizes of the processor's cache
_CPU_MEMORY = 2 * 2**30
_GPU_SHARE = 4  # of the free memory, one part in so many
_USED = ("executor.device", "executor.num_threads", "model.dtype", "kv_cache.block_size", "kv_cache.memory")


class Report(NamedTuple):
    """What was measured, what was not, and what went wrong, in words: a backend that raised, or gave wrong numbers."""

    rows: list[dict[str, object]]
    skipped: list[Skipped]
    failures: list[str]
    facts: dict[str, object]


@dataclass(frozen=True, slots=True)
class _Timed:
    """A lane, whose backend is right."""

    name: str
    description: str
    mode: str  # eager or graph
    lane: Lane
    error: float


def warn_of_unused(given: Collection[str]) -> None:
    """Say which of the user's keys change nothing where attention runs alone."""
    unused = sorted(key for key in given if key not in _USED and key.split(".")[0] not in ("attention", "plugins"))
    if unused:
        logger.warning("bench attention runs attention alone, so this changes nothing: %s", ", ".join(unused))


def busy_text(rows: Sequence[Mapping[str, object]]) -> str | None:
    """The rows whose median says more of the machine than of the backend, in words; None where there is none.

    Whoever else runs interrupts a long call more often than a short one: ratios of medians are then off too.
    """
    shares = [(row, cast("float", row["median_us"]) / max(cast("float", row["min_us"]), 0.1)) for row in rows]
    if not (busy := [f"{_called(row)} ({share:.1f})" for row, share in shares if share > BUSY]):
        return None
    return (
        f"the machine was busy: the median is above {BUSY} times the minimum for {', '.join(busy)}; what is made of "
        f"these medians, times_floor, gflop_per_s and vs_{BASELINE}, holds on a quiet machine only"
    )


def _called(row: Mapping[str, object]) -> str:
    return " ".join(str(row[name]) for name in ("shape", "backend", "mode") if row[name] != "eager")


def run_attention_bench(settings: AttentionBench, config: EngineConfig, catalogue: Catalogue) -> Report:
    """Measure each backend at each shape. Raises UserError when a backend that is named, or every one, cannot run."""
    device = choose_device(config.executor.device)
    context = AttentionBackendContext(
        spec=spec_of(settings, config, device), device=device, num_threads=set_threads(config.executor.num_threads)
    )
    around = machine()
    candidates, skipped = find_candidates(settings, config, catalogue, context)
    bench = _Bench(settings, context, candidates, _memory(config, device))
    rows = [row for shape in settings.parsed for row in bench.measure(shape)]
    return Report(rows, skipped, bench.failures, {**_facts(context), **around})


class _Bench:
    """What the shapes share."""

    def __init__(
        self,
        settings: AttentionBench,
        context: AttentionBackendContext,
        candidates: Sequence[Candidate],
        memory: int,  # bytes of all caches together
    ) -> None:
        self.failures: list[str] = []
        self._window = settings.sliding_window
        self._seconds = settings.seconds / len(settings.parsed)
        self._spec, self._device = context.spec, context.device
        self._candidates = candidates
        self._memory = memory
        self._read_speed = ReadSpeed(context.device)

    @torch.inference_mode()
    def measure(self, shape: AttentionShape) -> list[dict[str, object]]:
        """A row for each backend that is right; on a GPU also one for its CUDA graph, where it can be recorded."""
        logger.info("%s: %s", shape, ", ".join(candidate.name for candidate in self._candidates))
        inputs = make_inputs(shape, self._spec, self._device)
        num_layers = self._num_layers(inputs)
        timed = [one for candidate in self._candidates for one in self._ready(candidate, inputs, num_layers)]
        if not timed:
            return []
        self._run_rounds([one.lane for one in timed])
        bytes_per_second = self._read_speed.bytes_per_second()
        return _beside_baseline([self._row(shape, one, bytes_per_second, num_layers) for one in timed])

    def _ready(self, candidate: Candidate, inputs: AttentionInputs, num_layers: int) -> list[_Timed]:
        """The lanes of one backend, checked; what goes wrong is kept in `failures`."""
        backend, is_decode = candidate.backend, inputs.shape.query_len == 1
        modes = ["eager", *(["graph"] if self._device.type == "cuda" and backend.can_capture and is_decode else [])]
        timed: list[_Timed] = []
        caches: list[Cache] = []  # one for both modes: each call writes what is there already
        for mode in modes:
            where = f"{candidate.name} at {inputs.shape}, {mode},"
            try:
                caches = caches or write_caches(backend, self._spec, inputs, num_layers, self._device)
                lane = Lane(backend, self._spec, inputs, caches, self._window, is_graph=mode == "graph")
                error = lane.check()
            except Exception as problem:  # a plugin's own code, or a device that refuses it
                self.failures.append(f"{where} failed: {type(problem).__name__}: {' '.join(str(problem).split())}")
                continue
            limit = TOLERANCE[self._spec.dtype]
            if error <= limit:
                timed.append(_Timed(candidate.name, backend.description, mode, lane, error))
            else:
                self.failures.append(
                    f"{where} is wrong: an error of {error:.2g} of the largest value, allowed {limit:g}"
                )
        return timed

    def _run_rounds(self, lanes: list[Lane]) -> None:
        """In turn, each round from another lane on, until the time is over; what is slow gets fewer calls a round."""
        deadline = time.perf_counter() + self._seconds
        for lane in lanes:
            lane.fit(self._seconds / LEAST_ROUNDS / (len(lanes) + 1))
        for number in range(MOST_ROUNDS):
            first = number % len(lanes)
            for lane in (*lanes[first:], *lanes[:first]):
                lane.run()
            self._read_speed.measure()
            if number + 1 >= LEAST_ROUNDS and time.perf_counter() > deadline:
                return

    def _row(self, shape: AttentionShape, one: _Timed, bytes_per_second: float, num_layers: int) -> dict[str, object]:
        timing, spec = one.lane.timing(), self._spec
        num_bytes = self._bytes_read(shape)
        floor_us = 1e6 * num_bytes / bytes_per_second
        num_flops = 2 * shape.num_pairs(self._window) * spec.num_heads * (spec.head_dim + spec.v_head_dim)
        return {
            "shape": str(shape),
            "backend": one.name,
            "description": one.description,
            "mode": one.mode,
            **timing._asdict(),
            "read_gb_per_s": round(bytes_per_second / 1e9, 1),
            "floor_us": round(floor_us, 1),
            "times_floor": round(timing.median_us / floor_us, 2) if shape.query_len == 1 else None,
            "gflop_per_s": round(num_flops / timing.median_us / 1e3, 1),
            "error": float(f"{one.error:.2g}"),
            "num_layers": num_layers,
            "may_be_cached": 2 * num_layers * num_bytes < CACHES_IN_LAYERS * last_level_cache(self._device),
        }

    def _bytes_read(self, shape: AttentionShape) -> int:
        """K and V of a layer, each row once."""
        return shape.num_read(self._window) * self._bytes_a_token()

    def _bytes_a_token(self) -> int:
        spec = self._spec
        itemsize: int = getattr(torch, spec.dtype).itemsize
        return spec.num_kv_heads * (spec.head_dim + spec.v_head_dim) * itemsize

    def _num_layers(self, inputs: AttentionInputs) -> int:
        """Enough that a layer's K/V has left the processor's cache when its turn comes, if the memory allows it."""
        layer_of_all = inputs.num_blocks * self._spec.block_size * self._bytes_a_token() * len(self._candidates)
        if (needed := LEAST_LAYERS * layer_of_all) > self._memory:
            raise CapacityError(
                f"{inputs.shape}: {LEAST_LAYERS} layers of K/V for each of {len(self._candidates)} backends take "
                f"{needed / 2**20:.0f} MiB, and {self._memory / 2**20:.0f} MiB are allowed; choose a smaller shape or "
                "fewer backends, or raise kv_cache.memory"
            )
        wanted = -(-CACHES_IN_LAYERS * last_level_cache(self._device) // self._bytes_read(inputs.shape))
        return min(max(wanted, LEAST_LAYERS), self._memory // layer_of_all, MOST_LAYERS)


def _beside_baseline(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """With how many times as fast as torch_native each is; None where that was not measured."""
    medians = [(row["backend"], cast("float", row["median_us"])) for row in rows]
    base = next((median for name, median in medians if name == BASELINE), None)
    column = f"vs_{BASELINE}"
    ratios = [None if base is None else round(base / median, 2) for _, median in medians]
    return [{**row, column: ratio} for row, ratio in zip(rows, ratios, strict=True)]


def _memory(config: EngineConfig, device: torch.device) -> int:
    """Bytes that the caches of all backends may take together."""
    if config.kv_cache.memory is not None:
        return parse_bytes(config.kv_cache.memory)
    return torch.cuda.mem_get_info(device)[0] // _GPU_SHARE if device.type == "cuda" else _CPU_MEMORY


def _facts(context: AttentionBackendContext) -> dict[str, object]:
    spec, device = context.spec, context.device
    return {
        "benchmark": "attention",
        "num_heads": spec.num_heads,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "dtype": spec.dtype,
        "block_size": spec.block_size,
        "sliding_window": next(iter(spec.sliding_windows), None),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "cache_mib": last_level_cache(device) // 2**20,
        "threads": context.num_threads,
        "tokenyard": tokenyard.__version__,
        "torch": torch.__version__,
    }
