"""A decoding step that is recorded once and replayed with new contents, as a model runner does with a CUDA graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from tokenyard.testing.attention import make_batch
from tokenyard.testing.contracts.attention_rig import Found, inputs_of, metadata_of, unchanged
from tokenyard.testing.contracts.base import no_errors

if TYPE_CHECKING:
    from tokenyard.testing.attention import AttentionCase
    from tokenyard.testing.contracts.attention_rig import AttentionRig


class RecordedStep:
    """All layers of a rig with `num_rows` sequences of one query row each, over tables of `width` blocks.

    On a CUDA device the calls are recorded in a graph. On others a replay calls them again with the same plan and the
    same tensors, which have new contents.
    """

    def __init__(self, rig: AttentionRig, example: AttentionCase, num_rows: int, width: int) -> None:
        self._rig = rig
        padding = make_batch(
            [(1, 1)] * num_rows, [[0]] * num_rows, rig.spec.block_size, device=rig.device, tail=(0,), width=width
        )
        self._case = dataclasses.replace(
            example,
            batch=dataclasses.replace(padding, max_seq_len=width * rig.spec.block_size),
            query=example.query.new_zeros(num_rows, *example.query.shape[1:]),
            key=example.key.new_zeros(num_rows, *example.key.shape[1:]),
            value=example.value.new_zeros(num_rows, *example.value.shape[1:]),
        )
        out_shape = (num_rows, rig.spec.num_heads, rig.spec.v_head_dim)
        self._outs = [example.value.new_zeros(out_shape) for _ in rig.layers]
        given = metadata_of(self._case.batch)
        with unchanged("plan_capture()", given), no_errors("attention.capture"), torch.inference_mode():
            self._plan = rig.backend.plan_capture(self._case.batch)
        with unchanged("forward()", inputs_of(self._case)):
            self._forward()
        self._replay = record(self._forward) if rig.device.type == "cuda" else self._forward

    def replay(self, case: AttentionCase) -> list[Found]:
        """What each layer wrote for the sequences of `case`; rows behind them are padding in block 0."""
        num_live, batch = case.batch.num_sequences, self._case.batch
        table = np.zeros(tuple(batch.block_table.shape), dtype=np.int32)
        table[:num_live, : case.batch.block_table.shape[1]] = case.batch.block_table.cpu().numpy()
        batch.block_table.copy_(torch.from_numpy(table))
        _overwrite(batch.seq_lens, case.batch.seq_lens, padding=1)
        _overwrite(batch.slot_mapping, case.batch.slot_mapping, padding=0)
        for target, source in ((self._case.query, case.query), (self._case.key, case.key)):
            _overwrite(target, source, padding=0)
        _overwrite(self._case.value, case.value, padding=0)
        lengths = [*case.batch.context_lens, *[1] * (batch.num_sequences - num_live)]
        step = dataclasses.replace(
            batch, context_lens=lengths, max_seq_len=case.batch.max_seq_len, host_block_table=table
        )
        given = metadata_of(step)
        with unchanged("update_capture()", given), no_errors("attention.capture"), torch.inference_mode():
            self._rig.backend.update_capture(self._plan, step)
        with unchanged("forward()", inputs_of(self._case)):
            self._replay()
        return [Found(out[:num_live].clone(), None) for out in self._outs]

    def _forward(self) -> None:
        for layer, out in enumerate(self._outs):
            self._rig.forward(self._case, layer, self._plan, out)


def record(call: Callable[[], None]) -> Callable[[], None]:
    """A CUDA graph of `call`, ready to be replayed."""
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        call()
    return graph.replay


def _overwrite(target: torch.Tensor, rows: torch.Tensor, *, padding: int) -> None:
    target.fill_(padding)
    target[: len(rows)] = rows
