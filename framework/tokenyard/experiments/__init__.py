"""Workloads on engines, simulated and live: what came of them, and how policies compare."""
