"""SchedulingPolicy: the decisions that steer a scheduler, each optional."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from random import Random

    from tokenyard.interfaces.columns import RequestColumns
    from tokenyard.interfaces.latency import StepLatency
    from tokenyard.interfaces.outcomes import StepOutcomes
    from tokenyard.interfaces.predictor import OutputLengthPredictor
    from tokenyard.request import FinishReason, ServiceLevel


class AdmitDecision(NamedTuple):
    """`accept`, `reject` (the request ends with an error that gives the reason) or `defer` (asked again later)."""

    kind: str
    reason: str | None = None

    @classmethod
    def accept(cls) -> AdmitDecision:
        return cls("accept")

    @classmethod
    def reject(cls, reason: str) -> AdmitDecision:
        return cls("reject", reason)

    @classmethod
    def defer(cls, reason: str) -> AdmitDecision:
        return cls("defer", reason)


class PreemptMode(str, Enum):
    """What happens to the K/V of a request that loses its turn.

    Where blocks are short, PAUSE gives none back: RECOMPUTE is then used instead, as it is for SWAP where the K/V
    manager has no room in host memory.
    """

    RECOMPUTE = "recompute"  # given up; the request waits again, and computes it once more
    SWAP = "swap"  # moved to host memory; the request waits again, and it comes back with it
    PAUSE = "pause"  # kept on the device; the request stays among `running`, and holds no place of `max_num_seqs`


class RequestView(Protocol):
    """A request as a policy sees it; read-only. Counts are of delivered tokens, whatever engine loop runs."""

    @property
    def request_id(self) -> str: ...
    @property
    def arrival_time(self) -> float:
        """Engine-clock seconds."""

    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def arrival_tokens(self) -> int:
        """What `SchedulerView.token_clock` was when it arrived (since API 1.6)."""

    @property
    def is_paused(self) -> bool:
        """Whether it is among `SchedulerView.running` and did not run in the last step (since API 1.6)."""

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose K/V is there: prefix hits included, steps in flight not."""

    @property
    def num_output_tokens(self) -> int: ...
    @property
    def max_output_tokens(self) -> int:
        """The limit after which the request ends: its own or the model's. Not its true output length."""

    @property
    def num_in_flight_tokens(self) -> int: ...
    @property
    def num_preemptions(self) -> int: ...
    @property
    def priority(self) -> int:
        """Lower = more urgent."""

    @property
    def client_id(self) -> str | None: ...
    @property
    def session_id(self) -> str | None: ...
    @property
    def parent_id(self) -> str | None: ...
    @property
    def deadline(self) -> float | None: ...
    @property
    def service_level(self) -> ServiceLevel | None: ...
    @property
    def attained_service(self) -> int:
        """Tokens computed for it so far, those computed again after a preemption included."""

    @property
    def metadata(self) -> Mapping[str, object]:
        """What the user told this policy, by field of its `PolicyDescriptor.metadata_type`, as typed there.

        All fields are there in requests of Tokenyard's front ends; a request that was made otherwise may have none.
        """


