"""Traces of real traffic: formats, windows, packaged data; what `workload=trace` is made of."""

from __future__ import annotations

from tokenyard.experiments.traces.formats import FORMATS
from tokenyard.experiments.traces.reader import ReadOptions
from tokenyard.experiments.traces.sources import FETCHABLE, PACKAGED, Source
from tokenyard.experiments.traces.workload import TraceWorkload, open_trace

__all__ = ["FETCHABLE", "FORMATS", "PACKAGED", "ReadOptions", "Source", "TraceWorkload", "open_trace"]
