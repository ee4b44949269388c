"""The folder of a run: what was written is read back exactly, and what is not whole is known not to be."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_records import Row, record, some_rows, table
from tokenyard.errors import UserError
from tokenyard.experiments.records import REQUEST_COLUMNS, RunRecord, StepTable, TokenGaps
from tokenyard.experiments.run_folder import forget_run, is_done, read_run, write_run
from tokenyard.experiments.run_tables import read_requests, write_request_table

FLOATS = st.floats(allow_nan=False, allow_infinity=False, width=64)


def columns(value: object) -> dict[str, object]:
    """A table's columns as bytes and types, and whatever is no array as it is."""
    found = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}  # type: ignore[arg-type]
    return {
        name: (column.dtype.str, column.tobytes()) if isinstance(column, np.ndarray) else column
        for name, column in found.items()
    }


def assert_same(found: RunRecord, wanted: RunRecord) -> None:
    assert columns(found.requests) == columns(wanted.requests)
    assert columns(found.gaps) == columns(wanted.gaps)
    assert found.totals == wanted.totals
    assert (found.steps is None) == (wanted.steps is None)
    if found.steps is not None and wanted.steps is not None:
        assert columns(found.steps) == columns(wanted.steps)


def some_steps(times: list[float]) -> StepTable:
    whole = np.arange(len(times), dtype=np.int32)
    return StepTable(
        start=np.array(times),
        end=-np.array(times),
        running=whole,
        waiting=whole + 1,
        prefill_tokens=whole + 2,
        decode_tokens=whole + 3,
        used_blocks=whole + 4,
    )


def in_order_of_appearance(run: RunRecord) -> RunRecord:
    """Clients are numbered as a collector does it."""
    requests = run.requests
    used = list(dict.fromkeys(number for number in requests.client.tolist() if number >= 0))
    numbers = {number: place for place, number in enumerate(used)} | {-1: -1}
    return replace(
        run,
        requests=replace(
            requests,
            client=np.array([numbers[number] for number in requests.client.tolist()], dtype=np.int32),
            clients=tuple(requests.clients[number] for number in used),
        ),
    )


@pytest.fixture
def run() -> RunRecord:
    return record([Row(arrival=0.1, scheduled=0.2, first=0.3, finish=1 / 3, output=2, client='a,"b"\n')])


@settings(max_examples=40, deadline=None)
@given(rows=some_rows(), gaps=st.lists(FLOATS, max_size=5), steps=st.none() | st.lists(FLOATS, max_size=4))
def test_what_was_written_is_read_back_exactly(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Row], gaps: list[float], steps: list[float] | None
) -> None:
    folder = tmp_path_factory.mktemp("run")
    told = TokenGaps(seconds=np.array(gaps, dtype=float), counts=np.arange(len(gaps)) + 1, relative_error=0.001)
    wanted = in_order_of_appearance(record(rows, gaps=told, steps=None if steps is None else some_steps(steps)))
    write_run(folder, wanted, {"ttft": {"mean": 0.1}}, {"seed": 3}, ["seed=3"], times={"seconds": 1.5})
    found = read_run(folder)
    assert_same(found.record, wanted)
    assert (found.metrics, found.facts, found.overrides) == ({"ttft": {"mean": 0.1}}, {"seed": 3}, ["seed=3"])
    assert found.times == {"seconds": 1.5}
    assert found.record.facts == found.facts


def test_a_folder_is_done_only_when_all_of_it_is_there(tmp_path: Path, run: RunRecord) -> None:
    write_run(tmp_path, run, {"n": 1}, {}, [])
    assert is_done(tmp_path)
    with pytest.raises(TypeError):
        write_run(tmp_path, run, {"n": object()}, {}, [])
    assert not is_done(tmp_path)  # the tables of the second run, and no result of the first beside them
    with pytest.raises(UserError, match="no run has been finished"):
        read_run(tmp_path)


def test_a_run_without_steps_leaves_no_steps_of_an_earlier_one(tmp_path: Path, run: RunRecord) -> None:
    write_run(tmp_path, replace(run, steps=some_steps([1.0])), {}, {}, [])
    write_run(tmp_path, run, {}, {}, [])
    assert read_run(tmp_path).record.steps is None


def test_a_forgotten_run_leaves_nothing(tmp_path: Path, run: RunRecord) -> None:
    write_run(tmp_path, replace(run, steps=some_steps([1.0])), {}, {}, [])
    forget_run(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_first_columns_are_those_of_simulates_own_file(tmp_path: Path, run: RunRecord) -> None:
    write_request_table(run.requests, tmp_path / "short.csv", REQUEST_COLUMNS)
    write_request_table(table([]), tmp_path / "long.csv")
    short = (tmp_path / "short.csv").read_text().splitlines()[0]
    assert (tmp_path / "long.csv").read_text().splitlines()[0] == f"{short},session,priority,deadline,status"


def test_a_table_longer_than_a_piece_is_whole(tmp_path: Path) -> None:
    wanted = table([Row(arrival=number / 7) for number in range(10_000)])
    write_request_table(wanted, tmp_path / "requests.csv")
    assert columns(read_requests(tmp_path / "requests.csv")) == columns(wanted)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda text: text.replace("0.1,", "soon,"), r"requests.csv, row 1: arrival='soon'"),
        (lambda text: text.replace("finished", "gone"), r"requests.csv, row 1: status='gone'"),
        (lambda text: text.replace(",output", ",outputs"), r"lacks the columns output"),
        (lambda text: text.rstrip("\n") + ",1\n", r"line \d+: has 16 values for 15 columns"),
        (lambda text: "", r"lacks the columns id, client"),
    ],
)
def test_a_table_changed_by_hand_is_told_with_its_row(
    tmp_path: Path, run: RunRecord, change: object, told: str
) -> None:
    write_run(tmp_path, run, {}, {}, [])
    path = tmp_path / "requests.csv"
    path.write_text(change(path.read_text()))  # type: ignore[operator]
    with pytest.raises(UserError, match=told):
        read_run(tmp_path)


@pytest.mark.parametrize("text", ["", "[1]", "{}", '{"metrics": {}, "facts": {}, "overrides": [], "totals": {"x": 1}}'])
def test_a_result_that_is_none_is_refused(tmp_path: Path, run: RunRecord, text: str) -> None:
    write_run(tmp_path, run, {}, {}, [])
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(UserError, match=r"result\.json"):
        read_run(tmp_path)


@pytest.mark.parametrize("overrides", [7, "seed=1", ["seed=1", 2], None])
def test_overrides_that_are_no_texts_are_told(tmp_path: Path, run: RunRecord, overrides: object) -> None:
    write_run(tmp_path, run, {}, {}, [])
    result = json.loads((tmp_path / "result.json").read_text())
    (tmp_path / "result.json").write_text(json.dumps({**result, "overrides": overrides}))
    with pytest.raises(UserError, match=r"result\.json: its overrides are no list of texts"):
        read_run(tmp_path)


def test_a_table_that_lacks_is_told(tmp_path: Path, run: RunRecord) -> None:
    write_run(tmp_path, run, {}, {}, [])
    (tmp_path / "gaps.csv").unlink()
    with pytest.raises(UserError, match=r"gaps\.csv: there is no such file"):
        read_run(tmp_path)


def test_the_result_is_plain_json(tmp_path: Path, run: RunRecord) -> None:
    write_run(tmp_path, run, {"a": 0.1}, {"b": None}, ["seed=1"])
    assert json.loads((tmp_path / "result.json").read_text())["metrics"] == {"a": 0.1}