class SchedulerView(Protocol):
    """The scheduler's state as a policy sees it; read-only. A policy never reads another clock than `now`."""

    @property
    def now(self) -> float:
        """Engine-clock seconds: virtual in simulation."""

    @property
    def num_waiting(self) -> int: ...
    @property
    def num_running(self) -> int: ...
    @property
    def num_free_blocks(self) -> int: ...
    @property
    def num_total_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def rng(self) -> Random:
        """Seeded by the run's seed; the only randomness a policy may use."""

    @property
    def running(self) -> Sequence[RequestView]:
        """In admission order, those included that are paused."""

    @property
    def running_columns(self) -> RequestColumns:
        """Of `running`, in the same order (since API 1.7)."""

    @property
    def prefills(self) -> Sequence[RequestView]:
        """Of `running` those whose next step is no decode: they lack K/V of more than one token (since API 1.6)."""

    def waiting(self, limit: int) -> Sequence[RequestView]:
        """The first `limit` requests in line; while the engine lets nobody start, of those that ran before."""

    @property
    def num_waiting_by_client(self) -> Mapping[str | None, int]:
        """How many requests of each client are in line; clients with none are left out (since API 1.6).

        None stands for all requests without a client id. In `on_arrival` those that arrive are not in line yet.
        """

    @property
    def token_clock(self) -> int:
        """Tokens that were computed so far for all requests together: time that runs with the work (since API 1.6)."""

    @property
    def predictor(self) -> OutputLengthPredictor:
        """What says how long outputs will be: `scheduler.predictor` (since API 1.6)."""

    @property
    def latency(self) -> StepLatency:
        """What says how long a step takes: the group `latency` (since API 1.6).

        Raises PluginError where none is configured; a policy that needs one had better refuse to be made without:
        see `PolicyContext.has_latency`.
        """

    def num_blocks(self, request: RequestView) -> int:
        """Blocks that `request` holds in all K/V groups, shared ones included; not what has left a window."""

    def num_exclusive_blocks(self, request: RequestView) -> int:
        """Blocks that nobody else holds: what preempting `request` would give back (since API 1.6)."""

    def num_blocks_needed(self, request: RequestView, without: Sequence[RequestView] = ()) -> int:
        """Of the free blocks, those that a waiting request takes to enter, with all its known tokens (since API 1.6).

        Blocks of a prefix hit that others hold are left out. Cached ones that nobody holds are not, since they count as
        free; nor are those that nobody would hold any more if the requests of `without` gave up theirs.
        """

    def hit_tokens(self, request: RequestView) -> int:
        """Prompt tokens of `request` that the prefix cache would save now; no side effects.

        Looked up once for as long as the cache does not change, whoever asks.
        """

    def prefix_hashes(self, request: RequestView) -> Sequence[bytes]:
        """Names of the blocks at the start of `request` that a cache could share, cached or not (since API 1.6).

        Two requests whose names are equal at one place begin alike up to the end of that block. What the last known
        token is in has no name. Empty where the K/V manager knows none, or the request skips the prefix cache.
        """


class StepOutcome(NamedTuple):
    """What one step did for one request."""

    request: RequestView
    num_computed_tokens: int
    num_new_tokens: int
    is_first_token: bool  # the request had delivered none before
    is_finished: bool


class Preemption(NamedTuple):
    """A request that lost its place in the batch."""

    request: RequestView
    num_lost_tokens: int  # computed tokens that have to be computed again, unless a prefix hit saves them
    mode: PreemptMode


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyContext:
    """What a policy's factory is given."""

    seed: int
    max_num_seqs: int
    max_num_batched_tokens: int
    preempt_mode: PreemptMode = PreemptMode.RECOMPUTE  # `scheduler.preempt_mode` (since API 1.6)
    has_latency: bool = False  # whether a latency model is configured: see `SchedulerView.latency` (since API 1.6)
    max_chunk_tokens: int | None = None  # of one prefill in a step; None = prompts are not cut (since API 1.6)


