"""`tokenyard report DIR`: what is written, told and refused."""

from __future__ import annotations

import csv
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
from report_runs import write_experiment, write_queue_run
from tokenyard.cli import run
from tokenyard.errors import UserError
from tokenyard.experiments.report.write import Report, write_report

PICTURES = {
    "differences",
    "cdf_ttft",
    "cdf_tpot",
    "latency_load",
    "goodput_load",
    "pareto_ttft_throughput",
    "pareto_tpot_goodput",
    "client_service",
    "kv_usage",
    "waiting",
    "gantt",
}


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run(["report", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])  # type: ignore[no-any-return]


def test_json_says_where_everything_is_and_what_was_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = report(capsys, "--no-pictures", str(write_experiment(tmp_path)))
    assert found["folder"] == str(tmp_path / "report")
    assert all(Path(path).is_file() for path in [found["page"], *found["files"]])
    assert (found["runs"], found["settings"]) == (12, ["fcfs", "sjf"])
    ttft = [row for row in found["comparison"] if row["measure"] == "ttft_mean_s"]
    assert [row["workload.time_scale"] for row in ttft] == ["1.0", "0.8"]
    assert all(row["difference"] < 0 and row["seeds"] == 3 for row in ttft)
    assert all(row["ci95_low"] < row["difference"] < row["ci95_high"] for row in ttft)


def test_tables_have_the_metrics_of_the_runs(tmp_path: Path) -> None:
    write_experiment(tmp_path)
    write_report(tmp_path, has_pictures=False)
    runs = rows_of(tmp_path / "report" / "runs.csv")
    assert len(runs) == 12
    for row in runs:
        metrics = json.loads((tmp_path / row["folder"] / "result.json").read_text(encoding="utf-8"))["metrics"]
        assert float(row["ttft_mean_s"]) == metrics["ttft"]["mean"]
        assert float(row["tpot_p99_ms"]) == pytest.approx(1e3 * metrics["tpot"]["p99"])
        assert float(row["attainment_percent"]) == pytest.approx(100 * metrics["attainment"])
    settings = rows_of(tmp_path / "report" / "settings.csv")
    mean = sum(float(row["ttft_mean_s"]) for row in runs[:3]) / 3
    assert float(settings[0]["ttft_mean_s"]) == pytest.approx(mean)
    assert (tmp_path / "report" / "comparison.md").read_text(encoding="utf-8").startswith("| workload.time_scale |")


