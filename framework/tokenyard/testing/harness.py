"""EngineHarness: the real loop, scheduler and K/V manager, step by step, with a test that says what is sampled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Self

from tokenyard.errors import TokenyardError
from tokenyard.interfaces.engine_core import PauseMode
from tokenyard.launch.assemble import as_it_is
from tokenyard.request import EngineCoreRequest, FinishReason
from tokenyard.testing.admission_judge import AdmissionJudge
from tokenyard.testing.errors import ContractViolation
from tokenyard.testing.inputs import (
    checked_choice,
    checked_seconds,
    checked_step_seconds,
    checked_windows,
    eos_ids,
    first_eos,
    longest_total,
    sampling_params,
    script_tokens,
    stop_ids,
    token_array,
)
from tokenyard.testing.invariants import StateJudge
from tokenyard.testing.ledger import Ledger
from tokenyard.testing.parts import config_and_catalogue, scripted_parts
from tokenyard.testing.records import RequestRecord
from tokenyard.testing.trace import Trace, told_request, told_step
from tokenyard.testing.views import KVView

if TYPE_CHECKING:
    from tokenyard.catalogue import Catalogue
    from tokenyard.clock import Clock
    from tokenyard.config import EngineConfig
    from tokenyard.engine_outputs import EngineCoreOutputs, SchedulerStats
    from tokenyard.interfaces.kv_cache import ExtraKey
    from tokenyard.launch.assemble import Decorate
    from tokenyard.request import Retention, ServiceLevel
    from tokenyard.scheduler_output import SchedulerOutput
    from tokenyard.testing.inputs import StepSeconds
    from tokenyard.testing.scripted import Script


_FROZEN = (PauseMode.KEEP, PauseMode.ABORT)


class EngineHarness:
    """What the overrides choose around a `ScriptedExecutor`; everything is checked after every call.

    Defaults are the product's, except `kv_cache.num_blocks=10000` and `model.max_model_len=8192` (the step's token
    budget where prefill is not chunked). `model`, `attention`, `executor` choose nothing else; a byte holds a token.

    - `catalogue`: what can be chosen; None = the installed plugins. See `catalogue_with`.
    - `config`: a config that was made already, such as another harness's, instead of overrides.
    - `eos_token_id`: what ends a request; None = 50256, or the last one of a smaller vocabulary.
    - `group_windows`: the sliding window of each K/V group, None = full attention.
    - `clock`: None = a VirtualClock, which `advance` moves; `step_seconds` of a step: a number, or a function of it.
    - `decorate`: called with each part as it is made, returns what is used instead.
    - `checks=False` leaves out the checks after each call, for long runs; `check_invariants` still makes them. A record
      is then brought up to date when `request` or `requests` is asked for it.

    A rule that does not hold raises ContractViolation, with the rule's id and the calls that led there.
    """

    def __init__(
        self,
        overrides: Sequence[str] | None = (),
        *,
        catalogue: Catalogue | None = None,
        config: EngineConfig | None = None,
        vocab_size: int = 1 << 20,
        eos_token_id: int | Sequence[int] | None = None,
        group_windows: Sequence[int | None] = (None,),
        clock: Clock | None = None,
        step_seconds: StepSeconds = None,
        decorate: Decorate = as_it_is,
        checks: bool = True,
    ) -> None:
        self._eos = eos_ids(eos_token_id, vocab_size)
        windows = checked_windows(group_windows)
        config, catalogue = config_and_catalogue(overrides, config, catalogue)
        made = scripted_parts(
            config,
            catalogue,
            vocab_size=vocab_size,
            group_windows=windows,
            clock=clock,
            step_seconds=checked_step_seconds(step_seconds),
            decorate=decorate,
        )
        self.config = made.config
        self.clock = made.clock
        self.executor = made.executor
        self.core = made.parts.core
        self.scheduler = made.parts.scheduler
        self.kv_cache_manager = made.parts.kv_cache_manager
        self.policy = made.parts.policy
        self.kv = KVView(self.kv_cache_manager)
        self.steps = 0  # calls of `step`
        self.last_output: SchedulerOutput | None = None  # the step that was scheduled last
        self._vocab_size = vocab_size
        self._max_model_len = made.size.max_model_len
        self._checks = checks
        self._is_stale = False  # the records do not have what the scheduler says now
        self._has_failed = False  # a step raised: what the engine says then means nothing
        self._ledger = Ledger()
        self._pause_mode: PauseMode | None = None
        self._scheduled: dict[str, int] = {}
        self._trace = Trace()
        self._state = StateJudge(made.parts, self.executor.worker, self._ledger, self.config.kv_cache.num_blocks or 0)
        self._judge = AdmissionJudge(self.config, made.parts, len(windows))
        self.executor.on_execute = self._on_execute

    # Requests

    def add(
        self,
        prompt_token_ids: Sequence[int],
        request_id: str | None = None,
        priority: int = 0,
        arrival: float | None = None,
        client: str | None = None,
        metadata: Mapping[str, object] | None = None,
        *,
        session: str | None = None,
        parent: str | None = None,
        deadline: float | None = None,
        service_level: ServiceLevel | None = None,
        skip_prefix_cache: bool = False,
        cache_salt: str | None = None,
        lora_name: str | None = None,
        extra_keys: Sequence[ExtraKey] = (),
        retention: Retention = "normal",
        true_output_tokens: int | None = None,
        **sampling: object,
    ) -> str:
        """Queue a request and return its id; ids are "0", "1", ... unless given.

        `sampling` are fields of SamplingParams; `temperature` is 0.0 unless given. `arrival` defaults to now. Raises
        what the product raises. `true_output_tokens` is what an oracle is told; the script says what really happens.
        """
        params = sampling_params(sampling)
        request = EngineCoreRequest(
            request_id=self._ledger.next_id() if request_id is None else request_id,
            prompt_token_ids=token_array(prompt_token_ids, self._vocab_size),
            params=params,
            arrival_time=self.clock.now() if arrival is None else arrival,
            stop_token_ids=stop_ids(params, self._eos),
            eos_token_ids=() if params.ignore_eos else self._eos,
            priority=priority,
            client_id=client,
            session_id=session,
            parent_id=parent,
            deadline=deadline,
            service_level=service_level,
            skip_prefix_cache=skip_prefix_cache or params.prompt_logprobs is not None,
            cache_salt=cache_salt,
            lora_name=lora_name,
            extra_keys=tuple(extra_keys),
            retention=retention,
            metadata=dict(metadata or {}),
            true_output_tokens=true_output_tokens,
        )
        with self._trace.call(told_request(request, sampling)):
            self.add_request(request)
        return request.request_id

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request that was made by other means."""
        self.core.add_request(request)
        self.executor.expect(request)
        longest = longest_total(request, self._max_model_len, self.kv_cache_manager.capacity_tokens())
        self._ledger.add(RequestRecord(request, longest))
        self._look()

    def finish(self, request_id: str | Sequence[str], reason: FinishReason | str = FinishReason.ABORT) -> list[str]:
        """End requests at any moment; returns the ids that were alive. Unknown and ended ids are ignored.

        The return tells of these ends; no later `step` does. Blocks that a step in flight still writes to are free when
        it has landed: everything is settled when `has_requests` is False.
        """
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        reason = checked_choice("reason", FinishReason, reason)
        with self._trace.call(f"finish({ids}, {reason.value!r})"):
            alive = [one for one in dict.fromkeys(ids) if one in self._ledger.live]
            ended = list(self.core.finish_requests(ids, reason))
            if sorted(ended) != sorted(alive):
                raise ContractViolation("request.finish_returns_alive", f"returned {ended}, alive were {alive}")
            self._end(ended, reason)
            self._look()
        return ended

    # Steps

    def step(self, tokens: Script = None, *, errors: Mapping[str, str] | None = None) -> EngineCoreOutputs:
        """One turn of the loop.

        `tokens` says what is sampled in the step that lands in this call (under `engine=overlap` it was scheduled in
        an earlier one): a list by request id, or a function of the id. A row may sample several tokens, or none with
        `[]`; an id that is left out gets one token that depends on its id and position alone and never ends it. Ids
        that were never added are an error; ids that do not sample in this step are not, since a request may be
        preempted: `sampled` says what was. `errors` makes single requests fail.
        """
        for request_id in (*(tokens if isinstance(tokens, Mapping) else ()), *(errors or ())):
            self._ledger.get(request_id)
        if isinstance(tokens, Mapping):
            tokens = {name: script_tokens(name, ids, self._vocab_size) for name, ids in tokens.items()}
        self.steps += 1
        with self._trace.call("step()"):
            was_busy = bool(self.executor.worker.in_flight)
            self.executor.begin_turn(tokens, errors or {})
            outputs = self._turn()
            self._ledger.take(outputs, self.executor.landed if self._checks else None)
            self.executor.worker.end(end.request_id for end in outputs.finished)
            scheduled = self._scheduled if self.executor.executed else {}
            self._trace.explain(told_step(scheduled, self.sampled, outputs))
            self._look(is_after_step=True)
            has_news = was_busy or self.executor.executed or outputs.finished
            if self._checks and not has_news and self._pause_mode not in _FROZEN:
                self._state.check_not_stalled()
        return outputs

    def run(self, limit: int = 10_000, tokens: Script = None) -> int:
        """Steps until every request has ended; returns how many it took. Time moves on when nothing can run."""
        for count in range(limit):
            if not self.has_requests:
                return count
            if not self.step(tokens).did_run:
                self._wait()
        raise self._trace.told(ContractViolation("progress.bounded", f"not done after {limit} steps: {self.stats}"))

    def pause(self, mode: PauseMode | str = PauseMode.KEEP) -> list[str]:
        """Pause the loop; returns the ids that it ended."""
        mode = checked_choice("mode", PauseMode, mode)
        with self._trace.call(f"pause({mode.value!r})"):
            ended = list(self.core.pause(mode))
            self._pause_mode, self._judge.is_paused = mode, True
            self._end(ended, FinishReason.ABORT)
            self._look()
        return ended

    def resume(self) -> None:
        """Undo `pause`."""
        with self._trace.call("resume()"):
            self.core.resume()
            self._pause_mode, self._judge.is_paused = None, False
            self._look()

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False, with nothing changed, while requests hold blocks."""
        with self._trace.call("reset_prefix_cache()"):
            was_free = self.kv.num_free == self.kv.num_total
            is_reset = self.core.reset_prefix_cache()
            if is_reset != was_free:
                raise ContractViolation("kv.reset", f"reset returned {is_reset} with {self.kv.num_free} blocks free")
            self._look()
        return is_reset

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        seconds = checked_seconds("seconds", seconds)
        with self._trace.call(f"advance({seconds:g})"):
            self.clock.wait(until=self.clock.now() + seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Check once more, unless a step has raised, and shut the engine down."""
        try:
            if not self._has_failed:
                self.check_invariants()
        finally:
            self.core.shutdown()

    # What there is

    @property
    def running(self) -> list[str]:
        """Ids in the batch, in order of admission."""
        return [row.request_id for row in self.scheduler.snapshot().running]

    @property
    def waiting(self) -> list[str]:
        """Ids in line, preempted ones included; the next to be admitted comes first."""
        return [row.request_id for row in self.scheduler.snapshot().waiting]

    @property
    def eos_token_id(self) -> int:
        """A token that ends a request."""
        return first_eos(self._eos)

    @property
    def has_requests(self) -> bool:
        """Whether any request has not ended, steps in flight included."""
        return self.core.has_requests()

    @property
    def stats(self) -> SchedulerStats:
        """Counters and gauges, now."""
        return self.core.stats()

    def request(self, request_id: str) -> RequestRecord:
        """Status, tokens and end of a request, kept up to date; also after it has ended."""
        self._catch_up()
        return self._ledger.get(request_id)

    @property
    def requests(self) -> Mapping[str, RequestRecord]:
        """Every request by id; of two with one id the later one."""
        self._catch_up()
        return self._ledger.records

    def blocks(self, request_id: str, group: int = 0) -> list[int]:
        """The block table of a request in a K/V group."""
        return list(map(int, self.kv_cache_manager.block_ids(self._ledger.get(request_id))[group]))

    @property
    def scheduled(self) -> dict[str, int]:
        """Id -> tokens in the step that was scheduled last."""
        return dict(self._scheduled)

    @property
    def last_outputs(self) -> list[SchedulerOutput]:
        """The steps that were scheduled in the last call of `step`: none, one, or several to fill a pipeline."""
        return list(self.executor.executed)

    @property
    def sampled(self) -> dict[str, list[int]]:
        """Id -> tokens sampled in the step that landed in the last call of `step`, whatever became of them."""
        landed = self.executor.landed
        return {row.held.request_id: list(row.sampled) for step in landed for row in step.rows if row.samples}

    # Checks

    def check_invariants(self) -> None:
        """Raise ContractViolation, naming the rule, when requests, blocks, slots or counters do not fit together."""
        self._checked(self._state.check)

    def check_idle(self) -> None:
        """Nothing is left behind once every request has ended (S25)."""
        self.check_invariants()
        self._checked(self._state.check_idle)

    # Inside

    def _checked(self, check: Callable[[], None]) -> None:
        try:
            check()
        except ContractViolation as violation:
            raise self._trace.told(violation) from None

    def _end(self, request_ids: Sequence[str], reason: FinishReason) -> None:
        self._ledger.end(request_ids, reason)
        self.executor.worker.end(request_ids)

    def _turn(self) -> EngineCoreOutputs:
        self._has_failed = True
        try:
            outputs = self.core.step()
        except TokenyardError:
            cause = self.executor.script_error or self.executor.violation  # what it is, not the death of an engine
            if cause is not None:
                raise cause from None
            raise
        self._has_failed = False
        return outputs

    def _wait(self) -> None:
        moment = self.core.wake_at()
        if moment is None:
            raise self._trace.told(ContractViolation("progress.stalled", f"nothing runs or wakes up: {self.stats}"))
        self.clock.wait(until=moment)

    def _on_execute(self, output: SchedulerOutput) -> None:
        self.last_output = output
        held = self.executor.worker.held
        counts = zip(output.slots.tolist(), output.num_scheduled_tokens.tolist(), strict=True)
        self._scheduled = {held[slot].request_id: count for slot, count in counts}
        for start in output.resumed:
            self._ledger.resume(start.request_id)
        if self._checks:
            self._judge.judge(output)

    def _look(self, *, is_after_step: bool = False) -> None:
        """Something has changed: take in what the scheduler says now and check it. Without checks that can wait."""
        self._is_stale = not self._checks
        if self._checks:
            self._state.check(is_after_step=is_after_step)

    def _catch_up(self) -> None:
        if self._is_stale:
            self._state.take_snapshot()
            self._is_stale = False
