"""Numbers of each scaled rope type, for a model of 128 positions."""

from __future__ import annotations

LLAMA3: dict[str, object] = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SCALINGS: dict[str, dict[str, object]] = {
    "linear": {"factor": 2.0},
    "llama3": LLAMA3,
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "dynamic": {"factor": 2.0},
}
