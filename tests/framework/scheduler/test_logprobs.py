"""Log probabilities through the scheduler: what a step asks for, what is told once, and which token keeps which."""

from __future__ import annotations

import dataclasses
import zlib
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenyard.config import EngineConfig
from tokenyard.engine_outputs import EngineCoreOutputs
from tokenyard.launch.compose import load_engine_config
from tokenyard.logprob_rows import of_kept_tokens, part_of
from tokenyard.runner_output import Logprobs
from tokenyard.sampling_params import SamplingParams
from tokenyard.scheduler.request_state import Request
from tokenyard.scheduler.slots import SlotTable
from tokenyard.scheduler_output import SchedulerOutput
from tokenyard.testing import EngineHarness
from tokenyard.testing.scripted_logprobs import logprob_of

LOOPS = ["sync", "overlap"]
PROMPT = list(range(10, 40))


@cache  # composing a config takes longer than most tests here
def config(*overrides: str) -> EngineConfig:
    return load_engine_config(overrides)[0]


def harness(*overrides: str, loop: str = "sync", windows: tuple[int | None, ...] = (None,)) -> EngineHarness:
    """Up to 4 requests at a time, blocks of 4, no prefix cache."""
    base = ["scheduler.max_num_seqs=4", "kv_cache.enable_prefix_caching=false", "kv_cache.block_size=4"]
    changed = {override.partition("=")[0] for override in overrides}
    own = [override for override in base if override.partition("=")[0] not in changed]
    return EngineHarness(config=config(f"engine={loop}", *own, *overrides), group_windows=windows)


def asked(output: SchedulerOutput) -> list[int]:
    """Rows of a step that are asked for prompt logprobs."""
    wants = output.wants_prompt_logprobs
    return [] if wants is None else np.flatnonzero(wants).tolist()


def asked_up_to(output: SchedulerOutput) -> list[int]:
    """How many tokens each row that is asked has computed when the step is done."""
    ends = output.num_computed_tokens + output.num_scheduled_tokens
    return [int(ends[row]) for row in asked(output)]


def run(engine: EngineHarness, limit: int = 1000) -> list[EngineCoreOutputs]:
    outputs = []
    while engine.has_requests:
        outputs.append(engine.step())
        assert len(outputs) < limit
    return outputs


def prompt_positions(outputs: list[EngineCoreOutputs], name: str) -> list[int]:
    """In the order in which they came."""
    chunks = [chunk for one in outputs for chunk in one.prompt_logprobs if chunk.request_id == name]
    return [position for chunk in chunks for position in range(chunk.start, chunk.start + len(chunk.logprobs.rows))]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("budget", [1, 7, 29, 30, 64])
def test_e16_each_prompt_token_but_the_first_is_told_once_whatever_the_chunks(loop: str, budget: int) -> None:
    engine = harness(f"scheduler.max_num_batched_tokens={budget}", "scheduler.max_num_seqs=1", loop=loop)
    name = engine.add(PROMPT, max_tokens=3, prompt_logprobs=1)
    assert prompt_positions(run(engine), name) == list(range(1, len(PROMPT)))


@pytest.mark.parametrize("loop", LOOPS)
def test_e16_a_prompt_of_one_token_is_not_asked_about(loop: str) -> None:
    engine = harness(loop=loop)
    engine.add([5], max_tokens=3, prompt_logprobs=0)
    while engine.has_requests:
        engine.step()
        assert all(output.wants_prompt_logprobs is None for output in engine.last_outputs)


@pytest.mark.parametrize("loop", LOOPS)
def test_only_rows_with_prompt_tokens_of_requests_that_ask_are_asked(loop: str) -> None:
    engine = harness("scheduler.max_num_batched_tokens=16", loop=loop)
    engine.add([1, 2, 3], max_tokens=40)
    for _ in range(3):
        engine.step()
    engine.add([4] * 6, max_tokens=40)
    engine.add(PROMPT, "asks", max_tokens=40, prompt_logprobs=2)
    seen = []
    for _ in range(12):
        engine.step()
        for output in engine.last_outputs:
            seen += [int(output.num_scheduled_tokens[row]) for row in asked(output)]
            assert output.wants_prompt_logprobs is None or len(output.wants_prompt_logprobs) == output.num_rows
    assert seen == [9, 14, 7]  # behind one decode and six prompt tokens, behind two decodes, the rest
    assert all(output.wants_prompt_logprobs is None for output in engine.last_outputs)
    engine.run()


