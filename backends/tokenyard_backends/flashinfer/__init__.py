"""Paged attention by the kernels of FlashInfer, on NVIDIA GPUs."""