class SchedulingPolicy:
    """Nine decision points in twelve methods, and five events. The default is FCFS with chunked prefill, decodes first.

    Called by the scheduler, in the engine process, from one thread; never once per token. What a policy does not
    override costs nothing. The same object serves the live engine and simulation, under every engine loop. Ties are
    broken by (key, arrival, id), so a schedule depends on nothing but the requests and the seed.

    A scheduler names the methods that it asks (`Scheduler.decision_points`); a policy that overrides another one is
    refused at launch, by name, rather than half obeyed.

    A policy cannot stop an engine: where it holds back everything that could run, and names no later time (`wake_at`),
    the step is made as if it had no opinion, and that is logged once.

    `may_starve` (API 1.2): a request may wait for ever under a steady load, because that is what the policy is for;
    the contract suite then does not ask for bounded waiting.

    `waiting_window` (API 1.6): how many requests from the front of the line `waiting_order` is given at most. It bounds
    what a step costs however long the line is.

    `window_by_client` (API 1.6): the window takes clients in turn, in the order of their first requests: the first of
    each, then the second of each, ... So one client's many requests do not hide another's from `waiting_order`.
    """

    may_starve: bool = False
    waiting_window: int = 128
    window_by_client: bool = False

    # Decision points

    def admit(self, request: RequestView, view: SchedulerView) -> AdmitDecision:
        """Whether to take `request`: asked once at arrival, and again each time it is first in line and may enter.

        In a step in which nobody may (the batch or the budget is full) nobody is asked about.
        """
        return AdmitDecision.accept()

    def waiting_key(self, request: RequestView, view: SchedulerView) -> object:
        """Sort key of a waiting request, smallest first; computed once, when the request starts to wait.

        Keys of one policy must be comparable with each other. The default is arrival order.
        """
        return ()

    def waiting_order(self, window: Sequence[RequestView], view: SchedulerView) -> Sequence[RequestView]:
        """The first requests in line, in the order in which they may enter: for keys that change while they wait.

        Asked in each step in which somebody may enter. Whoever is left out does not enter in this step.
        """
        return window

    def running_order(self, running: Sequence[RequestView], view: SchedulerView) -> Sequence[RequestView]:
        """Who gets tokens first in this step; whoever is left out loses its turn, in its `preempt_mode`.

        That leaves a place free for somebody who waits. `running` is in admission order, with those paused earlier: to
        return one of them is to let it go on. More than `scheduler.max_num_seqs` are cut
        off behind, whatever `max_running` says.
        """
        return running

    def token_budget(self, view: SchedulerView) -> int | None:
        """Tokens of this step, at most the configured ones; None = the configured ones."""
        return None

    def prefill_budget(self, view: SchedulerView) -> int | None:
        """Tokens of this step that prefills may take, running and new ones; None = all that decodes leave."""
        return None

    def chunk_size(self, request: RequestView, num_left: int, view: SchedulerView) -> int:
        """Tokens of `request`'s prefill in this step, 0 to `num_left`; with 0 it does not run, or enter, in this step.

        `num_left` is what the prompt, the budgets and `long_prefill_token_threshold` leave.
        """
        return num_left

    def victim(self, candidates: Sequence[RequestView], num_blocks_needed: int, view: SchedulerView) -> RequestView:
        """Who gives up its blocks when `num_blocks_needed` are missing. The default is the one admitted last.

        Candidates are in admission order, never empty, and none of them has run in this step. Where a paused request is
        in the way of one that enters, they are the paused ones.
        """
        return candidates[-1]

    def preempt_mode(self, request: RequestView, view: SchedulerView) -> PreemptMode | None:
        """What to do with the K/V of a request that loses its turn; None = as `scheduler.preempt_mode` says."""
        return None

    def requeue_key(self, request: RequestView, view: SchedulerView) -> object | None:
        """Sort key of a preempted request; None puts it in front of everything that waits."""
        return None

    def max_running(self, view: SchedulerView) -> int | None:
        """Requests running at once, paused ones not counted; at most the configured number, None = that number.

        A smaller number than are running lets nobody enter; it stops nobody who runs.
        """
        return None

    def wake_at(self, view: SchedulerView) -> float | None:
        """The time at which to be asked again although nothing happened; None = never.

        It has no side effects: it draws nothing from `view.rng` and changes no state. How often it is asked depends on
        the engine loop, and a call that answers None is left out of a decision trace.
        """
        return None

    # Events, a batch at a time

    def on_arrival(self, requests: Sequence[RequestView], view: SchedulerView) -> None:
        """These requests start to wait; called before their waiting_key."""

    def on_admit(self, requests: Sequence[RequestView], view: SchedulerView) -> None:
        """These requests entered the running batch; num_computed_tokens is what the prefix cache saved."""

    def on_step(self, outcomes: StepOutcomes, view: SchedulerView) -> None:
        """What one step did: StepOutcome rows, or columns, which cost less (since API 1.7)."""

    def on_preempt(self, preemptions: Sequence[Preemption], view: SchedulerView) -> None:
        """These requests lost their place; called before their requeue_key."""

    def on_finish(self, requests: Sequence[RequestView], reasons: Sequence[FinishReason], view: SchedulerView) -> None:
        """These requests ended."""
