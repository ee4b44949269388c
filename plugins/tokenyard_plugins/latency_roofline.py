"""`latency=roofline`: what a model's shape and a device's datasheet allow.

The roofline model: Williams, Waterman, Patterson, "Roofline: An Insightful Visual Performance Model for Multicore
Architectures", Communications of the ACM 52(4), 2009.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenyard import ComponentDescriptor, hookimpl
from tokenyard.errors import ConfigError
from tokenyard.interfaces import LatencyModel

if TYPE_CHECKING:
    from tokenyard.interfaces import LatencyModelContext, StepLoad

    from tokenyard_plugins._latency.devices import Device
    from tokenyard_plugins._latency.shapes import ModelShape

_ALL_REDUCE_SECONDS = 10e-6  # to start one, besides what its bytes take


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineOptions:
    """Options of `latency=roofline`."""

    device: str  # a100, h100, h200, l4, rtx4090 or cpu
    model: str  # a known one such as llama-3.1-8b, or a config.json, or its folder
    tensor_parallel: int = 1  # devices that share each matrix and the attention heads
    compute_efficiency: float = 0.75  # share of the device's peak that matrix multiplications reach
    memory_efficiency: float = 0.85  # share of its memory's bandwidth
    overhead: float = 0.0005  # seconds that a step takes besides: launching kernels, sampling

    def __post_init__(self) -> None:
        for name, value in (
            ("compute_efficiency", self.compute_efficiency),
            ("memory_efficiency", self.memory_efficiency),
        ):
            if not 0 < value <= 1:  # also refuses NaN
                raise ConfigError(f"latency.{name}={value} is not valid: it must be above 0 and at most 1")
        if not 0 <= self.overhead < math.inf:
            raise ConfigError(
                f"latency.overhead={self.overhead} is not valid: it must be a number of seconds, at least 0"
            )
        if not 1 <= self.tensor_parallel <= 1024:
            raise ConfigError(f"latency.tensor_parallel={self.tensor_parallel} is not valid: it must be 1 to 1024")


class RooflineLatency(LatencyModel):
    """Every matrix multiplication, and the attention of prefills and of decodes, takes as long as its arithmetic or its
    memory traffic, whichever is longer; one follows the other. Weights are read once a step.
    """

    def __init__(self, shape: ModelShape, device: Device, options: RooflineOptions) -> None:
        ranks = options.tensor_parallel
        self._shape = shape
        self._options = options
        self._seconds_per_flop = 1 / (device.flops * options.compute_efficiency * ranks)
        self._seconds_per_byte = 1 / (device.bytes_per_second * options.memory_efficiency * ranks)
        self._matrices = tuple((wide * high, wide + high) for wide, high in shape.matrices())
        self._output = (shape.hidden_size * shape.vocab_size, shape.hidden_size + shape.vocab_size)
        self._flops_per_pair = 4 * shape.num_attention_heads * shape.head_dim
        self._bytes_per_key = 2 * shape.num_key_value_heads * shape.head_dim * shape.bytes_per_value
        self._all_reduce = _all_reduce(shape, device, options)

    def step_seconds(self, load: StepLoad) -> float:
        num_tokens = load.num_tokens
        layer = self._decodes(load) + self._prefills(load)
        for weights, values in self._matrices:
            layer += self._multiply(num_tokens, weights, values)
        if self._all_reduce is not None:
            seconds, per_token = self._all_reduce
            layer += 2 * (seconds + per_token * num_tokens)
        output = self._multiply(load.num_decodes + load.num_prefills, *self._output)
        return self._options.overhead + self._shape.num_hidden_layers * layer + output

    @property
    def calibration(self) -> str:
        options = self._options
        return (
            f"datasheet of {options.device}, shape of {options.model}, at {options.compute_efficiency:g} of its "
            f"arithmetic and {options.memory_efficiency:g} of its bandwidth; error: known of one run alone, of vLLM "
            "0.19.0 with llama-3.1-8b on an rtx4090: mean TPOT +0.5 %, E2E +2.8 %, TTFT +3.5 % with the defaults"
        )

    def _multiply(self, rows: int, weights: int, values: int) -> float:
        traffic = (weights + rows * values) * self._shape.bytes_per_value
        return max(2 * rows * weights * self._seconds_per_flop, traffic * self._seconds_per_byte)

    def _decodes(self, load: StepLoad) -> float:
        keys = load.num_decode_context_tokens + load.num_decodes
        return self._attend(keys, keys)

    def _prefills(self, load: StepLoad) -> float:
        """All prefills are taken to be as long as their mean, and to see as much before them."""
        if not load.num_prefills:
            return 0.0
        tokens, context = load.num_prefill_tokens, load.num_prefill_context_tokens
        pairs = tokens * (context + (tokens + load.num_prefills) / 2) / load.num_prefills
        return self._attend(pairs, context + tokens)

    def _attend(self, pairs: float, keys: float) -> float:
        arithmetic = pairs * self._flops_per_pair * self._seconds_per_flop
        return max(arithmetic, keys * self._bytes_per_key * self._seconds_per_byte)


def _all_reduce(shape: ModelShape, device: Device, options: RooflineOptions) -> tuple[float, float] | None:
    """Seconds of one, and of each token in it: in a ring each device sends its share twice, but for its own."""
    ranks, link = options.tensor_parallel, device.link_bytes_per_second
    if ranks == 1:
        return None
    if link is None:
        raise ConfigError(f"latency.tensor_parallel={ranks}: latency.device={options.device} has no others; give 1")
    size = shape.hidden_size * shape.bytes_per_value
    return _ALL_REDUCE_SECONDS, 2 * (ranks - 1) / ranks * size / (link * options.memory_efficiency)


def _make(options: RooflineOptions, context: LatencyModelContext) -> LatencyModel:
    from tokenyard_plugins._latency.devices import DEVICES  # here: nobody else needs them
    from tokenyard_plugins._latency.shapes import find_shape

    if options.device not in DEVICES:
        raise ConfigError(f"latency.device={options.device!r}: no such device; known are {', '.join(DEVICES)}")
    return RooflineLatency(find_shape("latency.model", options.model), DEVICES[options.device], options)


@hookimpl
def tokenyard_components() -> Iterator[ComponentDescriptor[RooflineOptions]]:
    yield ComponentDescriptor(
        component_kind="latency",
        name="roofline",
        api_version=(1, 7),
        summary="seconds of a step: what a model's shape and a device's datasheet allow",
        options_type=RooflineOptions,
        factory=_make,
    )
