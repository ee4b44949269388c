"""Rotary embeddings: transformers' tables under every spelling, and what does not hold is named."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rope_scalings import LLAMA3, SCALINGS
from tokenyard.errors import ModelLoadError
from tokenyard.model.decoder_config import fast_decoder_reasons, parse_decoder_config
from tokenyard.model.files import ModelFiles
from tokenyard.model.rope import RotaryEmbedding, rotate
from tokenyard.model.rope_config import FAST_ROPE_TYPES, max_prompt_len, parse_rope
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

CPU = torch.device("cpu")
HEAD_DIM = 64
ORIGINAL = 128
BASE: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": ORIGINAL,
}


def spelled(kind: str, spelling: str) -> dict[str, object]:
    """A config's keys for a rope type; the type is called `rope_type` or `type`, in the new object or the old two."""
    values = SCALINGS.get(kind, {})
    if spelling == "rope_parameters":
        return {"rope_parameters": {"rope_type": kind, "rope_theta": 5e4, **values}}
    return {"rope_theta": 5e4, "rope_scaling": {spelling: kind, **values}}


def transformers_module(config: dict[str, object]) -> LlamaRotaryEmbedding:
    return LlamaRotaryEmbedding(LlamaConfig.from_dict(deepcopy(config)))  # which writes into what it is given


def assert_same_tables(config: dict[str, object], positions: list[int]) -> None:
    tensor = torch.tensor(positions)
    cos, sin = transformers_module(config)(torch.zeros(1), tensor[None])
    rotation = RotaryEmbedding(parse_rope(config), HEAD_DIM, CPU)(tensor, torch.float32)
    assert torch.equal(rotation.cos[:, 0], cos[0])
    assert torch.equal(rotation.signed_sin[:, 0].abs(), sin[0].abs())
    heads = torch.randn(len(positions), 5, HEAD_DIM)
    expected, _ = apply_rotary_pos_emb(heads[None], heads[None], cos, sin, unsqueeze_dim=2)
    assert torch.equal(rotate(heads, rotation), expected[0])


@pytest.mark.parametrize("spelling", ["rope_type", "type", "rope_parameters"])
@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
def test_mod_06_rotary_tables_equal_transformers_under_every_spelling(kind: str, spelling: str) -> None:
    assert_same_tables({**BASE, **spelled(kind, spelling)}, [0, 1, 1000])


@pytest.mark.parametrize("spelling", ["rope_type", "type", "rope_parameters"])
def test_mod_06_dynamic_tables_up_to_the_original_length_are_the_plain_ones(spelling: str) -> None:
    config = {**BASE, **spelled("dynamic", spelling)}
    assert_same_tables(config, [0, 1, ORIGINAL - 1])


@pytest.mark.parametrize("factor", [1.3, 2.0, 2.7, 3.9])
def test_dynamic_tables_up_to_the_original_length_do_not_depend_on_the_factor(factor: float) -> None:
    length = 100  # factor * length / length is not the factor again for each of these
    positions = torch.arange(length)
    scaled: dict[str, object] = {"rope_scaling": {"type": "dynamic", "factor": factor}}
    config = {**BASE, "max_position_embeddings": length}
    plain, dynamic = (
        RotaryEmbedding(parse_rope({**config, **extra}), HEAD_DIM, CPU)(positions, torch.float32)
        for extra in ({}, scaled)
    )
    assert torch.equal(dynamic.cos, plain.cos)
    assert torch.equal(dynamic.signed_sin, plain.signed_sin)


@pytest.mark.parametrize("factor", [1.5, 2.0, 8.0])
def test_a_dynamic_token_beyond_the_original_length_has_the_table_that_transformers_decodes_it_with(
    factor: float,
) -> None:
    config = {**BASE, "rope_scaling": {"rope_type": "dynamic", "factor": factor}}
    module = transformers_module(config)
    prompt = torch.arange(ORIGINAL - 3)
    steps = [prompt, *(torch.tensor([position]) for position in range(len(prompt), 3 * ORIGINAL))]
    tables = [module(torch.zeros(1), step[None])[0][0] for step in steps]  # one after the other, as it decodes
    together = RotaryEmbedding(parse_rope(config), HEAD_DIM, CPU)(torch.arange(3 * ORIGINAL), torch.float32)
    torch.testing.assert_close(together.cos[:, 0], torch.cat(tables), rtol=0, atol=2e-4)
    beyond = together.cos[ORIGINAL + 20, 0]
    assert (beyond - transformers_module(BASE)(torch.zeros(1), torch.tensor([[ORIGINAL + 20]]))[0]).abs().max() > 0.01


