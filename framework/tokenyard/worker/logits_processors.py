"""LogitsProcessors: the configured logits processors, as one callable for each request that one of them wants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokenyard.descriptors import ComponentDescriptor
from tokenyard.errors import LogitsProcessorError, PluginError, TokenyardError
from tokenyard.interfaces.logits_processor import (
    COMPONENT_KIND,
    LogitsProcessor,
    LogitsProcessorContext,
    LogitsRequest,
    RowLogitsProcessor,
)
from tokenyard.parts import make_part
from tokenyard.platform import Platform
from tokenyard.sampling_params import SamplingParams

if TYPE_CHECKING:
    import torch

    from tokenyard.arrays import IntArray
    from tokenyard.catalogue import Catalogue
    from tokenyard.config import EngineConfig, LogitsProcessorConfig
    from tokenyard.scheduler_output import RequestStart


def load_logits_processors(
    config: EngineConfig, catalogue: Catalogue, vocab_size: int, device_type: str, seed: int
) -> LogitsProcessors:
    """Make those that the config lists, in its order. Raises PluginError for one that cannot run here."""
    context = LogitsProcessorContext(vocab_size=vocab_size, device_type=device_type, seed=seed)
    return LogitsProcessors([(row.name, _made(row, catalogue, context)) for row in config.logits_processors])


def _made(row: LogitsProcessorConfig, catalogue: Catalogue, context: LogitsProcessorContext) -> LogitsProcessor:
    entry = catalogue.get(COMPONENT_KIND, row.name)
    if reasons := entry.unavailable_reasons(Platform()):
        raise PluginError(f"{COMPONENT_KIND} '{row.name}' cannot run here: {'; '.join(reasons)}")
    descriptor = entry.descriptor
    if not isinstance(descriptor, ComponentDescriptor):
        raise PluginError(
            f"'{row.name}' is registered as {COMPONENT_KIND} but described by {type(descriptor).__name__}"
        )
    return make_part(descriptor, LogitsProcessor, lambda part: part.factory(row.options, context))


class LogitsProcessors:
    """Named processors in the order in which they run."""

    def __init__(self, processors: Sequence[tuple[str, LogitsProcessor]]) -> None:
        self._processors = tuple(processors)

    def start(self, start: RequestStart) -> RowLogitsProcessor | None:
        """What changes the logits of a request that enters the batch; None = nothing does.

        Both this and the callable raise LogitsProcessorError, naming the processor and the request.
        """
        if not self._processors or not isinstance(start.params, SamplingParams):
            return None
        prompt = start.token_ids[: start.num_prompt_tokens].view()
        prompt.flags.writeable = False
        request = LogitsRequest(request_id=start.request_id, params=start.params, prompt_token_ids=prompt)
        started = [(name, _started(name, processor, request)) for name, processor in self._processors]
        rows = [(name, row) for name, row in started if row is not None]
        return _Chain(start.request_id, rows) if rows else None


def _started(name: str, processor: LogitsProcessor, request: LogitsRequest) -> RowLogitsProcessor | None:
    try:
        row = processor.start(request)
    except (Exception, SystemExit) as error:
        raise _failed(name, request.request_id, _told(error)) from error
    if row is not None and not callable(row):
        raise _failed(name, request.request_id, f"its start() returned a {type(row).__name__}, not a callable or None")
    return row


class _Chain:
    """The processors of one request, one after the other."""

    __slots__ = ("_request_id", "_rows")

    def __init__(self, request_id: str, rows: Sequence[tuple[str, RowLogitsProcessor]]) -> None:
        self._request_id = request_id
        self._rows = tuple(rows)

    def __call__(self, logits: torch.Tensor, output_token_ids: IntArray) -> None:
        for name, row in self._rows:
            try:
                returned: object = row(logits, output_token_ids)  # type: ignore[func-returns-value]  # looked at next
            except (Exception, SystemExit) as error:
                raise _failed(name, self._request_id, _told(error)) from error
            if returned is not None:
                what = f"it returned a {type(returned).__name__}; logits are changed in place and None is returned"
                raise _failed(name, self._request_id, what)


def _told(error: BaseException) -> str:
    return str(error) if isinstance(error, TokenyardError) else f"{type(error).__name__}: {error}"


def _failed(name: str, request_id: str, what: str) -> LogitsProcessorError:
    return LogitsProcessorError(f"logits processor '{name}' failed for request '{request_id}': {what}")
