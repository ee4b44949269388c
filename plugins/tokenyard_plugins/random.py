"""`scheduler=random`: in an order drawn at arrival; a bound for research."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tokenyard import PolicyDescriptor, hookimpl
from tokenyard.interfaces import SchedulingPolicy

if TYPE_CHECKING:
    from tokenyard.config import NoOptions
    from tokenyard.interfaces import PolicyContext, RequestView, SchedulerView
    from tokenyard.request import FinishReason


class RandomPolicy(SchedulingPolicy):
    """Random order of service: each request draws its place when it arrives, from the run's seed.

    It knows nothing, and does what no order of arrival explains: a policy that is not better than this one uses its
    inputs in vain. An unlucky request may be passed by for as long as others come. A preempted one keeps its place.
    """

    may_starve = True

    def __init__(self, options: NoOptions, context: PolicyContext) -> None:
        self._places: dict[str, float] = {}  # of live requests

    def waiting_key(self, request: RequestView, view: SchedulerView) -> float:
        place = self._places[request.request_id] = view.rng.random()
        return place

    def requeue_key(self, request: RequestView, view: SchedulerView) -> float:
        return self._places[request.request_id]

    def on_finish(self, requests: Sequence[RequestView], reasons: Sequence[FinishReason], view: SchedulerView) -> None:
        for request in requests:
            self._places.pop(request.request_id, None)


@hookimpl
def tokenyard_policies() -> Iterator[PolicyDescriptor[NoOptions]]:
    yield PolicyDescriptor(
        name="random",
        api_version=(1, 7),
        summary="in random order, drawn at arrival: a bound to compare with",
        factory=RandomPolicy,
    )
