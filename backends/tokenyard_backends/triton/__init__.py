"""Paged attention in Triton kernels of our own: NVIDIA GPUs, and Triton's interpreter for tests."""
