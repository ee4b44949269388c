"""Steps from a batch's logits to its tokens; `tokenyard.worker.sampler` puts them together.

Shapes in this package: N = rows of a batch, S = rows that sample, V = vocabulary, M = pairs of a row and a token.
"""
