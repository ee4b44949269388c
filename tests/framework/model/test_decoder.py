"""The fast decoder: equal to transformers, strict about its checkpoint, sure of its rotary tables."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import pytest
import torch
from lone_logits import logits_of
from rope_scalings import SCALINGS
from tokenyard.errors import ModelLoadError
from tokenyard.model.adapter import TransformersAdapter
from tokenyard.model.decoder import FastDecoder
from tokenyard.model.decoder_config import fast_decoder_reasons, parse_decoder_config
from tokenyard.model.decoder_weights import expected_names
from tokenyard.model.families import FAMILIES
from tokenyard.model.hf_attention import ATTENTION_NAME, register
from tokenyard.model.linear import Linear
from tokenyard.model.self_check import PackedReference, Part
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

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
QWEN2: dict[str, object] = {
    "architectures": ["Qwen2ForCausalLM"],
    "use_sliding_window": True,
    "sliding_window": 8,
    "max_window_layers": 1,
}
SMOLLM3: dict[str, object] = {"architectures": ["SmolLM3ForCausalLM"]}
SHAPES: dict[str, dict[str, object]] = {
    "grouped heads": {},
    "one head per KV head": {"num_key_value_heads": 4},
    "one KV head": {"num_key_value_heads": 1},
    "head size of its own": {"head_dim": 20},
    "attention bias": {"attention_bias": True},
    "mlp bias": {"mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "wide": {"intermediate_size": 2528},
    **{name: {"rope_scaling": {"rope_type": name, **SCALINGS[name]}} for name in ("linear", "llama3", "yarn")},
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
    model = LlamaForCausalLM(LlamaConfig.from_dict(deepcopy(dict(config))))
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


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "architecture GemmaForCausalLM is not one of: LlamaForCausalLM, Mis"),
        ({"model_type": "mistral"}, "model_type 'mistral' is not llama, which LlamaForCausalLM belongs to"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not silu"),
        ({"hidden_act": None}, "hidden_act 'None' is not silu"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope' is not one of"),
        ({"sliding_window": 16}, "llama does not read sliding_window, which is 16"),
        ({"attn_logit_softcapping": 50.0}, "llama does not read attn_logit_softcapping, which is 50.0"),
        ({"final_logit_softcapping": 30.0}, "llama does not read final_logit_softcapping"),
        ({"logits_scaling": 8.0}, "llama does not read logits_scaling"),
        ({"embedding_multiplier": 2}, "llama does not read embedding_multiplier"),
        ({"attention_multiplier": 0.1}, "llama does not read attention_multiplier"),
        ({"attention_chunk_size": 64}, "llama does not read attention_chunk_size"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "llama does not read layer_types"),
        ({"no_rope_layers": [1, 0]}, "llama does not read no_rope_layers"),
        ({"rope_interleaved": True}, "llama does not read rope_interleaved"),
        ({**QWEN2, "use_mrope": True}, "qwen2 does not read use_mrope"),
        ({**QWEN2, "logit_scale": 2.0}, "qwen2 does not read logit_scale"),
        ({"architectures": ["MistralForCausalLM"], "layer_types": ["sliding_attention"] * 2}, "mistral does not read"),
        ({"architectures": ["GraniteForCausalLM"], "query_pre_attn_scalar": 8}, "granite does not read query_pre"),
    ],
    ids=str,
)
def test_what_the_fast_decoder_lacks_is_a_reason(change: dict[str, object], reason: str) -> None:
    reasons = fast_decoder_reasons({**BASE, **change})
    assert len(reasons) == 1
    assert reason in reasons[0]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"hidden_act": "swish"},  # silu's other name
        {"rope_interleaved": False, "pretraining_tp": 2, "is_llama_config": True, "rope_scaling": None},
        {"sliding_window": None, "layer_types": ["full_attention"] * 2, "logits_scaling": 1.0, "is_causal": True},
        {**QWEN2, "sliding_window": 131072, "use_sliding_window": False, "max_window_layers": 28, "use_mrope": False},
        {**SMOLLM3, "no_rope_layers": [1, 0], "sliding_window": None, "layer_types": ["full_attention"] * 2},
        {"architectures": ["GraniteForCausalLM"], "attention_multiplier": 0.0078125, "residual_multiplier": 0.22},
        {"architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "sliding_window": None, "head_dim": 16},
    ],
    ids=str,
)
def test_what_changes_nothing_gives_no_reason(change: dict[str, object]) -> None:
    assert fast_decoder_reasons({**BASE, **change}) == []
    parse_decoder_config({**BASE, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({**QWEN2, "sliding_window": 0}, "'sliding_window' must be an integer from 1"),
        ({**QWEN2, "sliding_window": 8.0}, "'sliding_window' must be an integer from 1"),
        ({**QWEN2, "max_window_layers": -1}, "'max_window_layers' must be an integer from 0"),
        ({**QWEN2, "layer_types": ["full_attention"]}, "'layer_types' must name .* for each of 2 layers"),
        ({**QWEN2, "layer_types": ["full_attention", "chunked_attention"]}, "'layer_types' must name"),
        ({**QWEN2, "layer_types": 2}, "'layer_types' must name"),
        (
            {**QWEN2, "use_sliding_window": False, "layer_types": ["full_attention", "sliding_attention"]},
            "'layer_types' has sliding_attention, but use_sliding_window and sliding_window give no window",
        ),
        ({**SMOLLM3, "no_rope_layers": [1]}, "'no_rope_layers' must be a list of 0 and 1 for each of 2 layers"),
        ({**SMOLLM3, "no_rope_layers": [1, 2]}, "'no_rope_layers' must be a list of 0 and 1"),
        ({**SMOLLM3, "no_rope_layer_interval": 0}, "'no_rope_layer_interval' must be an integer from 1"),
        (
            {"architectures": ["GraniteForCausalLM"], "residual_multiplier": 0},
            "'residual_multiplier' must be a positive",
        ),
        ({"architectures": ["GraniteForCausalLM"], "logits_scaling": "8"}, "'logits_scaling' must be a positive"),
        ({"architectures": ["GemmaForCausalLM"]}, "the fast decoder has no GemmaForCausalLM; it has: LlamaForCausalLM"),
    ],
    ids=str,
)
def test_a_familys_own_value_that_does_not_hold_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        parse_decoder_config({**BASE, **change})


@pytest.mark.parametrize(
    ("architecture", "change", "windows"),
    [
        ("MistralForCausalLM", {"sliding_window": None}, [None] * 6),
        ("MistralForCausalLM", {"sliding_window": 7}, [7] * 6),
        ("MistralForCausalLM", {}, [4096] * 6),
        ("Qwen2ForCausalLM", {"sliding_window": 8}, [None] * 6),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": None}, [None] * 6),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 8}, [None] * 6),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "max_window_layers": 4}, [None] * 4 + [4096] * 2),
        ("Qwen3ForCausalLM", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, [8] * 6),
        ("SmolLM3ForCausalLM", {"sliding_window": 8}, [None] * 6),
        ("SmolLM3ForCausalLM", {"use_sliding_window": True, "sliding_window": 8}, [None, None, None, 8, None, None]),
        (
            "SmolLM3ForCausalLM",
            {"use_sliding_window": True, "sliding_window": 8, "no_rope_layer_interval": 3},
            [None, None, 8, None, None, 8],
        ),
    ],
    ids=str,
)
def test_windows_follow_the_familys_own_rule_as_in_transformers(
    architecture: str, change: dict[str, object], windows: list[int | None]
) -> None:
    config = {**BASE, "num_hidden_layers": 6, "architectures": [architecture], **change}
    assert list(parse_decoder_config(config).windows) == windows
    theirs = CONFIG_MAPPING[FAMILIES[architecture].name].from_dict(deepcopy(config))
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * 6
    assert windows == [theirs.sliding_window if kind == "sliding_attention" else None for kind in kinds]


@pytest.mark.parametrize(
    "change", [{}, {"no_rope_layer_interval": 2}, {"no_rope_layers": [1, 0, 0, 1, 1, 1, 0]}], ids=str
)
def test_layers_without_rotations_follow_transformers(change: dict[str, object]) -> None:
    config = {**BASE, **SMOLLM3, "num_hidden_layers": 6, **change}
    theirs = CONFIG_MAPPING["smollm3"].from_dict(deepcopy(config))
    assert list(parse_decoder_config(config).rotates) == [bool(item) for item in theirs.no_rope_layers[:6]]


@pytest.mark.parametrize("architecture", FAMILIES)
def test_the_tensors_are_those_of_transformers_whatever_the_biases(architecture: str) -> None:
    """A key that a family does not read adds no tensor: Qwen2 has biases of its own, Mistral has none."""
    for switches in ({"attention_bias": True}, {"mlp_bias": True}, {"attention_bias": False, "mlp_bias": False}):
        config = {**BASE, "head_dim": 12, "pad_token_id": 0, "architectures": [architecture], **switches}
        theirs = CONFIG_MAPPING[FAMILIES[architecture].name].from_dict(deepcopy(config))
        model: torch.nn.Module = AutoModelForCausalLM.from_config(theirs)  # type: ignore[no-untyped-call]
        assert expected_names(parse_decoder_config(config)) == set(model.state_dict())


DEFAULTS_OF = [
    "attention_bias",
    "max_window_layers",
    "mlp_bias",
    "no_rope_layer_interval",
    "num_key_value_heads",
    "rms_norm_eps",
    "sliding_window",
    "tie_word_embeddings",
    "use_sliding_window",
]


@pytest.mark.parametrize("architecture", FAMILIES)
def test_absent_keys_have_the_defaults_of_transformers(architecture: str) -> None:
    """Every key, one by one left out, gives what transformers' own default gives when it is written out."""
    sizes = {"hidden_size": 256, "num_attention_heads": 64, "num_hidden_layers": 30, "architectures": [architecture]}
    absent = {key: BASE[key] for key in ("vocab_size", "intermediate_size")} | sizes
    written = CONFIG_MAPPING[FAMILIES[architecture].name].from_dict(dict(absent)).to_dict()
    explicit = {
        **absent,
        **{
            key: written[key]
            for key in (*DEFAULTS_OF, "head_dim", "max_position_embeddings", "rope_parameters", "layer_types")
            if key in written
        },
        **{key: written[key] for key in FAMILIES[architecture].reads if key in written},
    }
    ours = parse_decoder_config(absent)
    theirs = parse_decoder_config(explicit)
    assert replace(ours, rope=theirs.rope) == theirs
    assert (ours.rope.theta, ours.rope.type) == (theirs.rope.theta, theirs.rope.type)
    assert ours.rope.max_position_embeddings == theirs.rope.max_position_embeddings


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
