"""TrueLengths: what a workload told of output lengths, kept where no policy can reach it."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from tokenyard.request import check_true_output_tokens
from tokenyard.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tokenyard.interfaces.policy import RequestView
    from tokenyard.request import EngineCoreRequest
    from tokenyard.scheduler.request_state import Request

logger = logging.getLogger(__name__)


class TrueLengths:
    """The truth about live requests, by id.

    A policy's RequestView is the scheduler's own record, so that must not have the truth: a scheduler takes it out of a
    request (`strip`) before it makes a record, and gives nothing but `true_output_tokens` away, to
    `SchedulerContext.make_predictor`, which passes it on to an oracle alone.
    """

    def __init__(self) -> None:
        self._told: dict[str, int] = {}
        self._has_warned = False

    def __len__(self) -> int:
        return len(self._told)

    def strip(self, request: EngineCoreRequest) -> EngineCoreRequest:
        """The request without the truth, which is kept until `forget`. Its id must be no other live request's.

        Raises ValidationError, having kept nothing, for what is no number of tokens.
        """
        told = check_true_output_tokens(request.true_output_tokens)
        if told is None:
            return request
        self._told[request.request_id] = told
        return replace(request, true_output_tokens=None)

    def forget(self, request_id: str) -> None:
        """The request has ended, or was never queued."""
        if self._told:
            self._told.pop(request_id, None)

    def true_output_tokens(self, request: RequestView) -> int:
        """What was told of a live request, at most its limit; of one without a word the limit itself.

        That is a guess where the request may end earlier: one warning a run says so.
        """
        limit = request.max_output_tokens
        told = self._told.get(request.request_id)
        if told is not None:
            return min(told, limit)
        if not self._has_warned and _may_end_before_its_limit(request):
            self._has_warned = True
            logger.warning(
                "the oracle was not told the output length of request '%s', which may end before its limit of %d "
                "tokens: it says the limit, for this request and others like it; give requests true_output_tokens or "
                "ignore_eos",
                request.request_id,
                limit,
            )
        return limit


def _may_end_before_its_limit(request: RequestView) -> bool:
    core = cast("Request", request).core  # a scheduler hands out its own records
    return bool(core.stop_token_ids) or (isinstance(core.params, SamplingParams) and bool(core.params.stop))
