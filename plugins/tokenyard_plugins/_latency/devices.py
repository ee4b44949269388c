"""Datasheets of devices: what they can do at most, without sparsity."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Peaks of one device, as its maker states them."""

    flops: float  # a second, dense, 16-bit inputs (of a CPU: 32-bit)
    bytes_per_second: float  # of its memory
    link_bytes_per_second: float | None  # to another one of its kind, in one direction; None = they come alone


_TERA, _GIGA = 1e12, 1e9

DEVICES = {
    # NVIDIA A100 80GB SXM: 312 TFLOPS, 2,039 GB/s, NVLink 600 GB/s both ways
    "a100": Device(flops=312 * _TERA, bytes_per_second=2039 * _GIGA, link_bytes_per_second=300 * _GIGA),
    # NVIDIA H100 SXM: 989.4 TFLOPS, 3.35 TB/s, NVLink 900 GB/s both ways
    "h100": Device(flops=989.4 * _TERA, bytes_per_second=3350 * _GIGA, link_bytes_per_second=450 * _GIGA),
    # NVIDIA H200 SXM: an H100 with 4.8 TB/s
    "h200": Device(flops=989.4 * _TERA, bytes_per_second=4800 * _GIGA, link_bytes_per_second=450 * _GIGA),
    # NVIDIA L4: 121 TFLOPS, 300 GB/s, PCIe 4.0 x16
    "l4": Device(flops=121 * _TERA, bytes_per_second=300 * _GIGA, link_bytes_per_second=32 * _GIGA),
    # NVIDIA GeForce RTX 4090: 165.2 TFLOPS with sums of 32 bits, 1,008 GB/s, PCIe 4.0 x16
    "rtx4090": Device(flops=165.2 * _TERA, bytes_per_second=1008 * _GIGA, link_bytes_per_second=32 * _GIGA),
    # 8 cores with two 8-lane multiply-adds a cycle at 3 GHz; two channels of DDR5-4800
    "cpu": Device(flops=0.768 * _TERA, bytes_per_second=76.8 * _GIGA, link_bytes_per_second=None),
}
