"""Two traces side by side: what their configs differ in, and the first decision that does."""

from __future__ import annotations

from pathlib import Path

from tokenyard.config import EngineConfig
from tokenyard.testing import EngineHarness
from tokenyard.trace.diff import DiffResult, diff
from traced_runs import base_config, harness, traced, with_sizes

SMALL = with_sizes(
    base_config(),
    {
        "scheduler": {"max_num_seqs": 2, "max_num_batched_tokens": 8},
        "kv_cache": {"num_blocks": 12, "block_size": 4, "enable_prefix_caching": True},
    },
)
PROMPTS = ([1, 2, 3, 4, 5, 6], [7, 8, 1], [1, 2, 3, 4, 5, 7])


class Run:
    """A traced engine in which the same requests come, unless a test says otherwise."""

    def __init__(self, path: Path, config: EngineConfig = SMALL, ids: str = "") -> None:
        self.path = path
        self._ids = ids
        self.engine: EngineHarness = harness(traced(config, path))

    def add(self, number: int, prompt: list[int] | None = None, priority: int = 0) -> None:
        self.engine.add(prompt or PROMPTS[number], f"{self._ids}{number}", priority, max_tokens=4)

    def play(self) -> Path:
        for number in range(len(PROMPTS)):
            self.add(number)
        self.engine.run()
        self.engine.close()
        return self.path


def compared(tmp_path: Path, other: Path) -> DiffResult:
    return diff(Run(tmp_path / "first").play(), other)


def test_equal_runs_are_identical(tmp_path: Path) -> None:
    result = compared(tmp_path, Run(tmp_path / "second").play())
    assert result.difference is None
    assert not result.config
    assert result.num_steps > 4


def test_times_are_no_difference(tmp_path: Path) -> None:
    run = Run(tmp_path / "second")
    run.engine.advance(17.25)
    assert compared(tmp_path, run.play()).difference is None


def test_ids_count_by_order_of_arrival(tmp_path: Path) -> None:
    result = compared(tmp_path, Run(tmp_path / "second", ids="another-").play())
    # What the scripted executor samples depends on the id, so tokens differ, and nothing before them does.
    assert result.difference is not None
    assert result.difference.kind == "sampled"
    assert "matched in order of arrival" in result.notes[0]


def test_another_config_is_listed_before_what_came_of_it(tmp_path: Path) -> None:
    config = with_sizes(SMALL, {"scheduler": {"max_num_batched_tokens": 7}, "kv_cache": {}})
    result = compared(tmp_path, Run(tmp_path / "second", config).play())
    assert result.config == [("scheduler.max_num_batched_tokens", 8, 7)]
    assert result.difference is not None
    assert (result.difference.kind, result.difference.step) == ("budget", 0)


def test_another_prompt_is_an_arrival(tmp_path: Path) -> None:
    run = Run(tmp_path / "second")
    run.add(0)
    run.add(1, [8, 8, 8])
    run.add(2)
    run.engine.run()
    run.engine.close()
    difference = compared(tmp_path, run.path).difference
    assert difference is not None
    assert (difference.kind, difference.what, difference.step) == ("arrivals", "its prompt", None)


def test_a_request_that_comes_later_is_an_arrival(tmp_path: Path) -> None:
    run = Run(tmp_path / "second")
    run.add(0)
    run.add(1)
    run.engine.step()
    run.add(2)
    run.engine.run()
    run.engine.close()
    difference = compared(tmp_path, run.path).difference
    assert difference is not None
    assert difference.kind == "arrivals"
    assert difference.left == "add_request 2"
    assert difference.right == "schedule step 0"


def test_another_token_is_found_where_it_was_sampled(tmp_path: Path) -> None:
    run = Run(tmp_path / "second")
    for number in range(len(PROMPTS)):
        run.add(number)
    run.engine.step()
    run.engine.step({"0": [33]})
    run.engine.run()
    run.engine.close()
    difference = compared(tmp_path, run.path).difference
    assert difference is not None
    assert (difference.kind, difference.step) == ("sampled", 1)
    assert "33" in difference.right


def test_a_lost_hit_is_found_where_it_was_lost(tmp_path: Path) -> None:
    run = Run(tmp_path / "second")
    run.add(0)
    run.add(1)
    run.add(2)
    run.engine.run()
    run.add(3, PROMPTS[0])
    run.engine.run()
    other = Run(tmp_path / "third")
    other.add(0)
    other.add(1)
    other.add(2)
    other.engine.run()
    other.engine.reset_prefix_cache()
    other.add(3, PROMPTS[0])
    other.engine.run()
    run.engine.close()
    other.engine.close()
    lines = [line for line in other.path.read_text().splitlines() if '"reset_prefix_cache"' not in line]
    other.path.write_text("\n".join(lines) + "\n")
    difference = diff(run.path, other.path).difference
    assert difference is not None
    assert difference.kind == "hits"
    assert (difference.left, difference.right) == ("3: 4", "3: 0")


def test_a_trace_that_ends_earlier_says_so(tmp_path: Path) -> None:
    path = Run(tmp_path / "second").play()
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:9]))
    difference = compared(tmp_path, path).difference
    assert difference is not None
    assert difference.right == "the end of the trace"
