"""`observers=[step_logger]`: a line a step, or a JSON line in a file."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenyard.errors import ConfigError
from tokenyard.testing import EngineHarness


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.DEBUG)
    return lambda: [row.getMessage() for row in caplog.records if row.name == "tokenyard_plugins.step_logger"]


def harness(observer: str, *overrides: str) -> EngineHarness:
    return EngineHarness([f"observers=[{observer}]", "scheduler=fcfs", *overrides], step_seconds=0.5)


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_line_tells_what_a_step_did_and_who_waits(lines: Callable[[], list[str]]) -> None:
    made = harness("step_logger", "scheduler.max_num_seqs=1", "kv_cache.num_blocks=10")
    made.add(range(20), max_tokens=2)
    made.add([1, 2], max_tokens=1)
    made.run()
    assert lines() == [
        "step 0: 1 rows, 20 tokens, 1 sampled, 1 new, 0 resumed, 0 finished; "
        "1 running, 1 waiting (max_num_seqs), 8/10 blocks free; 500.0 ms",
        "step 1: 1 rows, 1 tokens, 1 sampled, 0 new, 0 resumed, 1 finished; "
        "0 running, 1 waiting (max_num_seqs), 10/10 blocks free; 500.0 ms",
        "step 2: 1 rows, 2 tokens, 1 sampled, 1 new, 0 resumed, 1 finished; "
        "0 running, 0 waiting, 10/10 blocks free; 500.0 ms",
    ]


def test_time_in_which_nothing_ran_is_not_counted(lines: Callable[[], list[str]]) -> None:
    made = harness("step_logger")
    made.add([1], max_tokens=1)
    made.run()
    made.advance(60.0)
    made.add([1], max_tokens=1)
    made.run()
    assert [line.rpartition("; ")[2] for line in lines()] == ["500.0 ms", "500.0 ms"]


def test_under_overlap_a_step_is_counted_from_where_the_last_one_ended(lines: Callable[[], list[str]]) -> None:
    made = harness("step_logger", "engine=overlap")
    made.add([1], max_tokens=3)
    made.run()
    assert [line.rpartition("; ")[2] for line in lines()] == ["500.0 ms"] * len(lines())


def test_several_steps_a_line_are_added_up_and_none_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    made = harness(f"{{name: step_logger, every: 3, path: '{path}'}}")
    made.add(range(10), max_tokens=7)
    made.run()
    made.core.shutdown()
    told = rows(path)
    assert [(row["step"], row["num_steps"], row["num_sampled"]) for row in told] == [(2, 3, 3), (5, 3, 3), (6, 1, 1)]
    assert [(row["num_rows"], row["num_tokens"], row["num_new"], row["num_finished"]) for row in told] == [
        (3, 12, 1, 0),
        (3, 3, 0, 0),
        (1, 1, 0, 1),
    ]
    assert sum(float(str(row["seconds"])) for row in told) == pytest.approx(3.5)


def test_the_rows_of_several_steps_are_added_up_in_the_log_too(lines: Callable[[], list[str]]) -> None:
    made = harness("{name: step_logger, every: 2}")
    made.add(range(10), max_tokens=2)
    made.step()
    made.add(range(10), max_tokens=2)
    made.step()
    assert lines()[0].startswith("step 1 (2 steps): 3 rows, 21 tokens, 3 sampled, 2 new,")


def test_a_file_is_added_to_and_the_log_left_alone(tmp_path: Path, lines: Callable[[], list[str]]) -> None:
    path = tmp_path / "steps.jsonl"
    for _ in range(2):
        made = harness(f"{{name: step_logger, path: '{path}'}}")
        made.add([1], max_tokens=1)
        made.run()
        made.core.shutdown()
    assert len(rows(path)) == 2
    assert lines() == []


def test_the_level_is_an_option(lines: Callable[[], list[str]], caplog: pytest.LogCaptureFixture) -> None:
    made = harness("{name: step_logger, level: debug}")
    made.add([1], max_tokens=2)
    made.step()
    caplog.set_level(logging.INFO, logger="tokenyard_plugins.step_logger")
    made.step()
    assert len(lines()) == 1


def test_without_stats_a_line_has_no_gauges(lines: Callable[[], list[str]]) -> None:
    made = harness("step_logger", "engine.log_stats=false")
    made.add([1], max_tokens=1)
    made.run()
    assert lines() == ["step 0: 1 rows, 1 tokens, 1 sampled, 1 new, 0 resumed, 1 finished; 500.0 ms"]


@pytest.mark.parametrize(
    ("observer", "words"),
    [
        ("{name: step_logger, every: 0}", "every=0 must be a whole number of steps, at least 1"),
        ("{name: step_logger, path: /no/such/folder/x}", "cannot be written"),
        ("{name: step_logger, evry: 2}", "did you mean"),
        ("{name: step_logger, level: loud}", "level"),
    ],
)
def test_mistakes_in_options_are_one_clear_error(observer: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        harness(observer)
