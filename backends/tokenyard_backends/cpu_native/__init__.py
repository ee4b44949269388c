"""Paged attention on a CPU in C++, compiled at first use."""
