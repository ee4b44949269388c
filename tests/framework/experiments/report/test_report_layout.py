"""Which runs are compared with which."""

from __future__ import annotations

from pathlib import Path

import pytest
from report_runs import write_experiment, write_queue_run
from tokenyard.errors import UserError
from tokenyard.experiments.report.axes import Configured, find_axes, parse_overrides
from tokenyard.experiments.report.comparison import compare
from tokenyard.experiments.report.layout import Layout, make_layout
from tokenyard.experiments.report.measures import MEASURES, TTFT
from tokenyard.experiments.report.runs import FoundRuns, find_runs
from tokenyard.experiments.run_folder import REQUESTS, RESULT


def found_in(root: Path) -> FoundRuns:
    return find_runs(root, left_out=root / "report")


def layout_of(root: Path, *, baseline: str | None = None, mixes_loops: bool = False) -> Layout:
    return make_layout(found_in(root).runs, baseline=baseline, mixes_loops=mixes_loops)


def configured(*overrides: str, config: str = "", seed: int = 1, **components: str) -> Configured:
    return Configured(
        overrides=parse_overrides(overrides), components={**components, "config": config or str(overrides)}, seed=seed
    )


def test_axes_are_what_differs_but_the_seed() -> None:
    runs = [
        configured("scheduler=fcfs", "workload=azure_conv", "seed=1", scheduler="fcfs"),
        configured("scheduler=sjf", "workload=azure_conv", "seed=2", scheduler="sjf", seed=2),
    ]
    assert find_axes(runs) == ("scheduler",)


@pytest.mark.parametrize("key", ["trace.path", "hydra/launcher", "hydra.launcher.n_jobs", "experiment.dir", "seed"])
def test_where_and_how_fast_is_no_axis(key: str) -> None:
    assert find_axes([configured(f"{key}=1", config="a"), configured(f"{key}=2", config="b", seed=2)]) == ()


def test_a_component_that_no_override_names_is_an_axis() -> None:
    runs = [configured("a=1", engine="sync"), configured("a=1", engine="overlap", config="other")]
    assert find_axes(runs) == ("engine",)


def test_what_follows_from_an_override_is_no_axis() -> None:
    runs = [
        configured("workload=azure_conv", workload="trace"),
        configured("workload=chat", workload="multi_turn"),
    ]
    assert find_axes(runs) == ("workload",)


def test_an_override_that_gives_the_default_is_no_axis() -> None:
    runs = [configured("scheduler=fcfs", config="same", scheduler="fcfs"), configured(config="same", scheduler="fcfs")]
    assert find_axes(runs) == ()


def test_configs_that_differ_in_what_no_override_tells_are_told_apart() -> None:
    assert find_axes([configured(config="1"), configured(config="2")]) == ("config",)
    assert find_axes([configured(config="1"), configured(config="2", seed=2)]) == ()


def test_settings_are_compared_within_a_condition_seed_by_seed(tmp_path: Path) -> None:
    layout = layout_of(write_experiment(tmp_path))
    comparisons, notes = compare(layout, (TTFT,))
    assert (layout.condition_axes, layout.setting_axes) == (("workload.time_scale",), ("scheduler",))
    assert layout.conditions == (("1.0",), ("0.8",))
    assert [(one.condition, one.base, one.other) for one in comparisons] == [
        (("1.0",), ("fcfs",), ("sjf",)),
        (("0.8",), ("fcfs",), ("sjf",)),
    ]
    for one in comparisons:
        runs = [layout.runs(one.condition, setting) for setting in (one.base, one.other)]
        values = [[TTFT.of(run.metrics) or 0.0 for _, run in sorted(by_seed.items())] for by_seed in runs]
        by_hand = sum(theirs - ours for ours, theirs in zip(*values, strict=True)) / 3
        assert one.difference.difference.mean == pytest.approx(by_hand)
        assert one.difference.difference.count == 3
    assert notes == []


def test_conditions_are_ordered_by_the_load_that_was_offered(tmp_path: Path) -> None:
    layout = layout_of(write_experiment(tmp_path))
    assert layout.families == {(): (("1.0",), ("0.8",))}  # 0.8 times the arrival times: more load
    assert layout.load_of(("0.8",)) == pytest.approx(layout.load_of(("1.0",)) / 0.8)


def test_different_loops_are_compared_only_when_told_to(tmp_path: Path) -> None:
    for number, engine in enumerate(("sync", "overlap")):
        write_queue_run(tmp_path / str(number), engine=engine, slowness=1.0 + number)
    apart, mixed = layout_of(tmp_path), layout_of(tmp_path, mixes_loops=True)
    assert compare(apart, MEASURES) == ([], [])
    assert {one.other for one in compare(mixed, MEASURES)[0]} == {("overlap",)}


def test_runs_of_other_requests_are_not_paired_which_is_told(tmp_path: Path) -> None:
    write_queue_run(tmp_path / "0", "fcfs")
    write_queue_run(tmp_path / "1", "sjf", num_requests=59)
    comparisons, notes = compare(layout_of(tmp_path), MEASURES)
    assert comparisons == []
    assert notes == ["fcfs and sjf served other requests with seed 1: not compared"]


def test_any_setting_can_be_the_baseline_and_an_unknown_one_is_an_error(tmp_path: Path) -> None:
    write_experiment(tmp_path, seeds=(1,))
    assert layout_of(tmp_path, baseline="sjf").settings == (("sjf",), ("fcfs",))
    assert layout_of(tmp_path, baseline="scheduler=sjf").settings[0] == ("sjf",)
    with pytest.raises(UserError, match=r"--baseline 'sjv'.*did you mean 'sjf'"):
        layout_of(tmp_path, baseline="sjv")


def test_identical_runs_are_counted_once(tmp_path: Path) -> None:
    first = write_queue_run(tmp_path / "0", config_hash="same")
    second = write_queue_run(tmp_path / "1", config_hash="same")
    found = found_in(tmp_path)
    assert [run.folder for run in found.runs] == [first]
    assert found.notes == [f"{second}: the same config and seed as {first}; counted once"]


def test_the_same_config_on_other_code_is_another_setting(tmp_path: Path) -> None:
    for number in range(2):
        write_queue_run(tmp_path / str(number), config_hash="same", commit=f"{number:040}"[::-1])
    layout = layout_of(tmp_path)
    assert layout.setting_axes == ("commit",)
    assert len(layout.settings) == 2


def test_unfinished_runs_are_left_out_and_told(tmp_path: Path) -> None:
    write_queue_run(tmp_path / "0")
    (write_queue_run(tmp_path / "1", "sjf") / RESULT).unlink()
    found = found_in(tmp_path)
    assert len(found.runs) == 1
    assert found.notes == [f"left out, not finished: 1 ({tmp_path / '1'})"]


def test_a_folder_without_runs_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no finished run"):
        found_in(tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        found_in(tmp_path / "nowhere")
    (write_queue_run(tmp_path / "0") / RESULT).unlink()
    with pytest.raises(UserError, match="1 were begun and not finished"):
        found_in(tmp_path)


def test_a_damaged_run_is_told_with_its_file_and_line(tmp_path: Path) -> None:
    path = write_queue_run(tmp_path / "0") / REQUESTS
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join([*lines[:3], "1,2", *lines[4:]]), encoding="utf-8")
    with pytest.raises(UserError, match=r"requests\.csv, line 4"):
        found_in(tmp_path)
    (tmp_path / "0" / RESULT).write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match=r"result\.json"):
        found_in(tmp_path)
