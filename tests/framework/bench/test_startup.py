"""Cold and warm starts: what is run in which order, and the figures; the starts themselves are planted."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenyard.bench import startup
from tokenyard.bench.startup import Start, forget, run_startup_bench


def plant(monkeypatch: pytest.MonkeyPatch, *, can_forget: bool) -> list[str]:
    """What happens, in order; each start takes a second more than the one before."""
    seen: list[str] = []

    def planted_forget(model: Path) -> bool:
        seen.append(f"forget {model}")
        return can_forget

    def planted_start(arguments: Sequence[str] = ()) -> Start:
        seen.append(f"start {' '.join(arguments)}")
        seconds = float(seen.count(seen[-1]))
        return Start(seconds + 2, {"interpreter": 0.5, "model": seconds, "rest": 1.0}, "m")

    monkeypatch.setattr(startup, "forget", planted_forget)
    monkeypatch.setattr(startup, "timed_start", planted_start)
    return seen


def test_every_cold_start_has_its_files_forgotten_and_a_warm_one_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = plant(monkeypatch, can_forget=True)
    row = run_startup_bench(2, Path("m"), ["model.name=m"])
    assert seen[1:] == ["forget m", "start model.name=m", "start model.name=m"] * 2
    assert row["cold"] == {
        "first_token_s": 2.5,  # starts 1 and 3
        "wall_s": 4.0,
        "phases_s": {"interpreter": 0.5, "model": 2.0, "rest": 1.0},
    }
    assert row["warm"] == {
        "first_token_s": 3.5,  # starts 2 and 4
        "wall_s": 5.0,
        "phases_s": {"interpreter": 0.5, "model": 3.0, "rest": 1.0},
    }


def test_where_nothing_can_be_forgotten_the_first_start_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = plant(monkeypatch, can_forget=False)
    row = run_startup_bench(1, Path("m"), [])
    assert seen.count("start ") == 2
    assert row["cold"] is None
    assert row["warm"] == {
        "first_token_s": 2.5,
        "wall_s": 4.0,
        "phases_s": {"interpreter": 0.5, "model": 2.0, "rest": 1.0},
    }


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system offers no such thing")
def test_forgetting_changes_no_file_and_stands_what_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"x" * 10_000)
    (tmp_path / "folder").mkdir()
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    assert forget(tmp_path)
    assert forget(tmp_path / "weights")
    assert forget(tmp_path / "nowhere")
    assert (tmp_path / "weights").read_bytes() == b"x" * 10_000


def test_forgetting_is_not_offered_everywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    assert not forget(tmp_path)
