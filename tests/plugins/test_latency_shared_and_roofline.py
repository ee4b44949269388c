"""latency=shared and latency=roofline: their seconds by hand, their options, and their contracts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenyard.errors import ConfigError
from tokenyard.interfaces import LatencyModel, StepLoad
from tokenyard.launch.compose import load_engine_config
from tokenyard.launch.steering import make_steering
from tokenyard.testing import LatencyModelContract

ROOFLINE = ("latency=roofline", "latency.device=a100", "latency.model=llama-3.1-8b")
EXACT = ("latency.compute_efficiency=1", "latency.memory_efficiency=1", "latency.overhead=0")
FLOPS, BANDWIDTH, LINK = 312e12, 2039e9, 300e9  # of the A100's datasheet
HIDDEN, MLP, LAYERS, VOCAB, KV = 4096, 14336, 32, 128256, 1024  # of Llama-3.1-8B; KV = 8 heads of 128
MATRICES = ((HIDDEN, HIDDEN + 2 * KV), (HIDDEN, HIDDEN), (HIDDEN, 2 * MLP), (MLP, HIDDEN))


class TestShared(LatencyModelContract):
    overrides = ("latency=shared", "latency.per_request=0.01")


class TestRoofline(LatencyModelContract):
    overrides = ROOFLINE


@pytest.mark.slow
class TestRooflineOfRanks(LatencyModelContract):
    overrides = (*ROOFLINE, "latency.tensor_parallel=8")


def model(*overrides: str) -> LatencyModel:
    made = make_steering(*load_engine_config(overrides)).latency
    assert made is not None
    return made


def multiplied(rows: int, ranks: int = 1) -> float:
    """Seconds of a layer's matrix multiplications."""
    return sum(
        max(
            2 * rows * wide * high / (FLOPS * ranks),
            2 * (wide * high + rows * (wide + high)) / (BANDWIDTH * ranks),
        )
        for wide, high in MATRICES
    )


def output_layer(rows: int, ranks: int = 1) -> float:
    traffic = 2 * (HIDDEN * VOCAB + rows * (HIDDEN + VOCAB))
    return max(2 * rows * HIDDEN * VOCAB / (FLOPS * ranks), traffic / (BANDWIDTH * ranks))


def test_a_shared_step_takes_as_long_for_each_request_whatever_it_computes() -> None:
    shared = model("latency=shared", "latency.per_request=0.25")
    assert shared.step_seconds(StepLoad(num_decodes=3, num_decode_context_tokens=1000)) == 0.75
    assert shared.step_seconds(StepLoad(num_decodes=1, num_prefills=2, num_prefill_tokens=4000)) == 0.75


def test_a_step_of_decodes_reads_the_weights_once_and_the_keys_and_values_of_each() -> None:
    load = StepLoad(num_decodes=4, num_decode_context_tokens=4 * 999)
    reads = 4 * 1000 * 2 * KV * 2 / BANDWIDTH  # of a layer: with the token that each computes
    expected = LAYERS * (multiplied(4) + reads) + output_layer(4)
    assert model(*ROOFLINE, *EXACT).step_seconds(load) == pytest.approx(expected, rel=1e-12)


def test_a_long_prefill_is_bound_by_arithmetic_and_its_attention_grows_with_the_pairs() -> None:
    load = StepLoad(num_prefills=1, num_prefill_tokens=2048, num_prefill_context_tokens=512)
    pairs = sum(512 + position + 1 for position in range(2048))
    attention = max(pairs * 4 * HIDDEN / FLOPS, (512 + 2048) * 2 * KV * 2 / BANDWIDTH)
    expected = LAYERS * (multiplied(2048) + attention) + output_layer(1)
    assert model(*ROOFLINE, *EXACT).step_seconds(load) == pytest.approx(expected, rel=1e-12)
    assert multiplied(2048) == pytest.approx(2 * 2048 * sum(wide * high for wide, high in MATRICES) / FLOPS)