@given(st.lists(st.integers(0, 4 * ORIGINAL), min_size=1, max_size=9), st.sampled_from(FAST_ROPE_TYPES))
@settings(deadline=None, max_examples=60)
def test_a_row_depends_on_its_own_position_alone(positions: list[int], kind: str) -> None:
    rotary = RotaryEmbedding(parse_rope({**BASE, **spelled(kind, "rope_type")}), HEAD_DIM, CPU)
    together = rotary(torch.tensor(positions), torch.float32)
    for row, position in enumerate(positions):
        alone = rotary(torch.tensor([position]), torch.float32)
        torch.testing.assert_close(together.cos[row], alone.cos[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(together.signed_sin[row], alone.signed_sin[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "values",
    [
        {"beta_fast": 16, "beta_slow": 2},
        {"attention_factor": 1.3},
        {"mscale": 0.7, "mscale_all_dim": 1.1},
        {"truncate": False},
        {"original_max_position_embeddings": 128},
        {"factor": None},
    ],
    ids=str,
)
def test_yarn_options_equal_transformers(values: dict[str, object]) -> None:
    scaling = {"rope_type": "yarn", **SCALINGS["yarn"], **values}
    assert_same_tables({**BASE, "rope_scaling": scaling}, [0, 1, 1000])


def test_an_original_length_beside_the_scaling_equals_transformers() -> None:
    scaling = {"rope_type": "llama3", **{key: value for key, value in LLAMA3.items() if "original" not in key}}
    assert_same_tables({**BASE, "rope_scaling": scaling}, [0, 1, 1000])
    assert_same_tables({**BASE, "rope_scaling": scaling, "original_max_position_embeddings": 16}, [0, 1, 1000])


def test_the_old_spelling_wins_over_the_new_one_as_in_transformers() -> None:
    both = {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}}
    assert_same_tables({**BASE, **both}, [0, 1, 1000])
    assert parse_rope({**BASE, **both}).type == "linear"


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        ({"type": "linear", "factor": 2.0}, 256),
        ({"rope_type": "dynamic", "factor": 2.0}, 256),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        ({"type": "yarn", "factor": 4.0}, 512),
        ({"rope_type": "llama3", **LLAMA3}, 128),
        ({"type": "llama3", **LLAMA3}, 128),
        (None, 128),
    ],
    ids=str,
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_mod_06_max_model_len_follows_the_scaling(scaling: dict[str, object] | None, length: int, key: str) -> None:
    config = {**BASE, key: scaling}
    files = ModelFiles(name="m", path=Path("m"), format="safetensors", config=config, generation_config={})
    assert files.max_model_len == length


def test_mod_06_an_unknown_rope_type_raises_with_the_known_ones() -> None:
    known = "default, linear, dynamic, llama3, yarn, longrope, proportional"
    for key in ("type", "rope_type"):
        with pytest.raises(ModelLoadError, match=f"unknown rope type 'llama4'; known: {known}"):
            fast_decoder_reasons({**BASE, "rope_scaling": {key: "llama4", "factor": 2.0}})


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"type": "linear"}, "rope type 'linear' needs a number for 'factor', got None"),
        ({"type": "dynamic", "factor": "2"}, "rope type 'dynamic' needs a number for 'factor', got '2'"),
        ({"type": "linear", "factor": 0}, "rope type 'linear' needs a positive 'factor', got 0"),
        ({"type": "linear", "factor": float("inf")}, "needs a number for 'factor', got inf"),
        ({"type": "yarn", "factor": 4.0, "beta_fast": 0}, "needs a positive 'beta_fast'"),
        ({"type": "yarn", "factor": 4.0, "rope_theta": 0.5}, "needs a rope_theta above 1"),
        ({"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "needs a number for 'high_freq_factor'"),
        ({"type": "default", "rope_theta": -1}, "'rope_theta' must be a positive number"),
        ({"full_attention": {"rope_type": "default"}}, "per layer type"),
        ([1], "rope parameters must be an object"),
    ],
    ids=str,
)
def test_a_scaling_that_does_not_hold_is_named(scaling: object, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        RotaryEmbedding(parse_rope({**BASE, "rope_scaling": scaling}), HEAD_DIM, CPU)


def test_dynamic_scaling_needs_more_than_one_pair_of_dimensions() -> None:
    with pytest.raises(ModelLoadError, match="rope type 'dynamic' needs a head_dim of at least 4, got 2"):
        parse_decoder_config({**BASE, "head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2.0}})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope' is not one of"),
        ({"rope_scaling": {"rope_type": "proportional"}}, "rope type 'proportional' is not one of"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "extra": 1}}, "rope type 'linear' does not read: extra"),
        ({"rope_scaling": {"type": "default", "factor": 2.0}}, "rope type 'default' does not read: factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not 1"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0}}, "partial_rotary_factor 0 is not 1"),
    ],
    ids=str,
)
def test_rotations_that_the_fast_decoder_lacks_are_a_reason(change: dict[str, object], reason: str) -> None:
    reasons = fast_decoder_reasons({**BASE, **change})
    assert len(reasons) == 1
    assert reason in reasons[0]


def test_only_dynamic_scaling_limits_prompts() -> None:
    for kind in FAST_ROPE_TYPES:
        for spelling in ("rope_type", "type", "rope_parameters"):
            expected = ORIGINAL if kind == "dynamic" else None
            assert max_prompt_len({**BASE, **spelled(kind, spelling)}) == expected
    assert max_prompt_len({"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}) is None
    assert max_prompt_len(BASE) is None
