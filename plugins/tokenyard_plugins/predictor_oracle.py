"""`scheduler.predictor=oracle`: the true output lengths, where a workload tells them; a bound for research."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from tokenyard import ComponentDescriptor, hookimpl
from tokenyard.errors import PluginError
from tokenyard.interfaces import OutputLengthPredictor, possible_output_len

if TYPE_CHECKING:
    from tokenyard.config import NoOptions
    from tokenyard.interfaces import PredictorContext, RequestView


class OraclePredictor(OutputLengthPredictor):
    """What `EngineCoreRequest.true_output_tokens` says; of a request without it, its limit."""

    def __init__(self, truth: Callable[[RequestView], int]) -> None:
        self._truth = truth

    def output_len(self, request: RequestView) -> float:
        return possible_output_len(request, self._truth(request))


def _make(options: NoOptions, context: PredictorContext) -> OutputLengthPredictor:
    if context.true_output_tokens is None:
        raise PluginError(
            "predictor 'oracle' was not given the true lengths: PredictorContext.true_output_tokens is None"
        )
    return OraclePredictor(context.true_output_tokens)


@hookimpl
def tokenyard_components() -> Iterator[ComponentDescriptor[NoOptions]]:
    yield ComponentDescriptor(
        component_kind="predictor",
        name="oracle",
        api_version=(1, 7),
        summary="output lengths: the truth, where a workload tells it",
        factory=_make,
    )
