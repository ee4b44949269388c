"""Executors: how steps reach workers."""
