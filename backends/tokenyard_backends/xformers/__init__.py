"""Paged attention by the operators of xformers 0.0.35, on NVIDIA GPUs."""
