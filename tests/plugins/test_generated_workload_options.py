"""Mistakes in the options of generated workloads, and in histograms of lengths."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest
from made_workloads import workload
from tokenyard.errors import ConfigError
from tokenyard_plugins._generated import lengths
from tokenyard_plugins._generated.draws import generator
from tokenyard_plugins._generated.length_histograms import packaged_histograms
from tokenyard_plugins._generated.length_options import LengthOptions

NUM_DRAWN = 20_000


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["synthetic", "rate=0"], r"rate=0\.0 is not valid"),
        (["synthetic", "rate=.nan"], r"rate=nan is not valid"),
        (["synthetic", "burstiness=0"], r"burstiness=0\.0 is not valid: .* at least 0\.001, or inf"),
        (["synthetic", "num_requests=0"], r"num_requests=0 is not valid: it must be from 1 to"),
        (["synthetic", "prompt=0"], r"prompt=0 is not valid: it must be from 1 to 16777216"),
        (["synthetic", "prompt=1.5"], r"workload\.prompt must be a whole number or a mapping"),
        (["synthetic", "deadline=0"], r"deadline=0\.0 is not valid"),
        (["synthetic", "priorities=[0,0]"], r"priorities=\[0\.0, 0\.0\] is not valid"),
        (["synthetic", "prompt.kind=constant"], r"workload\.prompt: kind=constant needs value"),
        (
            ["synthetic", "prompt={kind: lognormal, mean: 5}"],
            r"workload\.prompt: kind=lognormal needs mean and cv; cv is not given",
        ),
        (
            ["synthetic", "prompt={kind: geometric, mean: 5, value: 3}"],
            r"kind=geometric does not know value, but max, mean, min; leave it out, or set it to null",
        ),
        (["synthetic", "prompt={kind: normal}"], r"workload\.prompt\.kind must be one of 'constant'"),
        (["synthetic", "prompt={kind: uniform, min: 5, max: 4}"], r"max=4 is not valid"),
        (["synthetic", "prompt={kind: geometric, mean: 0.5}"], r"mean=0\.5 is not valid"),
        (
            ["synthetic", "prompt={kind: mixture, values: [1, 2], weights: [1]}"],
            r"as many weights as values or parts, from 1 to 10000; got 1 and 2",
        ),
        (
            ["synthetic", "prompt={kind: mixture, weights: [1]}"],
            r"needs either values, which are numbers, or parts",
        ),
        (
            ["synthetic", "prompt={kind: mixture, values: [1], weights: [-1]}"],
            r"weights=\[-1\.0\] is not valid",
        ),
        (
            ["synthetic", "prompt={kind: mixture, parts: [{kind: constant, valu: 1}], weights: [1]}"],
            r"unknown key 'workload\.prompt\.parts\[0\]\.valu'; did you mean 'workload\.prompt\.parts\[0\]\.value'",
        ),
        (
            ["synthetic", "prompt={kind: empirical, histogram: azure}"],
            r"unknown histogram 'azure'; there is: azure_code_output, .* or the path of a \.csv file",
        ),
        (
            ["synthetic", "prompt={kind: empirical, histogram: /nowhere/at_all.csv}"],
            r"histogram '/nowhere/at_all\.csv' cannot be read",
        ),
        (["synthetic", "profile.kind=on_off"], r"workload\.profile: kind=on_off needs on_time and"),
        (
            ["synthetic", "profile={kind: ramp, final_rate: 2, ramp_time: 9, on_time: 3}"],
            r"kind=ramp does not know on_time; leave it out, or set it to null",
        ),
        (
            ["synthetic", "profile={kind: ramp, final_rate: 0, ramp_time: 9}"],
            r"final_rate=0\.0 is not valid",
        ),
        (["shared_prefix", "num_groups=0"], r"num_groups=0 is not valid"),
        (
            ["shared_prefix", "order=sorted"],
            r"workload\.order must be one of 'interleaved', 'shuffled'",
        ),
        (
            ["shared_prefix", "group_size=1000000000"],
            r"num_groups \* group_size=8000000000 is not valid",
        ),
        (["multi_turn", "think_time=-1"], r"think_time=-1\.0 is not valid: .* at least 0"),
        (["multi_turn", "think_time_cv=31"], r"think_time_cv=31\.0 is not valid"),
        (["multi_turn", "system_prompt=-1"], r"system_prompt=-1 is not valid"),
        (["clients", "members=[]"], r"the number of members=0 is not valid"),
        (
            ["clients", "members=[{name: a}]"],
            r"members\[0\]: client 'a' needs either a rate or a weight",
        ),
        (["clients", "members=[{name: a, weight: 1}]"], r"set workload\.rate"),
        (["clients", "rate=3"], r"rate=3\.0 is nobody's: no client has a weight"),
        (["clients", "num_requests=null"], r"client 'a' never ends; give it stop or num_requests"),
        (
            ["clients", "members=[{name: a, rate: 1, start: 5, stop: 5}]"],
            r"stop=5\.0 is not valid: it must be seconds, after start=5\.0",
        ),
    ],
)
def test_a_mistake_is_told_with_what_is_allowed(overrides: list[str], message: str) -> None:
    name, *options = overrides
    with pytest.raises(ConfigError, match=message) as caught:
        workload(name, *options)
    assert "\n" not in str(caught.value)
    assert "workload" in str(caught.value)


def test_a_histogram_of_ones_own_is_a_table(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text("length,count\n5,3\n9,1\n", encoding="utf-8")
    options = LengthOptions(kind="empirical", histogram=str(file))
    stream = lengths.length_stream(options, generator(0, "test"))
    counts = Counter(itertools.islice(stream, NUM_DRAWN))
    assert set(counts) == {5, 9}
    assert counts[5] / NUM_DRAWN == pytest.approx(0.75, rel=0.05)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"row 1: the columns must be low,high,count or length,count, got ''"),
        ("tokens,count\n1,1\n", r"row 1: the columns must be"),
        ("length,count\n", "has no rows"),
        ("length,count\n1,0\n", "every count is 0"),
        ("length,count\n1,1\n2\n", "row 3 has 1 fields, and the header has 2"),
        ("length,count\n1,1\n2,x\n", "row 3, column count: a whole number from 0 is wanted, got 'x'"),
        ("length,count\n1,1\n2,-3\n", "row 3, column count: a whole number from 0"),
        ("length,count\n0,1\n", "row 2: a length is from 1 to 16777216"),
        ("low,high,count\n5,4,1\n", "row 2: a length is from 1 to 16777216, and low at most high; got 5,4,1"),
        ("length,count\n1," + "1" * 2000 + "\n", "row 2 is too long"),
        ("length,count\n" + "1,1\n" * 100_001, "more than 100000 rows"),
    ],
)
def test_a_bad_histogram_is_told_with_row_and_column(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.csv"
    file.write_text(text, encoding="utf-8")
    option = f"prompt={{kind: empirical, histogram: '{file}'}}"
    with pytest.raises(ConfigError, match=message):
        workload("synthetic", option)


def test_packaged_histograms_are_said_to_be_whose_they_are() -> None:
    folder = Path(lengths.__file__).parent / "histograms"
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert "CC-BY-4.0" in text
    assert all(f"`{name}.csv`" in text for name in packaged_histograms())
