"""The fast decoder: equal to transformers, strict about its checkpoint, sure of its rotary tables."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import pytest
import torch
from tokenyard.errors import ModelLoadError
from tokenyard.model.adapter import TransformersAdapter
from tokenyard.model.decoder import FastDecoder, expected_names
from tokenyard.model.decoder_config import fast_decoder_reasons, parse_decoder_config, parse_rope
from tokenyard.model.hf_attention import ATTENTION_NAME, register
from tokenyard.model.linear import Linear
from tokenyard.model.rope import RotaryEmbedding, rotate
from tokenyard.model.self_check import PackedReference, Part
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

if TYPE_CHECKING:
    from tokenyard.model.causal_lm import CausalLM, PagedAttention

CPU = torch.device("cpu")
BASE: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LLAMA3: dict[str, object] = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SCALINGS: dict[str, dict[str, object]] = {
    "linear": {"factor": 2.0},
    "llama3": LLAMA3,
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
}
SHAPES: dict[str, dict[str, object]] = {
    "grouped heads": {},
    "one head per KV head": {"num_key_value_heads": 4},
    "one KV head": {"num_key_value_heads": 1},
    "head size of its own": {"head_dim": 20},
    "attention bias": {"attention_bias": True},
    "mlp bias": {"mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "wide": {"intermediate_size": 2528},
    **{name: {"rope_scaling": {"rope_type": name, **values}} for name, values in SCALINGS.items()},
}


class TableWeights:
    """A checkpoint in memory."""

    def __init__(self, table: Mapping[str, torch.Tensor]) -> None:
        self._table = table

    def names(self) -> frozenset[str]:
        return frozenset(self._table)

    def get(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return self._table[name].to(dtype)


def make_llama(config: Mapping[str, object]) -> tuple[LlamaForCausalLM, dict[str, torch.Tensor]]:
    """A random Llama of transformers, and its checkpoint as it would be saved."""
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig.from_dict(dict(config)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.2 if parameter.dim() > 1 else 0.5))
    table = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    if config.get("tie_word_embeddings"):
        del table["lm_head.weight"]
    return model, table


def make_decoder(
    config: Mapping[str, object],
    table: Mapping[str, torch.Tensor],
    *,
    pack: bool = True,
    dtype: torch.dtype = torch.float32,
) -> FastDecoder:
    return FastDecoder(parse_decoder_config(config), TableWeights(table), dtype=dtype, device=CPU, pack=pack)


def one_sequence_attention(decoder: CausalLM, length: int) -> PagedAttention:
    attention = PackedReference(decoder.shape.layers)
    attention.begin_step([Part(0, 0, length)])
    return cast("PagedAttention", attention)  # the same call


@torch.inference_mode()
def logits_of(decoder: CausalLM, tokens: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(len(tokens))
    return decoder.forward(tokens, positions, positions, one_sequence_attention(decoder, len(tokens)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@torch.inference_mode()
def test_float32_logits_equal_transformers(shape: str) -> None:
    config = {**BASE, **SHAPES[shape]}
    model, table = make_llama(config)
    tokens = torch.arange(50) * 7 % 96
    expected = model(tokens[None], use_cache=False).logits[0]
    assert expected.std() > 0.5
    scale = expected.abs().max()
    for pack in (False, True):
        decoder = make_decoder(config, table, pack=pack)
        assert (logits_of(decoder, tokens) - expected).abs().max() <= 1e-5 * scale


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@torch.inference_mode()
def test_plain_linears_are_bit_identical_to_transformers_with_the_same_attention(shape: str) -> None:
    """For intermediate sizes that are multiples of 32, as models have: torch computes the rest of a row otherwise."""
    config = {**BASE, **SHAPES[shape]}
    model, table = make_llama(config)
    register()
    model.set_attn_implementation(ATTENTION_NAME)
    adapter, decoder = TransformersAdapter(model), make_decoder(config, table, pack=False)
    tokens = torch.arange(40) * 5 % 96
    assert torch.equal(logits_of(decoder, tokens), logits_of(adapter, tokens))


@torch.inference_mode()
def test_packed_sequences_in_chunks_equal_each_sequence_alone() -> None:
    model, table = make_llama(BASE)
    decoder = make_decoder(BASE, table)
    first, second = torch.arange(20) * 3 % 96, torch.arange(9) * 11 % 96
    expected = [model(tokens[None], use_cache=False).logits[0] for tokens in (first, second)]
    attention = PackedReference(decoder.shape.layers)
    attention.begin_step([Part(1, 0, 9), Part(0, 9, 23)])
    tokens = torch.cat((second, first[:14]))
    positions = torch.cat((torch.arange(9), torch.arange(14)))
    paged = cast("PagedAttention", attention)
    step_one = decoder.forward(tokens, positions, torch.arange(23), paged)
    attention.begin_step([Part(0, 0, 6)])
    step_two = decoder.forward(first[14:], torch.arange(14, 20), torch.arange(6), paged)
    torch.testing.assert_close(step_one[:9], expected[1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.cat((step_one[9:], step_two)), expected[0], rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_logits_are_float32_of_the_named_rows_in_their_order() -> None:
    _, table = make_llama(BASE)
    decoder = make_decoder(BASE, table, dtype=torch.bfloat16)
    tokens, positions = torch.arange(12), torch.arange(12)
    rows = torch.tensor([11, 3, 3])
    everything = decoder.forward(tokens, positions, positions, one_sequence_attention(decoder, 12))
    chosen = decoder.forward(tokens, positions, rows, one_sequence_attention(decoder, 12))
    none = decoder.forward(tokens, positions, rows[:0], one_sequence_attention(decoder, 12))
    assert chosen.dtype == torch.float32
    assert torch.equal(chosen, everything[rows])
    assert none.shape == (0, 96)


def test_bfloat16_logits_stay_close_to_float32() -> None:
    _, table = make_llama(BASE)
    tokens = torch.arange(30)
    exact = logits_of(make_decoder(BASE, table), tokens)
    for pack in (False, True):
        rounded = logits_of(make_decoder(BASE, table, dtype=torch.bfloat16, pack=pack), tokens)
        assert (rounded - exact).square().mean().sqrt() < 0.03 * exact.square().mean().sqrt()


def test_the_shape_says_what_the_engine_needs() -> None:
    config = {**BASE, "head_dim": 20}
    _, table = make_llama(config)
    shape = make_decoder(config, table).shape
    assert (shape.vocab_size, shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.v_head_dim) == (
        96,
        4,
        2,
        20,
        20,
    )
    assert [(layer.index, layer.scale) for layer in shape.layers] == [(0, 20**-0.5), (1, 20**-0.5)]


def test_mod_01_a_tied_model_without_lm_head_loads_and_one_with_its_own_uses_it() -> None:
    config = {**BASE, "tie_word_embeddings": True}
    _, table = make_llama(config)
    tokens = torch.arange(5)
    tied = logits_of(make_decoder(config, table), tokens)
    own = logits_of(make_decoder(config, {**table, "lm_head.weight": -table["model.embed_tokens.weight"]}), tokens)
    torch.testing.assert_close(own, -tied)


def test_mod_01_an_untied_model_without_lm_head_is_refused_by_name() -> None:
    _, table = make_llama(BASE)
    del table["lm_head.weight"]
    with pytest.raises(ModelLoadError, match=r"missing tensors: lm_head\.weight.*tie_word_embeddings"):
        make_decoder(BASE, table)


@pytest.mark.parametrize(
    "name", sorted(expected_names(parse_decoder_config({**BASE, "attention_bias": True, "mlp_bias": True})))
)
def test_mod_01_every_single_missing_tensor_is_named(name: str) -> None:
    config = {**BASE, "attention_bias": True, "mlp_bias": True}
    names = expected_names(parse_decoder_config(config)) - {name}
    with pytest.raises(ModelLoadError, match=f"missing tensors: {name}"):
        make_decoder(config, dict.fromkeys(names, torch.zeros(1)))


def test_unexpected_tensors_are_listed_and_old_rotary_tables_are_not() -> None:
    _, table = make_llama(BASE)
    leftover = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(1), "rotary_emb.inv_freq": torch.zeros(1)}
    make_decoder(BASE, {**table, **leftover})
    with pytest.raises(ModelLoadError, match=r"unexpected tensors: model\.layers\.2\.x, surprise"):
        make_decoder(BASE, {**table, "surprise": torch.zeros(1), "model.layers.2.x": torch.zeros(1)})


def test_many_names_are_cut_to_a_readable_line() -> None:
    with pytest.raises(ModelLoadError) as caught:
        make_decoder(BASE, {})
    assert "and 13 more" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_tensor_of_another_shape_is_refused_with_both_shapes() -> None:
    _, table = make_llama(BASE)
    table["model.layers.1.mlp.down_proj.weight"] = torch.zeros(48, 97)
    with pytest.raises(ModelLoadError, match=r"layers\.1\.mlp\.down_proj\.weight.*\[48, 97\].*\[48, 96\]"):
        make_decoder(BASE, table)


def rope_spellings(kind: str) -> dict[str, dict[str, object]]:
    values = SCALINGS.get(kind, {})
    return {
        "rope_type": {"rope_theta": 5e4, "rope_scaling": {"rope_type": kind, **values}},
        "type": {"rope_theta": 5e4, "rope_scaling": {"type": kind, **values}},
        "rope_parameters": {"rope_parameters": {"rope_type": kind, "rope_theta": 5e4, **values}},
    }


@pytest.mark.parametrize("spelling", ["rope_type", "type", "rope_parameters"])
@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
def test_mod_06_rotary_tables_equal_transformers_under_every_spelling(kind: str, spelling: str) -> None:
    assert_same_tables({**BASE, "head_dim": 64, **rope_spellings(kind)[spelling]})


@pytest.mark.parametrize(
    "values",
    [
        {"beta_fast": 16, "beta_slow": 2},
        {"attention_factor": 1.3},
        {"mscale": 0.7, "mscale_all_dim": 1.1},
        {"truncate": False},
        {"original_max_position_embeddings": 128},
    ],
    ids=str,
)
def test_yarn_options_equal_transformers(values: dict[str, object]) -> None:
    scaling = {"rope_type": "yarn", **SCALINGS["yarn"], **values}
    assert_same_tables({**BASE, "head_dim": 64, "rope_scaling": scaling})


def test_an_original_length_beside_the_scaling_equals_transformers() -> None:
    scaling = {"rope_type": "llama3", **{key: value for key, value in LLAMA3.items() if "original" not in key}}
    assert_same_tables({**BASE, "head_dim": 64, "rope_scaling": scaling})


def assert_same_tables(config: dict[str, object]) -> None:
    positions = torch.tensor([0, 1, 1000])
    module = LlamaRotaryEmbedding(
        LlamaConfig.from_dict({key: value for key, value in config.items() if key != "architectures"})
    )
    cos, sin = module(torch.zeros(1), positions[None])
    rotation = RotaryEmbedding(parse_rope(config), 64, CPU)(positions, torch.float32)
    assert torch.equal(rotation.cos[:, 0], cos[0])
    assert torch.equal(rotation.signed_sin[:, 0].abs(), sin[0].abs())
    heads = torch.randn(3, 5, 64)
    expected, _ = apply_rotary_pos_emb(heads[None], heads[None], cos, sin, unsqueeze_dim=2)
    assert torch.equal(rotate(heads, rotation), expected[0])


def test_mod_06_an_unknown_rope_type_raises_with_the_known_ones() -> None:
    with pytest.raises(
        ModelLoadError, match=r"unknown rope type 'llama4'; known: default, linear, llama3, yarn, dynamic.*"
    ):
        fast_decoder_reasons({**BASE, "rope_scaling": {"type": "llama4", "factor": 2.0}})


def test_a_rope_scaling_without_its_factor_names_the_key() -> None:
    config = {**BASE, "rope_scaling": {"type": "linear"}}
    with pytest.raises(ModelLoadError, match="rope type 'linear' needs a number for 'factor', got None"):
        make_decoder(config, make_llama(BASE)[1])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, "architecture Qwen2ForCausalLM is not one of: LlamaForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not silu"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not one of"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope' is not one of"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not 1"),
    ],
)
def test_what_the_fast_decoder_lacks_is_a_reason(change: dict[str, object], reason: str) -> None:
    reasons = fast_decoder_reasons({**BASE, **change})
    assert len(reasons) == 1
    assert reason in reasons[0]


def test_a_plain_llama_gives_no_reason() -> None:
    assert fast_decoder_reasons(BASE) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "'hidden_size' must be an integer from 1 to 2147483648, got None"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' must be an integer from 1 to 10000, got 0"),
        ({"vocab_size": "96"}, "'vocab_size' must be an integer from 1 to 2147483648, got '96'"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"rms_norm_eps": True}, "'rms_norm_eps' must be a positive number below 1e\\+30, got True"),
        ({"mlp_bias": 1}, "'mlp_bias' must be true or false, got 1"),
        ({"rope_scaling": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
        ({"rope_scaling": [1]}, "rope parameters must be an object"),
    ],
)
def test_a_config_value_that_does_not_hold_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        parse_decoder_config({**BASE, **change})


@pytest.mark.parametrize("names", [None, [], ["A", "B"], "LlamaForCausalLM"])
def test_a_config_must_name_one_architecture(names: object) -> None:
    with pytest.raises(ModelLoadError, match="must name exactly one class"):
        fast_decoder_reasons({**BASE, "architectures": names})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inputs", [7, 576, 1536, 2501])
def test_packed_linears_equal_plain_ones(inputs: int, dtype: torch.dtype) -> None:
    weight, bias, x = (torch.randn(*shape, dtype=dtype) for shape in ((33, inputs), (33,), (5, inputs)))
    plain = Linear(weight, bias, pack=False)(x)
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    assert (Linear(weight, bias)(x) - plain).abs().max() <= limit * plain.abs().max()


@pytest.mark.parametrize("inputs", [576, 1536])
def test_a_row_of_a_packed_float32_linear_does_not_depend_on_the_other_rows(inputs: int) -> None:
    layer = Linear(torch.randn(64, inputs))
    if not layer.is_packed:
        pytest.skip("packed linear layers are not available here")
    x = torch.randn(70, inputs)
    alone = torch.cat([layer(row[None]) for row in x])
    for count in (2, 8, 33, 70):
        assert torch.equal(layer(x[:count]), alone[:count])


def test_packing_that_computes_something_else_falls_back_to_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = torch.randn(8, 16), torch.randn(3, 16)
    monkeypatch.setattr(Linear, "_run_packed", lambda self, x: torch.zeros(len(x), 8))
    layer = Linear(weight)
    assert not layer.is_packed
    assert torch.equal(layer(x), x @ weight.T)


def test_packing_that_fails_falls_back_to_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Linear, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("could not create a primitive")

    monkeypatch.setattr(Linear, "_run_packed", fail)
    assert not Linear(torch.randn(8, 16)).is_packed


def test_the_fast_decoder_imports_no_transformers() -> None:
    code = "import sys, tokenyard.model.decoder, tokenyard.model.loader; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