def test_the_last_prompt_token_alone_in_a_step_is_not_asked_about() -> None:
    """Its logits are about the first output token."""
    engine = harness("scheduler.max_num_batched_tokens=29")
    name = engine.add(PROMPT, max_tokens=2, prompt_logprobs=0)
    engine.step()
    assert asked(engine.last_outputs[0]) == [0]
    engine.step()
    assert engine.scheduled == {name: 1}
    assert engine.last_outputs[0].wants_prompt_logprobs is None
    engine.run()


def tight(loop: str, windows: tuple[int | None, ...] = (None,), budget: int = 8) -> EngineHarness:
    """Two requests that cannot both grow to their ends."""
    return harness(
        f"kv_cache.num_blocks={14 * len(windows)}",
        f"scheduler.max_num_batched_tokens={budget}",
        "scheduler.max_num_seqs=2",
        loop=loop,
        windows=windows,
    )


@pytest.mark.parametrize("windows", [(None,), (None, 5)])
@pytest.mark.parametrize("loop", LOOPS)
def test_e16_after_a_preemption_in_decode_nothing_is_asked_again(loop: str, windows: tuple[int | None, ...]) -> None:
    engine = tight(loop, windows)
    names = [engine.add(PROMPT[:20], max_tokens=30, prompt_logprobs=1) for _ in range(2)]
    outputs, questions, resumed = [], [], False
    while engine.has_requests:
        outputs.append(engine.step())
        for output in engine.last_outputs:
            resumed |= bool(output.resumed)
            if resumed:
                questions += asked(output)
    assert engine.stats.num_preemptions > 0
    assert resumed
    assert questions == []
    assert [prompt_positions(outputs, name) for name in names] == [list(range(1, 20))] * 2


@pytest.mark.parametrize("decoded", range(4))
@pytest.mark.parametrize("loop", LOOPS)
def test_e16_after_a_preemption_in_mid_prompt_the_rest_comes_and_nothing_twice(loop: str, decoded: int) -> None:
    """The first request outgrows the pool while the second one's prompt is computed, and its chunks are cut anew."""
    engine = harness(
        "kv_cache.num_blocks=19", "scheduler.max_num_batched_tokens=5", "scheduler.max_num_seqs=2", loop=loop
    )
    engine.add(PROMPT[: 15 + decoded], max_tokens=40)
    name = "asks"
    outputs: list[EngineCoreOutputs] = []
    is_late = False
    while engine.has_requests or not is_late:
        if not is_late and len(engine.request("0").output_token_ids) >= 15 - decoded:
            engine.add([*PROMPT, *PROMPT[:10]], name, max_tokens=2, prompt_logprobs=1)
            is_late = True
        known = prompt_positions(outputs, name)
        outputs.append(engine.step())
        assert all(end > len(known) for output in engine.last_outputs for end in asked_up_to(output))
    record = engine.request(name)
    cut = [chunk.start for one in outputs for chunk in one.prompt_logprobs]
    assert record.num_preemptions > 0
    assert cut[0] == 1
    assert prompt_positions(outputs, name) == list(range(1, 40))


def test_e16_a_chunk_that_was_told_in_part_is_told_from_there_on() -> None:
    """After the preemption the budget is another one, so a chunk reaches over what is known."""
    engine = harness(
        "kv_cache.num_blocks=19", "scheduler.max_num_batched_tokens=5", "scheduler.max_num_seqs=2", loop="overlap"
    )
    starts: set[int] = set()
    for decoded in range(4):
        engine.add(PROMPT[: 15 + decoded], f"first {decoded}", max_tokens=40)
        while len(engine.request(f"first {decoded}").output_token_ids) < 15 - decoded:
            engine.step()
        engine.add([*PROMPT, *PROMPT[:10]], f"asks {decoded}", max_tokens=2, prompt_logprobs=1)
        outputs = run(engine)
        lengths = {chunk.start: len(chunk.logprobs.rows) for one in outputs for chunk in one.prompt_logprobs}
        starts |= {start for start, length in lengths.items() if start > 1 and length < 4 and start + length < 40}
    assert starts


