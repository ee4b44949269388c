"""FlowControl: how much work a server takes on at a time. What is beyond it is refused before anything is done."""

from __future__ import annotations

import asyncio
import collections
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from tokenyard.errors import EngineOverloadedError, ValidationError
from tokenyard.server.request_context import note_arrival

if TYPE_CHECKING:
    from tokenyard.engine.async_client import Load
    from tokenyard.engine.input_processor import TokenizedPrompt
    from tokenyard.server.scheduling import Terms
    from tokenyard.server.service import Service

_MIN_WAIT, _MAX_WAIT = 1.0, 60.0  # seconds, of Retry-After
_WINDOW = 30.0  # seconds over which the engine's rate is measured
_SAMPLE_EVERY = 0.5  # seconds


@dataclass(slots=True, eq=False)
class Ticket:
    """The room that one HTTP request holds for what it has not handed to the engine yet.

    In one event loop; but one that is forgotten gives its room back in whatever thread collects it.
    """

    flow: FlowControl
    num_requests: int
    num_tokens: int

    def set_tokens(self, num_tokens: int) -> None:
        """How many prompt tokens there are, now that they are counted; EngineOverloadedError if that is too many."""
        self.flow.check(0, num_tokens - self.num_tokens)
        self.flow.reserve(0, num_tokens - self.num_tokens)
        self.num_tokens = num_tokens

    def release(self) -> None:
        """Give it back: the engine counts the requests now, or they will never be; a second call does nothing."""
        self.flow.reserve(-self.num_requests, -self.num_tokens)
        self.num_requests = self.num_tokens = 0

    def __enter__(self) -> Ticket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()


class Prepared(NamedTuple):
    """Prompts, and the room for them: both go into a Call."""

    prompts: Sequence[TokenizedPrompt]
    ticket: Ticket


class FlowControl:
    """Room is counted in requests (a prompt with n choices is n) and in prompt tokens whose prefill has not begun.

    In use is what the engine has, and what tickets hold for requests that are on their way to it. In one event loop:
    nothing comes between the check and the reservation, so that no more is let in than there is room for.
    """

    def __init__(self, service: Service, now: Callable[[], float] = time.monotonic) -> None:
        self._service = service
        self._now = now
        self._samples: collections.deque[tuple[float, Load]] = collections.deque()
        # Around the two numbers; reentrant, since this thread may collect a ticket while it holds it.
        self._lock = threading.RLock()
        self.reserved_requests = 0
        self.reserved_tokens = 0

    def admit(self, num_requests: int, num_tokens: int = 0) -> Ticket:
        """Room for these, `num_tokens` as far as they are known; else EngineOverloadedError, with the time to wait.

        ValidationError for so many requests that there will never be room.
        """
        self.check(num_requests, num_tokens)
        self.reserve(num_requests, num_tokens)
        return Ticket(self, num_requests, num_tokens)

    def reserve(self, num_requests: int, num_tokens: int) -> None:
        """Hold so much more, or less, for requests on their way; in any thread."""
        with self._lock:
            self.reserved_requests += num_requests
            self.reserved_tokens += num_tokens

    async def prepare(
        self,
        terms: Terms,
        num_requests: int,
        tokenize: Callable[[], Sequence[TokenizedPrompt]],
        num_tokens: int = 0,
    ) -> Prepared:
        """Admit a call of `num_requests` (prompts times n), then tokenize its prompts in a thread, and salt them.

        `num_tokens` is how many prompt tokens the body gave as such. Raises what `admit` and `tokenize` raise.
        """
        note_arrival()
        ticket = self.admit(num_requests, num_tokens)
        try:
            prompts = await asyncio.to_thread(tokenize)
            if terms.cache_salt is not None:
                prompts = [replace(prompt, cache_salt=terms.cache_salt) for prompt in prompts]
            per_prompt = num_requests // max(1, len(prompts))
            ticket.set_tokens(per_prompt * sum(len(prompt.token_ids) for prompt in prompts))
        except BaseException:
            ticket.release()
            raise
        return Prepared(prompts, ticket)

    def check(self, num_requests: int, num_tokens: int) -> None:
        """EngineOverloadedError where there is no room for so much more."""
        if self._service.is_draining:
            self._service.observation.monitor.reject("draining")
            raise EngineOverloadedError("the server is shutting down and takes no new requests")
        config, load = self._service.config.server, self._service.engine.load
        self._sample(load)
        used, most = load.num_unfinished + self.reserved_requests, config.max_num_queued_reqs
        if most is not None and num_requests > most:
            raise ValidationError(
                f"{num_requests} requests, which are prompts times n, are more than this server ever has at a time; at "
                f"most {most} (server.max_num_queued_reqs)",
                parameter="n",
                value=num_requests,
            )
        if most is not None and num_requests and used + num_requests > most:
            raise self._overloaded(
                "queued_requests",
                f"{used} requests are unfinished and {num_requests} more were given; at most {most} are let in "
                "(server.max_num_queued_reqs)",
                self._wait(used + num_requests - most, lambda then: load.num_ended - then.num_ended),
            )
        queued, most = load.num_queued_tokens + self.reserved_tokens, config.max_num_queued_tokens
        # One that is above the limit alone may run when nothing else waits: otherwise it never could.
        if most is not None and num_tokens > 0 and queued and queued + num_tokens > most:
            raise self._overloaded(
                "queued_tokens",
                f"{queued} prompt tokens wait and {num_tokens} more were given; at most {most} are let in "
                "(server.max_num_queued_tokens)",
                self._wait(queued + num_tokens - most, lambda then: load.num_begun_tokens - then.num_begun_tokens),
            )

    def _overloaded(self, reason: str, what: str, wait: float) -> EngineOverloadedError:
        self._service.observation.monitor.reject(reason)
        return EngineOverloadedError(f"the engine is overloaded: {what}; try again later", retry_after=wait)

    def _wait(self, excess: int, done_since: Callable[[Load], int]) -> float:
        """Seconds until so much more is done, at the rate of the last half minute."""
        since, then = self._samples[0]
        seconds = max(self._now() - since, _SAMPLE_EVERY)
        return min(_MAX_WAIT, max(_MIN_WAIT, excess * seconds / max(1, done_since(then))))

    def _sample(self, load: Load) -> None:
        now, samples = self._now(), self._samples
        if samples and load.num_ended < samples[-1][1].num_ended:
            samples.clear()  # another engine
        while samples and samples[0][0] < now - _WINDOW:
            samples.popleft()
        if not samples or now - samples[-1][0] >= _SAMPLE_EVERY:
            samples.append((now, load))
