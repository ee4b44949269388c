"""What the generated workloads draw: means and spreads, with fixed seeds and wide bounds, and what never varies."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_workloads import requests, workload
from tokenyard.experiments.simulation import run_simulated
from tokenyard.experiments.workloads import make_workload
from tokenyard.interfaces import OUTPUT
from tokenyard.launch.compose import load_engine_config
from tokenyard_plugins._generated.arrival_options import ArrivalOptions, ProfileOptions
from tokenyard_plugins._generated.arrival_times import arrival_times
from tokenyard_plugins._generated.draws import CHUNK, generator, shuffled
from tokenyard_plugins._generated.length_options import LengthOptions, LengthSpec
from tokenyard_plugins._generated.lengths import length_stream, make_lengths

NUM_DRAWN = 20_000


def lengths(spec: LengthSpec, seed: int = 0) -> np.ndarray:
    return np.array(list(itertools.islice(length_stream(spec, generator(seed, "test")), NUM_DRAWN)))


def arrivals(options: ArrivalOptions, count: int = NUM_DRAWN) -> np.ndarray:
    return np.array(list(itertools.islice(arrival_times(options, generator(0, "test")), count)))


def cv(values: np.ndarray) -> float:
    return float(values.std() / values.mean())


@pytest.mark.parametrize(
    ("options", "mean", "spread"),
    [
        (LengthOptions(kind="constant", value=7), 7, 0),
        (LengthOptions(kind="uniform", min=10, max=30), 20, math.sqrt((21**2 - 1) / 12) / 20),
        (LengthOptions(kind="lognormal", mean=500, cv=1.2), 500, 1.2),
        (LengthOptions(kind="geometric", mean=80), 80, math.sqrt(1 - 1 / 80)),
        (LengthOptions(kind="mixture", values=(10, 100), weights=(0.9, 0.1)), 19, 27 / 19),
        (
            LengthOptions(
                kind="mixture",
                parts=(LengthOptions(kind="constant", value=10), LengthOptions(kind="uniform", min=90, max=110)),
                weights=(9, 1),
            ),
            19,
            math.sqrt(0.09 * 90**2 + 0.1 * (21**2 - 1) / 12) / 19,
        ),
        (LengthOptions(kind="empirical", histogram="azure_conv_prompt"), 1154.7, 0.960),
        (LengthOptions(kind="empirical", histogram="azure_conv_output"), 211.1, 0.771),
        (LengthOptions(kind="empirical", histogram="azure_code_output"), 27.9, 2.147),
    ],
    ids=lambda value: value.kind if isinstance(value, LengthOptions) else None,
)
def test_lengths_have_the_mean_and_the_spread_that_was_asked_for(
    options: LengthOptions, mean: float, spread: float
) -> None:
    drawn = lengths(options)
    assert drawn.mean() == pytest.approx(mean, rel=0.05)
    assert cv(drawn) == pytest.approx(spread, rel=0.1, abs=1e-12)
    assert make_lengths(options).mean == pytest.approx(mean, rel=0.005)


def test_a_mixture_draws_its_values_as_often_as_it_says() -> None:
    counts = Counter(lengths(LengthOptions(kind="mixture", values=(10, 100), weights=(9, 1))).tolist())
    assert set(counts) == {10, 100}
    assert counts[100] / NUM_DRAWN == pytest.approx(0.1, rel=0.1)


def test_bounds_raise_and_lower_what_is_drawn() -> None:
    drawn = lengths(LengthOptions(kind="lognormal", mean=100, cv=2, min=50, max=200))
    assert (drawn.min(), drawn.max()) == (50, 200)


def test_a_geometric_length_of_mean_1_is_1() -> None:
    assert set(lengths(LengthOptions(kind="geometric", mean=1)).tolist()) == {1}


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_intervals_have_the_rate_and_the_spread_that_was_asked_for(burstiness: float) -> None:
    intervals = np.diff(arrivals(ArrivalOptions(rate=5, burstiness=burstiness)))
    assert intervals.mean() == pytest.approx(0.2, rel=0.05)
    assert cv(intervals) == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_a_poisson_process_leaves_exponential_gaps() -> None:
    gaps = np.diff(arrivals(ArrivalOptions(rate=2)))
    for seconds in (0.1, 0.5, 1.0):
        assert (gaps > seconds).mean() == pytest.approx(math.exp(-2 * seconds), rel=0.05)


def test_without_burstiness_intervals_are_equal() -> None:
    assert arrivals(ArrivalOptions(rate=4, burstiness=math.inf), 5).tolist() == [0.25, 0.5, 0.75, 1.0, 1.25]


def test_nothing_arrives_while_it_is_off_and_as_much_as_ever_while_it_is_on() -> None:
    profile = ProfileOptions(kind="on_off", on_time=10, off_time=30)
    times = arrivals(ArrivalOptions(rate=3, profile=profile))
    assert ((times % 40) <= 10).all()
    assert len(times) / (times[-1] * 10 / 40) == pytest.approx(3, rel=0.05)


@pytest.mark.parametrize("final_rate", [20.0, 0.5])
def test_a_ramp_ends_at_its_final_rate_and_stays(final_rate: float) -> None:
    profile = ProfileOptions(kind="ramp", final_rate=final_rate, ramp_time=1000)
    times = arrivals(ArrivalOptions(rate=4, profile=profile))
    middle = np.searchsorted(times, 1000)
    assert middle == pytest.approx((4 + final_rate) / 2 * 1000, rel=0.05)
    first, last = np.searchsorted(times, [400, 600])
    assert (last - first) / 200 == pytest.approx((4 + final_rate) / 2, rel=0.1)
    assert (len(times) - middle) / (times[-1] - 1000) == pytest.approx(final_rate, rel=0.05)


@given(
    seed=st.integers(0, 2**32),
    rate=st.floats(1e-9, 1e9),
    burstiness=st.one_of(st.floats(1e-3, 1e6), st.just(math.inf)),
    profile=st.one_of(
        st.just(ProfileOptions()),
        st.builds(
            lambda on, off: ProfileOptions(kind="on_off", on_time=on, off_time=off),
            st.floats(1e-3, 1e6),
            st.floats(1e-3, 1e6),
        ),
        st.builds(
            lambda rate, time: ProfileOptions(kind="ramp", final_rate=rate, ramp_time=time),
            st.floats(1e-9, 1e9),
            st.floats(1e-3, 1e6),
        ),
    ),
    start=st.floats(0, 1e6),
)
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_arrivals_are_finite_and_in_order_whatever_the_options(
    seed: int, rate: float, burstiness: float, profile: ProfileOptions, start: float
) -> None:
    options = ArrivalOptions(rate=rate, burstiness=burstiness, profile=profile)
    times = list(itertools.islice(arrival_times(options, generator(seed, "test"), start), 2 * CHUNK + 10))
    assert all(math.isfinite(time) for time in times)
    assert times[0] >= start
    assert times == sorted(times)


@given(kinds=st.integers(1, 20), count=st.integers(1, 300), seed=st.integers(0, 2**32))
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
def test_a_shuffled_order_has_each_kind_as_often_as_the_others(kinds: int, count: int, seed: int) -> None:
    order = list(shuffled(kinds, count, generator(seed, "order")))
    assert Counter(order) == dict.fromkeys(range(kinds), count)


def test_a_shuffled_order_is_no_round_robin() -> None:
    """Of 100 kinds, the first 100 of 50,000 leave out about a share of 1/e."""
    first = list(itertools.islice(shuffled(100, 500, generator(0, "order")), 100))
    assert 50 <= len(set(first)) <= 77


SYNTHETIC = ("synthetic", "num_requests=3000", "prompt={kind: geometric, mean: 50}")


def test_a_request_is_the_same_in_a_longer_workload() -> None:
    assert requests(*SYNTHETIC, "num_requests=10") == requests(*SYNTHETIC)[:10]


@pytest.mark.parametrize("seed", [2**63 - 1, 5])
def test_any_seed_gives_requests_of_its_own(seed: int) -> None:
    assert requests(*SYNTHETIC, seed=seed) != requests(*SYNTHETIC)


def test_other_lengths_leave_arrivals_and_priorities_as_they_are() -> None:
    plain = requests(*SYNTHETIC, "priorities=[1,1]")
    other = requests(*SYNTHETIC, "priorities=[1,1]", "prompt=5", "output=7")
    assert [(one.arrival, one.priority) for one in plain] == [(one.arrival, one.priority) for one in other]
    assert {(one.num_prompt_tokens, one.num_output_tokens) for one in other} == {(5, 7)}


def test_priorities_come_as_often_as_they_are_said_to() -> None:
    counts = Counter(one.priority for one in requests(*SYNTHETIC, "priorities=[1,0,3]"))
    assert set(counts) == {0, 2}
    assert counts[2] / 3000 == pytest.approx(0.75, rel=0.05)


def test_a_length_is_given_whole_or_key_by_key() -> None:
    """The configuration of the queueing tests of issue 8."""
    config, catalogue = load_engine_config(
        [
            "workload=synthetic",
            "workload.num_requests=50000",
            "workload.rate=5",
            "workload.prompt.kind=constant",
            "workload.prompt.value=1",
            "workload.output={kind: mixture, values: [10, 100], weights: [0.9, 0.1]}",
        ]
    )
    found = list(make_workload(config, catalogue).requests())
    assert len(found) == 50_000
    assert {one.num_prompt_tokens for one in found} == {1}
    assert np.mean([one.num_output_tokens for one in found]) == pytest.approx(19, rel=0.03)
    assert found[-1].arrival == pytest.approx(10_000, rel=0.03)


@pytest.mark.parametrize("order", ["interleaved", "shuffled", "grouped"])
def test_the_requests_of_a_group_share_their_prefix_and_nothing_else(order: str) -> None:
    found = requests("shared_prefix", "num_groups=5", "group_size=7", f"order={order}")
    first, second = zip(*(one.content or () for one in found), strict=True)
    assert Counter(segment.content for segment in first) == dict.fromkeys(range(5), 7)
    assert len({segment.content for segment in second} | set(range(5))) == 5 + 35
    groups = [segment.content for segment in first]
    in_turn, in_a_row = [*range(5)] * 7, sorted([*range(5)] * 7)
    assert (groups == in_turn, groups == in_a_row) == (order == "interleaved", order == "grouped")


@pytest.mark.parametrize("order", ["interleaved", "shuffled"])
def test_the_most_prefix_hits_are_those_of_the_formula(order: str) -> None:
    """(n - 1) P / (n (P + U)), reached when each prompt is computed before the next one of its group comes."""
    prefix, suffix, size = 64, 32, 4
    config, catalogue = load_engine_config(
        [
            *("workload=shared_prefix", "workload.arrivals=sequential", f"workload.order={order}"),
            *("workload.num_groups=6", f"workload.group_size={size}", f"workload.prefix={prefix}"),
            *(f"workload.suffix={suffix}", "workload.output=2", "kv_cache.num_blocks=4096", "kv_cache.block_size=16"),
            *("executor=simulated", "latency=constant", "latency.per_step=0.01"),
        ]
    )
    table = run_simulated(config, catalogue).requests
    assert table.cached.sum() / table.prompt.sum() == (size - 1) * prefix / (size * (prefix + suffix))


def test_a_turn_comes_after_thinking_with_all_that_was_said() -> None:
    made = workload("multi_turn", "turns=3", "system_prompt=10", "think_time_cv=0")
    first = next(made.requests())
    (second,) = made.follow_ups(first, 50.0)
    (third,) = made.follow_ups(second, 100.0)
    assert (second.arrival, third.arrival) == (60.0, 110.0)
    assert first.content is not None
    assert second.content is not None
    assert third.content is not None
    answers = [(segment.content, segment.num_tokens) for segment in third.content if segment.content == OUTPUT]
    assert answers == [(OUTPUT, first.num_output_tokens), (OUTPUT, second.num_output_tokens)]
    assert tuple(second.content[:2]) == tuple(first.content)
    assert tuple(third.content[: len(second.content)]) == tuple(second.content)
    new = [segment.content for segment in third.content if segment.content != OUTPUT]
    assert len(set(new)) == len(new) == 4
    assert {one.session for one in (first, second, third)} == {"0"}
    assert made.follow_ups(third, 200.0) == ()


def test_a_conversation_ends_before_a_prompt_that_is_too_long() -> None:
    made = workload("multi_turn", "turns=9", "max_prompt=400")
    first = next(made.requests())
    (second,) = made.follow_ups(first, 1.0)
    assert second.num_prompt_tokens == 128 * 3
    assert made.follow_ups(second, 2.0) == ()


def test_thinking_takes_as_long_as_it_is_said_to() -> None:
    made = workload("multi_turn", "num_sessions=5000", "turns=2", "think_time_cv=2")
    thoughts = np.array([made.follow_ups(one, 7.0)[0].arrival - 7.0 for one in made.requests()])
    assert thoughts.mean() == pytest.approx(10, rel=0.1)
    assert cv(thoughts) == pytest.approx(2, rel=0.1)


def test_conversations_are_found_in_the_prefix_cache_of_a_simulation() -> None:
    config, catalogue = load_engine_config(
        [
            *("workload=multi_turn", "workload.num_sessions=5", "workload.turns=3", "workload.prompt=64"),
            *("workload.output=16", "kv_cache.num_blocks=4096", "kv_cache.block_size=16"),
            *("executor=simulated", "latency=constant", "latency.per_step=0.01"),
        ]
    )
    table = run_simulated(config, catalogue).requests
    # Of an answer the last token was never computed, so its block is not found.
    found = sorted(zip(table.prompt.tolist(), table.cached.tolist(), strict=True))
    assert found == [(64, 0)] * 5 + [(64 + 80, 64)] * 5 + [(64 + 160, 64 + 80)] * 5


def test_each_client_has_its_own_rate_times_and_lengths() -> None:
    members = (
        "{name: a, rate: 4, prompt: 10, stop: 500}",
        "{name: b, rate: 2, output: 20, start: 250, priority: 3}",
        "{name: c, rate: 100, num_requests: 30}",
    )
    found = requests(
        "clients",
        f"members=[{','.join(members)}]",
        "stop=1000",
        "num_requests=null",
    )
    by_client = {name: [one for one in found if one.client == name] for name in "abc"}
    assert len(by_client["a"]) == pytest.approx(4 * 500, rel=0.1)
    assert len(by_client["b"]) == pytest.approx(2 * 750, rel=0.1)
    assert len(by_client["c"]) == 30
    assert max(one.arrival for one in by_client["a"]) < 500
    assert min(one.arrival for one in by_client["b"]) > 250
    assert max(one.arrival for one in found) < 1000
    assert {one.num_prompt_tokens for one in by_client["a"]} == {10}
    assert {(one.num_output_tokens, one.priority) for one in by_client["b"]} == {(20, 3)}


def test_one_more_client_changes_nothing_of_the_others() -> None:
    without = requests("clients", "members=[{name: a, rate: 4}]", "stop=60")
    both = requests("clients", "members=[{name: b, rate: 1}, {name: a, rate: 4}]", "stop=60")
    assert [one for one in both if one.client == "a"] == without


def test_weights_share_the_rate() -> None:
    members = "members=[{name: a, weight: 1}, {name: b, weight: 3}]"
    found = requests("clients", members, "rate=8", "num_requests=8000")
    counts = Counter(one.client for one in found)
    assert counts["b"] / counts["a"] == pytest.approx(3, rel=0.1)
    assert found[-1].arrival == pytest.approx(1000, rel=0.05)


@pytest.mark.parametrize(
    ("suite", "names"),
    [
        ("overload", "ab"),
        ("eight", ["c1", "c2", "c3", "c4", "c5", "c6", "c7", "c8"]),
        ("weighted", ["c1", "c2", "c3", "c4"]),
        ("on_off", "ab"),
        ("ramp", "ab"),
        ("short_long", ["short", "long"]),
        ("shift", "ab"),
    ],
)
def test_a_suite_of_clients_lasts_ten_minutes_or_more(suite: str, names: list[str]) -> None:
    config, catalogue = load_engine_config([f"workload=clients_{suite}"])
    found = list(make_workload(config, catalogue).requests())
    assert {one.client for one in found} == {*names}
    assert 590 < found[-1].arrival < 900
