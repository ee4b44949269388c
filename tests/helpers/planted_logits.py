"""Logits processors of other authors: one that is right, and some with a fault each that the suite must find."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
from tokenyard import ComponentDescriptor
from tokenyard.config import NoOptions
from tokenyard.interfaces import LogitsProcessor, LogitsProcessorContext, LogitsRequest, RowLogitsProcessor

if TYPE_CHECKING:
    from tokenyard.arrays import IntArray


def asks(request: LogitsRequest) -> bool:
    return bool(request.params.extra_args and request.params.extra_args.get("planted"))


def forbid_last(logits: torch.Tensor, output_token_ids: IntArray) -> None:
    """No token twice in a row."""
    if len(output_token_ids):
        logits[int(output_token_ids[-1])] = -torch.inf


class ForbidsLast(LogitsProcessor):
    """Right."""

    def start(self, request: LogitsRequest) -> RowLogitsProcessor | None:
        return forbid_last if asks(request) else None


class WantsAll(LogitsProcessor):
    """Also requests that say nothing."""

    def start(self, request: LogitsRequest) -> RowLogitsProcessor | None:
        return forbid_last


class ReturnsNew(LogitsProcessor):
    """Makes new logits, which nobody sees."""

    def start(self, request: LogitsRequest) -> RowLogitsProcessor | None:
        return cast(RowLogitsProcessor, lambda logits, output_token_ids: logits + 1) if asks(request) else None


class Resizes(LogitsProcessor):
    def start(self, request: LogitsRequest) -> RowLogitsProcessor | None:
        def row(logits: torch.Tensor, output_token_ids: IntArray) -> None:
            logits.resize_(3)

        return row if asks(request) else None


class MakesNaN(LogitsProcessor):
    """`-inf` times 0."""

    def start(self, request: LogitsRequest) -> RowLogitsProcessor | None:
        def row(logits: torch.Tensor, output_token_ids: IntArray) -> None:
            logits.mul_(0.0)

        return row if asks(request) else None


class DoesNothing(LogitsProcessor):
    def start(self, request: LogitsRequest) -> RowLogitsProcessor | None:
        return (lambda logits, output_token_ids: None) if asks(request) else None


class NeverStarts(LogitsProcessor):
    def start(self, request: LogitsRequest) -> RowLogitsProcessor | None:
        return None


class CountsCalls(LogitsProcessor):
    """What it does depends on how often it was called: a preemption changes it."""

    def start(self, request: LogitsRequest) -> RowLogitsProcessor | None:
        calls: list[int] = []

        def row(logits: torch.Tensor, output_token_ids: IntArray) -> None:
            calls.append(len(output_token_ids))
            logits[len(calls) % len(logits)] = -torch.inf

        return row if asks(request) else None


class SharesState(LogitsProcessor):
    """Forbids what any request has sampled."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def start(self, request: LogitsRequest) -> RowLogitsProcessor | None:
        def row(logits: torch.Tensor, output_token_ids: IntArray) -> None:
            self._seen.update(output_token_ids.tolist())
            logits[list(self._seen)] = -torch.inf

        return row if asks(request) else None


class LooksAtTheId(LogitsProcessor):
    """The same request gets other logits under another id."""

    def start(self, request: LogitsRequest) -> RowLogitsProcessor | None:
        token_id = int(request.request_id)

        def row(logits: torch.Tensor, output_token_ids: IntArray) -> None:
            logits[token_id] = 3.0

        return row if asks(request) else None


class WritesTokens(LogitsProcessor):
    def start(self, request: LogitsRequest) -> RowLogitsProcessor | None:
        def row(logits: torch.Tensor, output_token_ids: IntArray) -> None:
            forbid_last(logits, output_token_ids)
            output_token_ids[-1:] = 0

        return row if asks(request) else None


class NeedsAToken(LogitsProcessor):
    """Fails before the first token."""

    def start(self, request: LogitsRequest) -> RowLogitsProcessor | None:
        def row(logits: torch.Tensor, output_token_ids: IntArray) -> None:
            logits[int(output_token_ids[-1])] = -torch.inf

        return row if asks(request) else None


def logits_processor(make: Callable[[], LogitsProcessor], name: str = "planted") -> ComponentDescriptor[NoOptions]:
    def factory(options: NoOptions, context: LogitsProcessorContext) -> LogitsProcessor:
        return make()

    return ComponentDescriptor(component_kind="logits_processor", name=name, api_version=(1, 3), factory=factory)
