"""latency=shared and latency=roofline: their seconds by hand, their options, and their contracts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tokenyard.errors import ConfigError
from tokenyard.interfaces import LatencyModel, LatencyModelContext, StepLoad
from tokenyard.launch.compose import load_engine_config
from tokenyard.testing import LatencyModelContract
from tokenyard_plugins import latency_roofline, latency_shared
from tokenyard_plugins.latency_roofline import RooflineOptions

ROOFLINE = ("latency=roofline", "latency.device=a100", "latency.model=llama-3.1-8b")
EXACT = RooflineOptions(device="a100", model="llama-3.1-8b", compute_efficiency=1, memory_efficiency=1, overhead=0)
CONTEXT = LatencyModelContext(max_num_batched_tokens=2048)
FLOPS, BANDWIDTH, LINK = 312e12, 2039e9, 300e9  # of the A100's datasheet
HIDDEN, MLP, LAYERS, VOCAB, KV = 4096, 14336, 32, 128256, 1024  # of Llama-3.1-8B; KV = 8 heads of 128
MATRICES = ((HIDDEN, HIDDEN + 2 * KV), (HIDDEN, HIDDEN), (HIDDEN, 2 * MLP), (MLP, HIDDEN))


@pytest.mark.slow
class TestShared(LatencyModelContract):
    overrides = ("latency=shared", "latency.per_request=0.01")


class TestRoofline(LatencyModelContract):
    overrides = ROOFLINE


@pytest.mark.slow
class TestRooflineOfRanks(LatencyModelContract):
    overrides = (*ROOFLINE, "latency.tensor_parallel=8")


def roofline(options: RooflineOptions) -> LatencyModel:
    (part,) = latency_roofline.tokenyard_components()
    return part.factory(options, CONTEXT)


def shared(per_request: float) -> LatencyModel:
    (part,) = latency_shared.tokenyard_components()
    return part.factory(latency_shared.SharedOptions(per_request=per_request), CONTEXT)


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
    model = shared(0.25)
    assert model.step_seconds(StepLoad(num_decodes=3, num_decode_context_tokens=1000)) == 0.75
    assert model.step_seconds(StepLoad(num_decodes=1, num_prefills=2, num_prefill_tokens=4000)) == 0.75


def test_a_step_of_decodes_reads_the_weights_once_and_the_keys_and_values_of_each() -> None:
    load = StepLoad(num_decodes=4, num_decode_context_tokens=4 * 999)
    reads = 4 * 1000 * 2 * KV * 2 / BANDWIDTH  # of a layer: with the token that each computes
    expected = LAYERS * (multiplied(4) + reads) + output_layer(4)
    assert roofline(EXACT).step_seconds(load) == pytest.approx(expected, rel=1e-12)


def test_a_long_prefill_is_bound_by_arithmetic_and_its_attention_grows_with_the_pairs() -> None:
    load = StepLoad(num_prefills=1, num_prefill_tokens=2048, num_prefill_context_tokens=512)
    pairs = sum(512 + position + 1 for position in range(2048))
    attention = max(pairs * 4 * HIDDEN / FLOPS, (512 + 2048) * 2 * KV * 2 / BANDWIDTH)
    expected = LAYERS * (multiplied(2048) + attention) + output_layer(1)
    assert roofline(EXACT).step_seconds(load) == pytest.approx(expected, rel=1e-12)
    assert multiplied(2048) == pytest.approx(2 * 2048 * sum(wide * high for wide, high in MATRICES) / FLOPS)


def test_ranks_share_the_work_and_sum_their_activations_twice_a_layer() -> None:
    load = StepLoad(num_prefills=1, num_prefill_tokens=100)
    pairs = 100 * 101 / 2
    attention = max(pairs * 4 * HIDDEN / (FLOPS * 4), 100 * 2 * KV * 2 / (BANDWIDTH * 4))
    reduced = 2 * (10e-6 + 2 * 3 / 4 * 100 * HIDDEN * 2 / LINK)
    expected = LAYERS * (multiplied(100, 4) + attention + reduced) + output_layer(1, 4)
    ranks = roofline(replace(EXACT, tensor_parallel=4))
    assert ranks.step_seconds(load) == pytest.approx(expected, rel=1e-12)


def test_efficiencies_divide_and_the_overhead_is_added() -> None:
    load = StepLoad(num_decodes=1, num_decode_context_tokens=10)
    exact = roofline(EXACT).step_seconds(load)
    halved = roofline(replace(EXACT, memory_efficiency=0.5, overhead=0.001))
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
    expected = roofline(EXACT).step_seconds(load)
    for path in (tmp_path, tmp_path / "config.json"):
        assert roofline(replace(EXACT, model=str(path))).step_seconds(load) == expected


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
        roofline(replace(EXACT, model=str(tmp_path)))
    assert all(word in str(caught.value) for word in ("config.json", *words)), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("device", "b300", ("latency.device='b300'", "a100, h100")),
        ("model", "gpt-9", ("latency.model='gpt-9'", "config.json", "llama-2-7b")),
        ("model", "", ("latency.model=''", "config.json")),
        ("compute_efficiency", 0, ("latency.compute_efficiency=0", "above 0 and at most 1")),
        ("memory_efficiency", 1.1, ("latency.memory_efficiency=1.1", "at most 1")),
        ("memory_efficiency", float("nan"), ("latency.memory_efficiency=nan",)),
        ("overhead", -1, ("latency.overhead=-1", "at least 0")),
        ("overhead", float("nan"), ("latency.overhead=nan",)),
        ("tensor_parallel", 0, ("latency.tensor_parallel=0", "1 to 1024")),
    ],
)
def test_a_bad_option_of_the_roofline_is_one_clear_line(option: str, value: object, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        roofline(replace(EXACT, **{option: value}))
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "word"), [(0, "above 0"), (-1, "above 0"), (float("nan"), "nan"), (1e308, "too large")]
)
def test_a_shared_step_needs_seconds(value: float, word: str) -> None:
    with pytest.raises(ConfigError, match=rf"latency\.per_request=.*{word}"):
        shared(value)


def test_a_cpu_has_no_ranks() -> None:
    with pytest.raises(ConfigError, match=r"latency\.tensor_parallel=2: latency\.device=cpu"):
        roofline(replace(EXACT, device="cpu", model="smollm2-135m", tensor_parallel=2))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["latency=shared"], "latency.per_request has no value"),
        (["latency=roofline", "latency.model=llama-3.1-8b"], "latency.device has no value"),
        (["latency=roofline", "latency.device=a100"], "latency.model has no value"),
    ],
)
def test_an_option_without_a_default_is_asked_for(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_engine_config(overrides)


def test_the_roofline_says_what_it_is_made_of_and_how_far_off_it_is() -> None:
    told = roofline(EXACT).calibration
    assert "a100" in told
    assert "llama-3.1-8b" in told
    assert "error" in told