@pytest.mark.parametrize("loop", LOOPS)
def test_an_aborted_request_gets_no_prompt_logprobs_any_more_even_under_a_reused_id(loop: str) -> None:
    engine = harness("scheduler.max_num_batched_tokens=8", loop=loop)
    engine.add(PROMPT, "one", max_tokens=3, prompt_logprobs=1)
    engine.step()
    engine.finish("one")
    engine.add(PROMPT[:10], "one", max_tokens=3, prompt_logprobs=1)  # a step of the first one may be in flight
    assert prompt_positions(run(engine), "one") == list(range(1, 10))


@pytest.mark.parametrize("loop", LOOPS)
def test_a_request_that_fails_in_mid_prompt_ends_alone_and_gets_no_more(loop: str) -> None:
    engine = harness("scheduler.max_num_batched_tokens=16", loop=loop)
    bad, good = (engine.add(PROMPT, max_tokens=3, prompt_logprobs=1) for _ in range(2))
    outputs = [engine.step(errors={bad: "not finite"}), *run(engine)]
    assert engine.request(bad).finish_reason == "error"
    assert prompt_positions(outputs, bad) == []
    assert prompt_positions(outputs, good) == list(range(1, 30))


@pytest.mark.parametrize("loop", LOOPS)
def test_k5_prompt_logprobs_read_no_cached_block_and_still_fill_the_cache(loop: str) -> None:
    """Also when a front end has not thought of `skip_prefix_cache`."""
    engine = harness("kv_cache.enable_prefix_caching=true", loop=loop)
    engine.add(PROMPT, max_tokens=1)
    engine.run()
    asks = engine.add(PROMPT, max_tokens=1, prompt_logprobs=0)
    engine.step()
    assert engine.scheduled == {asks: 30}
    engine.run()
    thoughtless = dataclasses.replace(engine.request(asks).core, request_id="thoughtless", skip_prefix_cache=False)
    engine.add_request(thoughtless)
    assert prompt_positions(run(engine), "thoughtless") == list(range(1, 30))
    assert [engine.request(name).num_cached for name in (asks, "thoughtless")] == [0, 0]
    engine.reset_prefix_cache()
    engine.add(PROMPT, max_tokens=1, prompt_logprobs=0)
    engine.run()
    plain = engine.add(PROMPT, max_tokens=1)
    engine.run()
    assert engine.request(plain).num_cached == 28


@pytest.mark.parametrize("loop", LOOPS)
def test_logprobs_of_steps_without_any_are_none(loop: str) -> None:
    engine = harness(loop=loop)
    engine.add(PROMPT, max_tokens=5)
    outputs = run(engine)
    assert all(one.logprobs is None and not one.prompt_logprobs for one in outputs)


def sampled_logprobs(outputs: list[EngineCoreOutputs], name: str) -> list[tuple[int, float]]:
    """(token id, logprob) of each output token that has one."""
    found = []
    for one in outputs:
        if one.logprobs is None:
            continue
        owners = np.repeat(np.arange(len(one.request_ids)), one.num_tokens)
        for row, token_ids, values in zip(
            one.logprobs.rows, one.logprobs.token_ids, one.logprobs.logprobs, strict=True
        ):
            if one.request_ids[owners[row]] == name:
                assert one.token_ids[row] == token_ids[0]
                found.append((int(token_ids[0]), float(values[0])))
    return found


ROWS = st.lists(
    st.tuples(st.sampled_from([None, 0, 3]), st.sampled_from([1, 1, 2, 3, 0]), st.booleans(), st.integers(1, 6)),
    min_size=1,
    max_size=6,
)


