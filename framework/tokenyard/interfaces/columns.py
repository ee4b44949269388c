"""RequestColumns: what a RequestView says, of many requests at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tokenyard.arrays import BoolArray, FloatArray, IntArray, LongArray


class RequestColumns(Protocol):
    """Properties of RequestView as arrays, each gathered when it is first read; read-only (since API 1.7).

    For keys of many requests in each step: a loop over their views costs about a microsecond a request, a column of
    1,024 requests costs a few. R = requests.
    """

    @property
    def arrival_time(self) -> FloatArray: ...  # [R]
    @property
    def priority(self) -> LongArray: ...  # [R]
    @property
    def num_prompt_tokens(self) -> LongArray: ...  # [R]
    @property
    def num_output_tokens(self) -> LongArray: ...  # [R]
    @property
    def num_computed_tokens(self) -> IntArray: ...  # [R]
    @property
    def attained_service(self) -> LongArray: ...  # [R]
    @property
    def is_paused(self) -> BoolArray: ...  # [R]
