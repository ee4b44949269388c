"""`scheduler.predictor=max_tokens`: every output is as long as its request allows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tokenyard import ComponentDescriptor, hookimpl
from tokenyard.interfaces import OutputLengthPredictor

if TYPE_CHECKING:
    from tokenyard.config import NoOptions
    from tokenyard.interfaces import PredictorContext, RequestView


class MaxTokensPredictor(OutputLengthPredictor):
    """An upper bound, and the truth where nothing but the limit ends a request (`ignore_eos`)."""

    def output_len(self, request: RequestView) -> float:
        return request.max_output_tokens


def _make(options: NoOptions, context: PredictorContext) -> OutputLengthPredictor:
    return MaxTokensPredictor()


@hookimpl
def tokenyard_components() -> Iterator[ComponentDescriptor[NoOptions]]:
    yield ComponentDescriptor(
        component_kind="predictor",
        name="max_tokens",
        api_version=(1, 7),
        summary="output lengths: the request's own limit",
        factory=_make,
    )
