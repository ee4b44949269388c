"""Logits processors of rows that have one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenyard.errors import TokenyardError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from tokenyard.interfaces.logits_processor import RowLogitsProcessor
    from tokenyard.worker.input_batch import SampledRequest
    from tokenyard.worker.sampling.history import History


@dataclass(frozen=True, slots=True)
class _RowProcessor:
    row: int
    num_prompt_tokens: int
    processor: RowLogitsProcessor


@dataclass(frozen=True, slots=True)
class RowProcessors:
    """Called one row after the other: each is somebody's own code."""

    rows: tuple[_RowProcessor, ...]

    @classmethod
    def of(cls, requests: Sequence[SampledRequest]) -> RowProcessors | None:
        """None when no row has one."""
        rows = [
            _RowProcessor(row, request.num_prompt_tokens, request.processor)
            for row, request in enumerate(requests)
            if request.processor is not None
        ]
        return cls(tuple(rows)) if rows else None

    def apply(self, logits: torch.Tensor, history: History) -> dict[int, str]:
        """Change logits [N, V] in place; row -> why its processor failed."""
        errors = {}
        for one in self.rows:
            try:
                one.processor(logits[one.row], history(one.row)[one.num_prompt_tokens :])
            except TokenyardError as error:
                errors[one.row] = str(error)
            except Exception as error:  # somebody else's code: whatever it does ends its own request
                errors[one.row] = f"its logits processor failed: {type(error).__name__}: {error}"
        return errors
