"""LatencyModel: how long a step takes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from tokenyard.config import EngineConfig

COMPONENT_KIND = "latency"
"""`ComponentDescriptor.component_kind` of latency models, chosen by `latency=NAME`."""


class StepLoad(NamedTuple):
    """What a step computes. A row is a decode when it computes the one token that was sampled last."""

    num_decodes: int = 0
    num_decode_context_tokens: int = 0  # K/V tokens that the decodes read, their own not counted
    num_prefills: int = 0
    num_prefill_tokens: int = 0
    num_prefill_context_tokens: int = 0  # K/V tokens before the chunks that they compute

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return self.num_decodes + self.num_prefill_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyModelContext:
    """What a latency model's factory is given."""

    max_num_batched_tokens: int
    config: EngineConfig | None = None  # all of it; None where somebody asks without an engine (since API 1.7)


class LatencyModel(ABC):
    """A pure function of the load (since API 1.6). It serves policies as a predictor, and simulation as the clock."""

    @abstractmethod
    def step_seconds(self, load: StepLoad) -> float:
        """Seconds that a step takes; above 0, and never less for more prefill tokens."""

    @property
    def calibration(self) -> str:
        """A line for people: what the numbers were measured on, and how far off they are (since API 1.7)."""
        return ""


class StepLatency(Protocol):
    """A latency model as a policy asks it."""

    def predict(self, load: StepLoad) -> float:
        """Seconds that a step of this load would take."""

    def budget_for(self, seconds: float) -> int:
        """The most tokens, decodes included, of a step that takes at most so long.

        The decodes are those that run now; beyond them the tokens are prefill. At least the number of decodes, however
        short the time: they are never held back; at most the configured budget.
        """