def test_parquet_has_the_rows_of_the_csv(tmp_path: Path) -> None:
    import pyarrow.parquet

    write_experiment(tmp_path, seeds=(1,))
    write_report(tmp_path, has_pictures=False)
    for name in ("runs", "settings", "comparison"):
        table = pyarrow.parquet.read_table(tmp_path / "report" / f"{name}.parquet")
        rows = rows_of(tmp_path / "report" / f"{name}.csv")
        assert table.column_names == list(rows[0])
        assert [["" if cell is None else str(cell) for cell in row.values()] for row in table.to_pylist()] == [
            list(row.values()) for row in rows
        ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Of runs whose names try to be markup."""
    root = write_experiment(tmp_path_factory.mktemp("experiment"), seeds=(1,))
    write_queue_run(root / "9", "<script>alert(1)</script>", slowness=0.9)
    return write_report(root)


@pytest.fixture
def page(whole: Report) -> str:
    return (whole.folder / "report.html").read_text(encoding="utf-8")


def test_every_picture_is_written_as_png_and_svg(whole: Report) -> None:
    assert set(whole.pictures) == PICTURES
    for kind in ("png", "svg"):
        assert {path.stem for path in whole.folder.glob(f"*.{kind}")} == PICTURES
    assert all(path.is_file() for path in whole.files)


def test_the_page_needs_no_other_file_and_escapes_what_comes_from_outside(page: str) -> None:
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "a queue &amp; its &lt;clients&gt;" in page
    sources = re.findall(r"(?:src|href)=\"([^\"]*)\"", page)
    assert sum(source.startswith("data:image/svg+xml;base64,") for source in sources) == 11
    assert all(source.startswith(("data:image/svg+xml;base64,", "#")) for source in sources)
    assert not re.search(r"https?://|@import|url\(", page)
    assert 'name="viewport"' in page


def test_the_markdown_has_no_markup_that_comes_from_outside(whole: Report) -> None:
    text = (whole.folder / "report.md").read_text(encoding="utf-8")
    assert "<script" not in text
    assert "&lt;script>alert(1)&lt;/script>" in text


def test_every_anchor_of_the_page_exists(page: str) -> None:
    anchors, ids = set(re.findall(r'href="#([^"]*)"', page)), set(re.findall(r'id="([^"]*)"', page))
    assert anchors <= ids
    assert len(anchors) > 10


def test_one_seed_is_said_to_give_no_interval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, "--no-pictures", str(write_experiment(tmp_path, seeds=(1,))))
    assert {row["verdict"] for row in found["comparison"]} <= {"one seed: no interval"}
    assert any("one seed: no intervals" in note for note in found["notes"])


def test_a_terminal_gets_the_comparison_and_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_experiment(tmp_path)
    assert run(["report", "--no-pictures", str(tmp_path), "--to", str(tmp_path / "elsewhere")]) == 0
    out = capsys.readouterr().out
    assert "Mean TTFT (s)" in out
    assert "sjf minus fcfs" in out
    assert out.splitlines()[-1] == str(tmp_path / "elsewhere" / "report.html")


def test_a_report_replaces_an_earlier_one_and_nothing_else(tmp_path: Path) -> None:
    write_experiment(tmp_path / "runs", seeds=(1,))
    write_report(tmp_path / "runs", has_pictures=False)
    again = write_report(tmp_path / "runs", has_pictures=False)
    assert again.notes == write_report(tmp_path / "runs", has_pictures=False).notes
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(UserError, match="is no report; give another folder with --to"):
        write_report(tmp_path / "runs", to=tmp_path / "mine", has_pictures=False)
    assert (tmp_path / "mine" / "thesis.tex").is_file()


def test_missing_libraries_are_told_and_leave_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_experiment(tmp_path, seeds=(1,))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = write_report(tmp_path)
    assert found.pictures == ()
    assert not list(found.folder.glob("*.parquet"))
    assert (found.folder / "report.html").is_file()
    for name, lost in (("matplotlib", "pictures"), ("pyarrow", "Parquet files")):
        assert f"no {lost}: {name} is not installed; pip install 'tokenyard[experiments]'" in found.notes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["scheduler=sjf", "."], "takes no config"),
        ([], "takes one folder, got 0"),
        (["a", "b"], "takes one folder, got 2"),
        ([""], "takes one folder, got ''"),
        (["nowhere"], "no such folder"),
    ],
)
def test_wrong_use_is_one_clear_line(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["report", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_the_highest_load_that_meets_the_slos_is_interpolated(tmp_path: Path) -> None:
    for number, time_scale in enumerate((4.0, 2.0, 1.0)):
        write_queue_run(tmp_path / str(number), time_scale=time_scale)
    found = write_report(tmp_path, has_pictures=False).table("capacity")
    assert found is not None
    ((rate, is_at_least),) = found.rows
    runs = rows_of(tmp_path / "report" / "runs.csv")
    attained = {float(row["workload.time_scale"]): float(row["attainment_percent"]) for row in runs}
    assert attained[4.0] >= 90 > attained[1.0]
    assert isinstance(rate, float)
    assert is_at_least is False


def test_a_report_says_of_what_its_runs_were_made(tmp_path: Path) -> None:
    """Who gets it has nothing else: the licence of a trace, the latency model, the settings that all runs share."""
    for number, scheduler in enumerate(("fcfs", "sjf")):
        shared = ("latency=linear", "latency.per_step=0.02", "experiment.dir=/somewhere")
        write_queue_run(tmp_path / str(number), scheduler, overrides=(f"scheduler={scheduler}", *shared))
    write_report(tmp_path, has_pictures=False)
    text = (tmp_path / "report" / "report.md").read_text(encoding="utf-8")
    rows = dict(line.strip("| ").split(" | ") for line in text.partition("How the runs were made")[2].splitlines()[4:])
    assert rows["workload"] == "synthetic: a queue & its &lt;clients>"
    assert rows["latency"] == "constant: set by hand"
    assert rows["every run"] == "latency=linear latency.per_step=0.02"
    page = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    assert "latency=linear latency.per_step=0.02" in page