def test_ranks_share_the_work_and_sum_their_activations_twice_a_layer() -> None:
    load = StepLoad(num_prefills=1, num_prefill_tokens=100)
    pairs = 100 * 101 / 2
    attention = max(pairs * 4 * HIDDEN / (FLOPS * 4), 100 * 2 * KV * 2 / (BANDWIDTH * 4))
    reduced = 2 * (10e-6 + 2 * 3 / 4 * 100 * HIDDEN * 2 / LINK)
    expected = LAYERS * (multiplied(100, 4) + attention + reduced) + output_layer(1, 4)
    ranks = model(*ROOFLINE, *EXACT, "latency.tensor_parallel=4")
    assert ranks.step_seconds(load) == pytest.approx(expected, rel=1e-12)


def test_efficiencies_divide_and_the_overhead_is_added() -> None:
    load = StepLoad(num_decodes=1, num_decode_context_tokens=10)
    exact = model(*ROOFLINE, *EXACT).step_seconds(load)
    halved = model(*ROOFLINE, *EXACT[:1], "latency.memory_efficiency=0.5", "latency.overhead=0.001")
    assert halved.step_seconds(load) == pytest.approx(2 * exact + 0.001, rel=1e-12)


def test_a_config_json_is_a_model_as_a_known_name_is(tmp_path: Path) -> None:
    config: dict[str, object] = {
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": VOCAB,
        "torch_dtype": "bfloat16",
        "model_type": "llama",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    load = StepLoad(num_decodes=7, num_decode_context_tokens=700, num_prefills=2, num_prefill_tokens=300)
    expected = model(*ROOFLINE).step_seconds(load)
    for path in (tmp_path, tmp_path / "config.json"):
        assert model(*ROOFLINE[:2], f"latency.model={path}").step_seconds(load) == expected


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_local_experts": 8}, ("num_local_experts", "dense layers")),
        ({"torch_dtype": "float8"}, ("'float8'", "bfloat16")),
        ({"hidden_size": -1}, ("hidden_size",)),
        ({"hidden_size": "wide"}, ("hidden_size",)),
        ({"vocab_size": None}, ("vocab_size",)),
    ],
)
def test_a_config_json_of_another_kind_is_one_clear_line(
    tmp_path: Path, change: dict[str, object], words: tuple[str, ...]
) -> None:
    config = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 100,
    }
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ConfigError) as caught:
        model(*ROOFLINE[:2], f"latency.model={tmp_path}")
    assert all(word in str(caught.value) for word in ("config.json", *words)), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["latency=shared"], ("latency.per_request has no value",)),
        (["latency=shared", "latency.per_request=0"], ("latency.per_request=0", "above 0")),
        (["latency=shared", "latency.per_request=-1"], ("latency.per_request=-1", "above 0")),
        (["latency=shared", "latency.per_request=nan"], ("latency.per_request=nan", "above 0")),
        (["latency=shared", "latency.per_request=1e308"], ("latency.per_request=1e+308", "too large")),
        (["latency=roofline", "latency.model=llama-3.1-8b"], ("latency.device has no value",)),
        (["latency=roofline", "latency.device=a100"], ("latency.model has no value",)),
        (["latency=roofline", "latency.device=b300", "latency.model=llama-3.1-8b"], ("'b300'", "a100, h100")),
        (["latency=roofline", "latency.device=a100", "latency.model=gpt-9"], ("'gpt-9'", "config.json", "llama-2-7b")),
        ([*ROOFLINE, "latency.compute_efficiency=0"], ("latency.compute_efficiency=0", "above 0 and at most 1")),
        ([*ROOFLINE, "latency.memory_efficiency=1.1"], ("latency.memory_efficiency=1.1", "at most 1")),
        ([*ROOFLINE, "latency.memory_efficiency=nan"], ("latency.memory_efficiency=nan",)),
        ([*ROOFLINE, "latency.overhead=-1"], ("latency.overhead=-1", "at least 0")),
        ([*ROOFLINE, "latency.tensor_parallel=0"], ("latency.tensor_parallel=0", "1 to 1024")),
        (
            ["latency=roofline", "latency.device=cpu", "latency.model=smollm2-135m", "latency.tensor_parallel=2"],
            ("latency.tensor_parallel=2", "latency.device=cpu"),
        ),
    ],
)
def test_a_bad_option_is_one_clear_line(overrides: list[str], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        model(*overrides)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_roofline_says_what_it_is_made_of_and_how_far_off_it_is() -> None:
    told = model(*ROOFLINE).calibration
    assert "a100" in told
    assert "llama-3.1-8b" in told
    assert "error" in told
