"""ShadowView: what a shadow policy sees: what the acting one sees, with a line and random numbers of its own."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tokenyard.interfaces.columns import RequestColumns
    from tokenyard.interfaces.latency import StepLatency
    from tokenyard.interfaces.policy import RequestView, SchedulerView
    from tokenyard.interfaces.predictor import OutputLengthPredictor
    from tokenyard.scheduler.shadow_line import ShadowLine


class ShadowView:
    """Satisfies `tokenyard.interfaces.SchedulerView`. What the shadow draws, nobody else misses."""

    def __init__(self, view: SchedulerView, line: ShadowLine, seed: int) -> None:
        self._view = view
        self._line = line
        self._rng = Random(f"shadow {seed}")  # noqa: S311 - reproducible choices, no secrets

    @property
    def rng(self) -> Random:
        return self._rng

    @property
    def now(self) -> float:
        return self._view.now

    @property
    def num_waiting(self) -> int:
        return self._view.num_waiting

    @property
    def num_waiting_by_client(self) -> Mapping[str | None, int]:
        return self._view.num_waiting_by_client

    @property
    def num_running(self) -> int:
        return self._view.num_running

    @property
    def num_free_blocks(self) -> int:
        return self._view.num_free_blocks

    @property
    def num_total_blocks(self) -> int:
        return self._view.num_total_blocks

    @property
    def block_size(self) -> int:
        return self._view.block_size

    @property
    def running(self) -> Sequence[RequestView]:
        return self._view.running

    @property
    def running_columns(self) -> RequestColumns:
        return self._view.running_columns

    @property
    def prefills(self) -> Sequence[RequestView]:
        return self._view.prefills

    def waiting(self, limit: int) -> Sequence[RequestView]:
        """In the order of its own keys: the same requests as in the acting policy's line."""
        return cast("list[RequestView]", self._line.first(limit, only_started=self._is_paused()))

    def _is_paused(self) -> bool:
        """Whether the acting policy is shown those alone that ran before, since nobody may start."""
        num_started = self._line.num_started
        return len(self._view.waiting(num_started + 1)) <= num_started < self._view.num_waiting

    @property
    def token_clock(self) -> int:
        return self._view.token_clock

    @property
    def predictor(self) -> OutputLengthPredictor:
        return self._view.predictor

    @property
    def latency(self) -> StepLatency:
        return self._view.latency

    def num_blocks(self, request: RequestView) -> int:
        return self._view.num_blocks(request)

    def num_exclusive_blocks(self, request: RequestView) -> int:
        return self._view.num_exclusive_blocks(request)

    def num_blocks_needed(self, request: RequestView, without: Sequence[RequestView] = ()) -> int:
        return self._view.num_blocks_needed(request, without)

    def prefix_hashes(self, request: RequestView) -> Sequence[bytes]:
        return self._view.prefix_hashes(request)

    def hit_tokens(self, request: RequestView) -> int:
        return self._view.hit_tokens(request)
