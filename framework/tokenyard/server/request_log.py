"""Lines about each request, without its text (`server.log_requests`)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from tokenyard.server.stats_log import LogLine

if TYPE_CHECKING:
    from collections.abc import Callable

    from tokenyard.server.watched import EndedRequest, WatchedRequest


class RequestLog:
    """An EndListener that makes a line of what it is told; `write` must not wait."""

    def __init__(self, write: Callable[[LogLine], None]) -> None:
        self._write = write

    def arrived(self, watched: WatchedRequest) -> None:
        params, timeline = watched.request.params, watched.timeline
        self._write(
            LogLine(
                logging.INFO,
                f"request {_name(watched)}: {timeline.num_prompt_tokens} prompt tokens, n={params.n}, "
                f"max_tokens={params.max_tokens}, temperature={params.temperature:g}",
            )
        )

    def ended(self, ended: EndedRequest) -> None:
        watched, first = ended.watched, ended.watched.first_token_at
        first_token = "no token" if first is None else f"first token after {first - watched.arrived_at:.3f} s"
        self._write(
            LogLine(
                logging.INFO,
                f"request {_name(watched)}: ended ({', '.join(ended.finish_reasons)}) after {ended.seconds:.3f} s, "
                f"{first_token}, {sum(ended.num_tokens)} tokens, {watched.request.num_cached_tokens} of "
                f"{watched.timeline.num_prompt_tokens} prompt tokens cached",
            )
        )


def _name(watched: WatchedRequest) -> str:
    """The server's id, the prompt's number where there are several, and the client's label."""
    timeline = watched.timeline
    number = f"[{timeline.number}]" if timeline.number else ""
    label = f" ({timeline.client_label})" if timeline.client_label else ""
    return f"{timeline.request_id}{number}{label}"
