"""What pictures show: their series, not their pixels."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from report_runs import NUM_REQUESTS, queue_record, write_experiment, write_queue_run
from tokenyard.experiments.report.comparison import compare
from tokenyard.experiments.report.digest import GANTT_REQUESTS, LEVELS, digest
from tokenyard.experiments.report.layout import Layout, make_layout
from tokenyard.experiments.report.measures import MEASURES, TTFT
from tokenyard.experiments.report.pictures.cdf import ttft_cdf
from tokenyard.experiments.report.pictures.clients import client_service
from tokenyard.experiments.report.pictures.differences import differences
from tokenyard.experiments.report.pictures.gantt import gantt
from tokenyard.experiments.report.pictures.load import goodput_against_load, latency_against_load
from tokenyard.experiments.report.pictures.pareto import Place, front, ttft_throughput
from tokenyard.experiments.report.pictures.style import GREY, Picture, save, spread, styled
from tokenyard.experiments.report.pictures.timeline import kv_usage, waiting
from tokenyard.experiments.report.runs import find_runs
from tokenyard.experiments.slo import SLO


def layout_of(root: Path) -> Layout:
    return make_layout(find_runs(root, left_out=root / "report").runs)


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Layout:
    return layout_of(write_experiment(tmp_path_factory.mktemp("experiment")))


@pytest.fixture(autouse=True)
def in_style() -> Iterator[None]:
    with styled():
        yield


def panels(picture: Picture | None) -> list[Axes]:
    assert picture is not None
    return [panel for panel in picture.figure.axes if panel.get_visible()]


def test_the_same_runs_give_the_same_bytes(tmp_path: Path) -> None:
    write_experiment(tmp_path / "runs", seeds=(1,))
    texts = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for make in (ttft_cdf, ttft_throughput):
            picture = make(layout_of(tmp_path / "runs"))
            assert picture is not None
            save(picture, tmp_path / name)
        texts.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    assert len(texts[0]) == 4
    assert texts[0] == texts[1]


def test_every_axis_has_a_title(layout: Layout) -> None:
    for make in (ttft_cdf, latency_against_load, ttft_throughput, client_service, kv_usage, gantt):
        found = panels(make(layout))
        assert any(panel.get_xlabel() for panel in found)
        assert found[0].get_ylabel()


def test_a_cdf_has_a_line_of_all_seeds_and_one_of_each(layout: Layout) -> None:
    found = panels(ttft_cdf(layout))
    assert [panel.get_title(loc="left") for panel in found] == ["time_scale=1.0", "time_scale=0.8"]
    assert all(len(panel.lines) == 2 * (1 + 3) for panel in found)
    runs = layout.runs(("1.0",), ("fcfs",)).values()
    pooled = np.quantile(np.concatenate([run.digest.ttft for run in runs]), LEVELS)[2:-2]
    assert np.allclose(np.asarray(found[0].lines[0].get_xdata(), dtype=float), pooled)


def test_the_digest_has_the_quantiles_of_the_requests() -> None:
    record = queue_record(1, slowness=1.0, time_scale=1.0)
    found = digest(record)
    ttft = record.requests.first_token - record.requests.arrival
    assert found.ttft[200] == pytest.approx(np.median(ttft))
    assert found.tpot == pytest.approx(0.1)
    assert found.arrival_rate == pytest.approx((NUM_REQUESTS - 1) / np.ptp(record.requests.arrival))


def test_latency_against_load_joins_the_means_over_seeds(layout: Layout) -> None:
    found = panels(latency_against_load(layout))
    line = found[0].lines[0]
    loads = [layout.load_of(("1.0",)), layout.load_of(("0.8",))]
    runs = [layout.runs((one,), ("fcfs",)).values() for one in ("1.0", "0.8")]
    means = [np.mean([TTFT.of(run.metrics) or 0.0 for run in of_load]) for of_load in runs]
    assert np.asarray(line.get_xdata(), dtype=float) == pytest.approx(loads)
    assert np.asarray(line.get_ydata(), dtype=float) == pytest.approx(means)
    assert {text.get_text() for text in found[0].texts} == {"fcfs", "sjf"}


def test_goodput_needs_slos_and_load_needs_two_loads(tmp_path: Path) -> None:
    write_queue_run(tmp_path / "0", slo=SLO())
    write_queue_run(tmp_path / "1", slo=SLO(), time_scale=0.5)
    assert goodput_against_load(layout_of(tmp_path)) is None
    assert latency_against_load(layout_of(tmp_path)) is not None
    write_queue_run(tmp_path / "one" / "0", slo=SLO(ttft=1.0))
    assert goodput_against_load(layout_of(tmp_path / "one")) is None


def test_service_ends_at_what_each_client_got(layout: Layout) -> None:
    record = queue_record(1, slowness=1.0, time_scale=0.8)
    table = record.requests
    got = {
        name: float((table.prompt + 2 * table.output)[table.client == number].sum()) / 1e3
        for number, name in enumerate(table.clients)
    }
    panel = panels(client_service(layout))[0]
    ends = sorted(float(np.asarray(line.get_ydata())[-1]) for line in panel.lines)
    assert ends == pytest.approx(sorted(got.values()))
    for line in panel.lines:
        assert (np.diff(np.asarray(line.get_ydata(), dtype=float)) >= -1e-9).all()


def test_a_gantt_shows_the_same_requests_of_every_setting(layout: Layout) -> None:
    found = panels(gantt(layout))
    assert len(found) == 2
    assert all(len(panel.patches) == 3 * GANTT_REQUESTS for panel in found)
    assert len({tuple(text.get_text() for text in panel.get_yticklabels()) for panel in found}) == 1


def test_kv_usage_is_the_blocks_that_steps_held(layout: Layout) -> None:
    for panel in panels(kv_usage(layout)):
        values = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in panel.lines])
        assert set(values[~np.isnan(values)]) == {7.0}


def test_no_line_leaves_its_panel(layout: Layout) -> None:
    for make in (kv_usage, waiting, client_service, ttft_cdf, latency_against_load, goodput_against_load):
        for panel in panels(make(layout)):
            bottom, top = panel.get_ylim()
            values = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in panel.lines])
            assert bottom <= np.nanmin(values)
            assert np.nanmax(values) <= top


def test_differences_are_drawn_grey_when_they_are_not_significant(layout: Layout) -> None:
    comparisons, _ = compare(layout, MEASURES)
    picture = differences(layout, comparisons)
    drawn = [line.get_color() for panel in panels(picture) for line in panel.lines if line.get_marker() == "o"]
    shown = {panel.get_title(loc="left").partition(":")[0] for panel in panels(picture)}
    told = [one for one in comparisons if one.measure.label in shown]
    assert len(drawn) == len(told)
    assert drawn.count(GREY) == sum(one.is_better is None for one in told)


def test_many_settings_get_a_panel_each_with_the_others_in_grey(tmp_path: Path) -> None:
    for number in range(9):
        write_queue_run(tmp_path / str(number), f"policy{number}", slowness=0.5 + 0.1 * number)
    found = panels(ttft_cdf(layout_of(tmp_path)))
    assert [panel.get_title(loc="left") for panel in found] == [f"policy{number}" for number in range(9)]
    assert all([line.get_color() == GREY for line in panel.lines] == 8 * [True] + [False] for panel in found)


places = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=12)


@given(places)
def test_a_front_is_what_no_other_place_beats(pairs: list[tuple[int, int]]) -> None:
    every = [Place(float(gain), float(cost), str(number), number) for number, (gain, cost) in enumerate(pairs)]
    best = front(every)
    assert best
    for one in every:
        beaten = [
            other
            for other in every
            if (other.gain > one.gain and other.cost <= one.cost) or (other.gain >= one.gain and other.cost < one.cost)
        ]
        assert (one in best) == (not beaten)


@given(st.lists(st.floats(0, 1000), max_size=20), st.floats(1, 50))
def test_labels_are_moved_apart_and_no_more_than_need_be(heights: list[float], step: float) -> None:
    heights = sorted(heights)
    found = spread(heights, step)
    assert all(after - before >= step - 1e-6 for before, after in pairwise(found))
    if all(after - before > step for before, after in pairwise(heights)):
        assert found == pytest.approx(heights)
    assert sum(found) == pytest.approx(sum(heights), abs=1e-3)
