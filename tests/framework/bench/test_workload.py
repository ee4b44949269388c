"""The throughput workload: shapes and prompts that every engine gets; figures that add up."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenyard.bench.generation import percentile
from tokenyard.bench.workload import WARM_UP, Shape, parse_shape, prompts, warm_up
from tokenyard.errors import ConfigError


@pytest.mark.parametrize("shape", [Shape(1, 128, 64), Shape(8, 128, 64), Shape(32, 128, 128), Shape(64, 256, 64)])
def test_prompts_are_those_that_the_peers_scripts_make(shape: Shape) -> None:
    numbers = random.Random(shape.num_requests * 1000 + shape.input_len)
    expected = [[numbers.randrange(100, 40000) for _ in range(shape.input_len)] for _ in range(shape.num_requests)]
    assert prompts(shape, vocab_size=49152, seed=0) == expected


@given(vocab_size=st.integers(1, 300), seed=st.integers(0, 5))
def test_prompts_of_small_vocabularies_stay_inside_and_follow_the_seed(vocab_size: int, seed: int) -> None:
    shape = Shape(2, 20, 1)
    made = prompts(shape, vocab_size=vocab_size, seed=seed)
    assert all(0 <= token < vocab_size for row in made for token in row)
    assert made == prompts(shape, vocab_size=vocab_size, seed=seed)


def test_other_seeds_give_other_prompts() -> None:
    shape = Shape(2, 20, 1)
    assert prompts(shape, vocab_size=49152, seed=1) != prompts(shape, vocab_size=49152, seed=0)


@given(st.builds(Shape, st.integers(1, 9999), st.integers(1, 9999), st.integers(1, 9999)))
def test_a_shape_reads_what_it_writes(shape: Shape) -> None:
    assert parse_shape(str(shape)) == shape


@pytest.mark.parametrize(
    "text", ["", "8x128", "0x1+1", "1x0+1", "1x1+0", "-1x2+3", "8x128+64x", "٣x1+1", None, 8, ["1x1+1"]]
)
def test_what_is_no_shape_is_refused_with_an_example(text: object) -> None:
    with pytest.raises(ConfigError, match=r"bench\.shapes: .* such as 8x128\+64"):
        parse_shape(text)


@given(st.lists(st.floats(0, 100), min_size=1), st.integers(1, 100))
def test_a_percentile_is_a_value_that_so_many_do_not_exceed(values: list[float], share: int) -> None:
    found = percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) * 100 >= share * len(values)
    assert sum(value < found for value in values) * 100 < share * len(values)


def test_the_median_of_odd_counts_is_the_50th_percentile() -> None:
    assert percentile([3.0, 1.0, 2.0], 50) == statistics.median([3.0, 1.0, 2.0])


@given(st.integers(2, 40))
def test_the_warm_up_is_as_much_as_a_request_can_have(max_model_len: int) -> None:
    shape = warm_up(max_model_len)
    assert min(shape.num_requests, shape.input_len, shape.output_len) >= 1
    assert shape.input_len + shape.output_len == min(max_model_len, WARM_UP.input_len + WARM_UP.output_len)
