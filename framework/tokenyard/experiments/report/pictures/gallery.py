"""All pictures that the runs of a report allow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenyard.experiments.report.pictures.cdf import tpot_cdf, ttft_cdf
from tokenyard.experiments.report.pictures.clients import client_service
from tokenyard.experiments.report.pictures.differences import differences
from tokenyard.experiments.report.pictures.gantt import gantt
from tokenyard.experiments.report.pictures.load import goodput_against_load, latency_against_load
from tokenyard.experiments.report.pictures.pareto import tpot_goodput, ttft_throughput
from tokenyard.experiments.report.pictures.style import save, styled
from tokenyard.experiments.report.pictures.timeline import kv_usage, waiting

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tokenyard.experiments.report.comparison import Comparison
    from tokenyard.experiments.report.layout import Layout
    from tokenyard.experiments.report.pictures.style import Picture

_OF_LAYOUT = (
    ttft_cdf,
    tpot_cdf,
    latency_against_load,
    goodput_against_load,
    ttft_throughput,
    tpot_goodput,
    client_service,
    kv_usage,
    waiting,
    gantt,
)


def write_pictures(layout: Layout, comparisons: Sequence[Comparison], folder: Path) -> list[Picture]:
    """Made and written one after the other, as PNG and SVG."""
    with styled():
        pictures = [picture for picture in _pictures(layout, comparisons) if picture is not None]
        for picture in pictures:
            save(picture, folder)
    return pictures


def _pictures(layout: Layout, comparisons: Sequence[Comparison]) -> Iterator[Picture | None]:
    yield differences(layout, comparisons)
    for make in _OF_LAYOUT:
        yield make(layout)
