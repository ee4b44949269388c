"""StepTensors: one step's inputs on the device, and what attention is told of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tokenyard.interfaces.attention import AttentionBatch

if TYPE_CHECKING:
    import torch

    from tokenyard.worker.input_batch import StepInputs
    from tokenyard.worker.stream import DeviceStream


class StepTensors(NamedTuple):
    """T tokens of R rows; see StepInputs."""

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    query_start: torch.Tensor  # [R + 1] int32
    seq_lens: torch.Tensor  # [R] int32
    slot_mappings: Sequence[torch.Tensor]  # per KV group [T] int64
    block_tables: Sequence[torch.Tensor]  # per KV group [R, blocks] int32

    def batches(self, inputs: StepInputs, max_seq_len: int | None = None) -> list[AttentionBatch]:
        """One a KV group; `inputs` are the same on the host. `max_seq_len` None = this step's own."""
        query_lens, context_lens = np.diff(inputs.query_start).tolist(), inputs.seq_lens.tolist()
        max_query_len, longest = max(query_lens), max(context_lens)
        return [
            AttentionBatch(
                query_start_loc=self.query_start,
                seq_lens=self.seq_lens,
                block_table=table,
                slot_mapping=mapping,
                query_lens=query_lens,
                context_lens=context_lens,
                max_query_len=max_query_len,
                max_seq_len=longest if max_seq_len is None else max_seq_len,
                host_block_table=host_table,
            )
            for table, mapping, host_table in zip(
                self.block_tables, self.slot_mappings, inputs.block_tables, strict=True
            )
        ]


def row_arrays(inputs: StepInputs) -> list[np.ndarray]:
    """All but the block tables, in the order of StepTensors."""
    return [inputs.token_ids, inputs.positions, inputs.query_start, inputs.seq_lens, *inputs.slot_mappings]


def step_tensors(rows: Sequence[torch.Tensor], block_tables: Sequence[torch.Tensor]) -> StepTensors:
    """From what `row_arrays` names, and the block tables."""
    token_ids, positions, query_start, seq_lens, *slot_mappings = rows
    return StepTensors(token_ids, positions, query_start, seq_lens, slot_mappings, block_tables)


def upload_step(stream: DeviceStream, inputs: StepInputs, wanted_rows: np.ndarray) -> tuple[StepTensors, torch.Tensor]:
    """A step's inputs, and the tokens [W] int64 whose states are wanted, in one copy."""
    arrays = row_arrays(inputs)
    tensors = stream.upload([*arrays, *inputs.block_tables, wanted_rows])
    return step_tensors(tensors[: len(arrays)], tensors[len(arrays) : -1]), tensors[-1]