@settings(max_examples=150, deadline=None)
@given(rows=ROWS, loop=st.sampled_from(LOOPS), num_blocks=st.sampled_from([8, 12, 1000]), stop=st.integers(0, 3))
def test_each_token_keeps_its_own_logprob_however_many_a_row_samples(
    rows: list[tuple[int | None, int, bool, int]], loop: str, num_blocks: int, stop: int
) -> None:
    """Rows of no, one or several tokens, with stops in the middle, preempted and aborted ones, whoever asks."""
    engine = harness(f"kv_cache.num_blocks={num_blocks}", "kv_cache.block_size=2", loop=loop)
    counts = {
        engine.add([index, 1, 2], f"r{index}", max_tokens=10, logprobs=logprobs, stop_token_ids=[7]): count
        for index, (logprobs, count, _, _) in enumerate(rows)
    }
    outputs: list[EngineCoreOutputs] = []
    for turn in range(200):
        if not engine.has_requests:
            break
        engine.finish([f"r{index}" for index, row in enumerate(rows) if row[2] and row[3] == turn])
        is_odd = zlib.crc32(bytes([turn])) % 2  # not in step with anything, or rows without tokens would never end
        script = {
            name: [100 * turn + at if (turn + at) % 5 != stop else 7 for at in range(count if is_odd else 1)]
            for name, count in counts.items()
        }
        outputs.append(engine.step(script))
    assert not engine.has_requests
    for index, (logprobs, _, _, _) in enumerate(rows):
        tokens = engine.request(f"r{index}").output_token_ids
        expected = [(token, logprob_of(f"r{index}", 3 + at, token)) for at, token in enumerate(tokens)]
        assert sampled_logprobs(outputs, f"r{index}") == ([] if logprobs is None else expected)


def test_a_table_counts_the_requests_that_ask_for_prompt_logprobs_while_they_hold_a_slot() -> None:
    """Steps look at single requests for them only while there are any."""
    engine = harness()
    engine.add(PROMPT, max_tokens=1, prompt_logprobs=0)
    plain = dataclasses.replace(engine.request("0").core, params=SamplingParams())
    table = SlotTable(2, 100)
    asks, does_not = (Request(core, 40) for core in (engine.request("0").core, plain))
    slots = [table.acquire(request) for request in (asks, does_not)]
    assert table.num_with_prompt_logprobs == 1
    table.detach(slots[1].index)
    assert table.num_with_prompt_logprobs == 1
    table.detach(slots[0].index)
    assert table.num_with_prompt_logprobs == 0


def logprobs_of(rows: list[int], num_columns: int = 2) -> Logprobs:
    """Each row says its own number everywhere."""
    table = np.repeat(np.array(rows, dtype=np.int32)[:, None], num_columns, axis=1)
    return Logprobs(
        rows=np.array(rows, dtype=np.int32),
        token_ids=table,
        logprobs=-table.astype(np.float32),
        sampled_ranks=np.array(rows, dtype=np.int32) + 1,
    )


@settings(max_examples=200, deadline=None)
@given(kept=st.lists(st.booleans(), min_size=1, max_size=30), data=st.data())
def test_kept_tokens_keep_their_rows_and_no_others(kept: list[bool], data: st.DataObject) -> None:
    rows = sorted(data.draw(st.sets(st.integers(0, len(kept) - 1))))
    found = of_kept_tokens(logprobs_of(rows), np.array(kept))
    left = [place for place, is_kept in enumerate(kept) if is_kept]
    expected = [(left.index(row), row) for row in rows if kept[row]]
    if not expected:
        assert found is None
        return
    assert found is not None
    assert list(zip(found.rows.tolist(), found.token_ids[:, 1].tolist(), strict=True)) == expected
    assert found.logprobs[:, 0].tolist() == [-row for _, row in expected]
    assert found.sampled_ranks.tolist() == [row + 1 for _, row in expected]


def test_a_part_counts_from_0() -> None:
    part = part_of(logprobs_of([0, 1, 2, 3]), 1, 3)
    assert part.rows.tolist() == [0, 1]
    assert part.token_ids.tolist() == [[1, 1], [2, 2]]
    assert part.sampled_ranks.tolist() == [2, 3]
