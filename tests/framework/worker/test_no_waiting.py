"""What never reads anything back from the device: such a read stops a host that runs ahead, and a graph's recording.

A tensor on torch's `meta` device has no contents, so that to read them is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from late_device import CPU
from tokenyard.interfaces import AttentionLayer
from tokenyard.model.causal_lm import PagedAttention
from tokenyard.model.files import resolve_model
from tokenyard.model.loader import load_model
from tokenyard.sampling_params import SamplingParams
from tokenyard.worker.input_batch import SampledRequest
from tokenyard.worker.last_tokens import LastTokens
from tokenyard.worker.sampler import Sampler, SamplingBatch
from tokenyard_backends.torch_native.backend import TorchNativeBackend

META = torch.device("meta")
V = 3000


class WritesNothing(TorchNativeBackend):
    def __init__(self) -> None:
        pass

    def forward(self, layer: AttentionLayer, *arguments: object, **keywords: object) -> None:
        pass


def test_the_fast_decoders_forward_pass_reads_nothing_back(tiny_llama_dir: Path) -> None:
    model = load_model(resolve_model(str(tiny_llama_dir)), dtype=torch.bfloat16, device=META)
    assert model.can_record
    cache = torch.empty(0, device=META)
    attention = PagedAttention(WritesNothing(), model.shape.layers, [(cache, cache)] * len(model.shape.layers))
    attention.begin_step([None])
    tokens = torch.zeros(5, dtype=torch.int64, device=META)
    filled = LastTokens(4, META).fill(tokens)
    states = model.states(filled, tokens, tokens[:2], attention)
    assert states.device == META
    assert model.logits(states).shape == (2, model.shape.vocab_size)


def batch_of(params: Sequence[SamplingParams], device: torch.device) -> SamplingBatch:
    requests = [SampledRequest(f"r{row}", one, 3, (5,)) for row, one in enumerate(params)]
    return SamplingBatch.of(requests, V, device, 0)


NO_WAIT = {
    "greedy": [SamplingParams(temperature=0)] * 3,
    "drawn": [SamplingParams(temperature=0.7, seed=1)] * 3,
    "some of each": [SamplingParams(temperature=0), SamplingParams(temperature=1, min_p=0.1), SamplingParams()],
    "top_k": [SamplingParams(top_k=20), SamplingParams(top_k=500), SamplingParams()],
    "masks": [
        SamplingParams(temperature=0, allowed_token_ids=[1, 2]),
        SamplingParams(logit_bias={3: 1.0}),
        SamplingParams(min_tokens=9),
    ],
}


@pytest.mark.parametrize("params", NO_WAIT.values(), ids=NO_WAIT)
def test_tokens_are_chosen_without_reading_anything_back(params: list[SamplingParams]) -> None:
    logits, positions = torch.empty((3, V), device=META), np.full(3, 4, dtype=np.int32)
    chosen = Sampler(META).choose(logits, batch_of(params, META), positions, lambda row: np.empty(0, np.int32))
    assert [tuple(result.shape) for result in chosen.results] == [(3,)] * (3 if params is NO_WAIT["masks"] else 2)
    assert chosen.token_ids.dtype == torch.int64


@pytest.mark.parametrize("params", [SamplingParams(top_p=0.9), SamplingParams(top_k=600)], ids=["top_p", "large top_k"])
def test_where_few_ranked_tokens_may_not_be_enough_the_host_waits(params: SamplingParams) -> None:
    """Told in docs/explanation/cuda.md: when this fails, something got better."""
    logits, positions = torch.empty((1, V), device=META), np.full(1, 4, dtype=np.int32)
    with pytest.raises(RuntimeError):
        Sampler(META).choose(logits, batch_of([params], META), positions, lambda row: np.empty(0, np.int32))


def test_rows_whose_limits_are_settled_at_first_get_what_all_tokens_in_order_would_give_them() -> None:
    torch.manual_seed(0)
    logits, positions = torch.randn(3, V) * 3, np.full(3, 4, dtype=np.int32)
    params = [SamplingParams(top_k=20, seed=1), SamplingParams(top_k=500, seed=2), SamplingParams(seed=3)]
    ranked = [SamplingParams(top_k=20, top_p=1 - 1e-15, seed=1), *params[1:]]
    assert ranked[0].top_p < 1
    found, expected = (
        Sampler(CPU).choose(logits.clone(), batch_of(rows, CPU), positions, lambda row: np.empty(0, np.int32)).token_ids
        for rows in (params, ranked)
    )
    assert found.tolist() == expected.tolist()
