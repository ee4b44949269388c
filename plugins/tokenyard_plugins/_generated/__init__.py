"""Arrival times and lengths that workloads draw."""
