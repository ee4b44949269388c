"""`scheduler.predictor=prompt`: output lengths in proportion to the prompt's, as far as requests show that they are."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenyard import ComponentDescriptor, hookimpl
from tokenyard.interfaces import OutputLengthPredictor, possible_output_len

if TYPE_CHECKING:
    from tokenyard.interfaces import PredictorContext, RequestView

MAX_TOKENS = 2.0**30


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """Options of `scheduler.predictor={name: prompt, ratio: 0.5, offset: 20}`."""

    ratio: float = 1.0  # output tokens per prompt token
    offset: float = 0.0  # output tokens besides
    learning_rate: float = 0.0  # weight of the request that ended last in a correcting factor; 0 = none

    def __post_init__(self) -> None:
        for name, value in (("ratio", self.ratio), ("offset", self.offset)):
            if not 0 <= value <= MAX_TOKENS:  # also refuses NaN
                raise ValueError(
                    f"{name}={value} is not valid: it must be a number of tokens from 0 to {MAX_TOKENS:.0f}"
                )
        if not 0 <= self.learning_rate <= 1:
            raise ValueError(
                f"learning_rate={self.learning_rate} is not valid: it must be from 0 to 1, 0 = learn nothing"
            )


class PromptPredictor(OutputLengthPredictor):
    """`ratio` times the prompt plus `offset`, times what it was wrong by so far: a moving geometric mean."""

    def __init__(self, options: PromptOptions) -> None:
        self._options = options
        self._log_factor = 0.0

    def output_len(self, request: RequestView) -> float:
        return possible_output_len(request, self._uncorrected(request) * math.exp(self._log_factor))

    def on_finish(self, request: RequestView) -> None:
        error = math.log(max(1, request.num_output_tokens) / self._uncorrected(request))
        self._log_factor += self._options.learning_rate * (error - self._log_factor)

    def _uncorrected(self, request: RequestView) -> float:
        return max(1.0, self._options.ratio * request.num_prompt_tokens + self._options.offset)


def _make(options: PromptOptions, context: PredictorContext) -> OutputLengthPredictor:
    return PromptPredictor(options)


@hookimpl
def tokenyard_components() -> Iterator[ComponentDescriptor[PromptOptions]]:
    yield ComponentDescriptor(
        component_kind="predictor",
        name="prompt",
        api_version=(1, 7),
        summary="output lengths: in proportion to the prompt, corrected by those that ended if asked to",
        options_type=PromptOptions,
        factory=_make,
    )
