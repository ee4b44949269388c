"""GGUF files of every architecture against the transformers models they were written of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import gguf
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf_files import randomise, write_gguf_of
from lone_logits import logits_of
from tokenyard.errors import ModelLoadError
from tokenyard.model.files import resolve_model
from tokenyard.model.loader import decoder_choice, load_model
from tokenyard.model.weights import open_weights
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

if TYPE_CHECKING:
    pass

SIZES: dict[str, object] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 0,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model of transformers, and what a converter writes beyond the sizes."""

    architecture: str
    hf_class: type[PreTrainedModel]
    config: Mapping[str, object] = field(default_factory=dict)
    edit: Callable[[gguf.GGUFWriter], None] | None = None

    def model(self) -> PreTrainedModel:
        configs: dict[type[PreTrainedModel], type[PreTrainedConfig]] = {
            LlamaForCausalLM: LlamaConfig,
            MistralForCausalLM: MistralConfig,
            Qwen2ForCausalLM: Qwen2Config,
            Qwen3ForCausalLM: Qwen3Config,
        }
        torch.manual_seed(0)
        return randomise(self.hf_class(configs[self.hf_class].from_dict({**SIZES, **self.config})))

    def write(self, path: Path, kind: GGMLQuantizationType = GGMLQuantizationType.F32) -> tuple[Path, PreTrainedModel]:
        model = self.model()
        return write_gguf_of(path, model, architecture=self.architecture, kind=kind, edit=self.edit), model


def add_yarn(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(32)
    writer.add_rope_scaling_yarn_beta_fast(16.0)
    writer.add_rope_scaling_yarn_beta_slow(2.0)
    writer.add_rope_scaling_yarn_attn_factor(1.5)


YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
    "attention_factor": 1.5,
}


def add_linear(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(2.0)


LINEAR = {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
NO_WINDOW = {"sliding_window": None, "head_dim": 16}
WINDOW = {"sliding_window": 8, "head_dim": 16}
QWEN_WINDOW = {
    "use_sliding_window": True,
    "sliding_window": 8,
    "max_window_layers": 0,
    "layer_types": ["sliding_attention", "full_attention"],
}


def add_window_everywhere(writer: gguf.GGUFWriter) -> None:
    writer.add_sliding_window(8)


def add_window_in_every_second(writer: gguf.GGUFWriter) -> None:
    writer.add_sliding_window(8)
    writer.add_sliding_window_pattern(2)


def add_window_by_layer(writer: gguf.GGUFWriter) -> None:
    writer.add_sliding_window(8)
    writer.add_sliding_window_pattern([True, False])


def add_old_linear(writer: gguf.GGUFWriter) -> None:
    writer.add_float32("llama.rope.scale_linear", 2.0)


def add_factor_alone(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_factor(2.0)


CASES = {
    "llama": Case(architecture="llama", hf_class=LlamaForCausalLM),
    "llama of smollm's heads": Case(
        architecture="llama",
        hf_class=LlamaForCausalLM,
        config={"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 144, "tie_word_embeddings": True},
    ),
    "llama with biases": Case(
        architecture="llama", hf_class=LlamaForCausalLM, config={"attention_bias": True, "mlp_bias": True}
    ),
    "llama with heads of another size": Case(
        architecture="llama", hf_class=LlamaForCausalLM, config={"head_dim": 24, "num_key_value_heads": 1}
    ),
    "llama with linear scaling": Case(
        architecture="llama", hf_class=LlamaForCausalLM, config={"rope_parameters": LINEAR}, edit=add_linear
    ),
    "llama with the old key": Case(
        architecture="llama", hf_class=LlamaForCausalLM, config={"rope_parameters": LINEAR}, edit=add_old_linear
    ),
    "llama with a factor alone": Case(
        architecture="llama", hf_class=LlamaForCausalLM, config={"rope_parameters": LINEAR}, edit=add_factor_alone
    ),
    "llama with yarn": Case(
        architecture="llama", hf_class=LlamaForCausalLM, config={"rope_parameters": YARN}, edit=add_yarn
    ),
    "mistral, written as llama": Case(architecture="llama", hf_class=MistralForCausalLM, config=NO_WINDOW),
    "mistral with a window": Case(
        architecture="llama", hf_class=MistralForCausalLM, config=WINDOW, edit=add_window_everywhere
    ),
    "mistral": Case(architecture="mistral", hf_class=MistralForCausalLM, config=WINDOW, edit=add_window_everywhere),
    "mistral3": Case(architecture="mistral3", hf_class=MistralForCausalLM, config={**NO_WINDOW, "head_dim": 32}),
    "qwen2": Case(architecture="qwen2", hf_class=Qwen2ForCausalLM),
    "qwen2, tied": Case(architecture="qwen2", hf_class=Qwen2ForCausalLM, config={"tie_word_embeddings": True}),
    "qwen2 with windows": Case(
        architecture="qwen2", hf_class=Qwen2ForCausalLM, config=QWEN_WINDOW, edit=add_window_in_every_second
    ),
    "qwen3": Case(architecture="qwen3", hf_class=Qwen3ForCausalLM, config={"head_dim": 32}),
    "qwen3 with biases, tied": Case(
        architecture="qwen3",
        hf_class=Qwen3ForCausalLM,
        config={"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 4},
    ),
    "qwen3 with windows": Case(
        architecture="qwen3",
        hf_class=Qwen3ForCausalLM,
        config={**QWEN_WINDOW, "head_dim": 16},
        edit=add_window_by_layer,
    ),
    "qwen3 with yarn": Case(
        architecture="qwen3",
        hf_class=Qwen3ForCausalLM,
        config={"head_dim": 16, "rope_parameters": YARN},
        edit=add_yarn,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_mod_03_every_tensor_comes_back_as_the_model_has_it(tmp_path: Path, name: str) -> None:
    path, model = CASES[name].write(tmp_path / "model.gguf")
    expected = model.state_dict()
    if model.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    with open_weights(resolve_model(str(path))) as weights:
        assert weights.names() == expected.keys()
        for key, tensor in expected.items():
            assert torch.equal(weights.get(key, torch.float32), tensor), key


@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_logits_equal_those_of_the_model(tmp_path: Path, name: str) -> None:
    path, model = CASES[name].write(tmp_path / "model.gguf")
    files = resolve_model(str(path))
    assert decoder_choice(files)[1] == []  # the fast decoder
    tokens = torch.arange(40) * 7 % 320
    expected = model(tokens[None], use_cache=False).logits[0]
    loaded = load_model(files, dtype=torch.float32, device=torch.device("cpu"))
    assert expected.std() > 0.3
    assert (logits_of(loaded, tokens) - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("name", ["llama of smollm's heads", "qwen3"])
def test_mod_03_rows_in_the_other_order_would_show(tmp_path: Path, name: str) -> None:
    """The comparison above can fail: rows of K that are permuted once more are another matrix."""
    path, model = CASES[name].write(tmp_path / "model.gguf")
    with open_weights(resolve_model(str(path))) as weights:
        key = "model.layers.0.self_attn.k_proj.weight"
        loaded = weights.get(key, torch.float32)
    heads = model.config.num_key_value_heads
    pairs = loaded.reshape(heads, -1, 2, loaded.shape[1]).transpose(1, 2).reshape(loaded.shape)
    assert not torch.equal(pairs, model.state_dict()[key])


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_mod_03_quantised_matrices_stay_near_the_original(tmp_path: Path, name: str, kind: str) -> None:
    wide = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1}
    case = Case(
        architecture=CASES[name].architecture,
        hf_class=CASES[name].hf_class,
        config={**CASES[name].config, **wide},
    )
    path, model = case.write(tmp_path / "model.gguf", GGMLQuantizationType[kind])
    with open_weights(resolve_model(str(path))) as weights:
        for key, tensor in model.state_dict().items():
            got = weights.get(key, torch.float32)
            cosine = torch.nn.functional.cosine_similarity(got.flatten(), tensor.flatten(), dim=0)
            assert cosine > (0.99 if kind.startswith("Q4") else 0.998), key


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_vocabulary_smaller_than_the_embedding_keeps_the_padding(tmp_path: Path, name: str) -> None:
    files = resolve_model(str(CASES[name].write(tmp_path / "model.gguf")[0]))
    assert files.config["vocab_size"] == 320
    assert files.eos_token_ids == (0,)
    assert files.max_model_len == 128


def test_a_mistral_without_a_window_says_so(tmp_path: Path) -> None:
    files = resolve_model(str(CASES["mistral3"].write(tmp_path / "model.gguf")[0]))
    assert files.config["sliding_window"] is None
    assert files.architecture == "MistralForCausalLM"


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("llama.attention.temperature_scale", 0.1, "temperature_scale"),
        ("llama.logit_scale", 0.5, "logit_scale"),
        ("llama.attention.causal", False, "not causal"),
        ("llama.pooling_type", 3, "pools"),
        ("llama.rope.dimension_count", 8, "part of each head"),
        ("split.count", 2, "one part of several"),
        ("llama.rope.scaling.yarn_ext_factor", 1.0, "yarn_ext_factor"),
        ("llama.rope.scaling.type", "longrope", "longrope"),
        ("llama.rope.freq_base_swa", 1e4, "freq_base_swa"),
    ],
)
def test_keys_that_would_change_results_are_refused_by_name(
    tmp_path: Path, key: str, value: float | bool | str, words: str
) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        kind = {bool: gguf.GGUFValueType.BOOL, int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32}
        writer.add_key_value(key, value, kind.get(type(value), gguf.GGUFValueType.STRING))

    path = write_gguf_of(tmp_path / "model.gguf", CASES["llama"].model(), architecture="llama", edit=edit)
    with pytest.raises(ModelLoadError, match=words):
        resolve_model(str(path))


@pytest.mark.parametrize("architecture", ["gemma3", "qwen2moe", "phi3", "mistral4", "LLAMA"])
def test_other_architectures_are_refused_by_name(tmp_path: Path, architecture: str) -> None:
    path = write_gguf_of(tmp_path / "model.gguf", CASES["llama"].model(), architecture=architecture)
    with pytest.raises(ModelLoadError, match=f"{architecture!r}.*allowed: llama, mistral, mistral3, qwen2, qwen3"):
        resolve_model(str(path))


def test_mod_01_a_missing_tensor_is_named(tmp_path: Path) -> None:
    """A Qwen3 file whose norms of Q are gone would load as another model, were it not asked for them."""
    model = CASES["qwen3"].model()
    path = write_gguf_of(tmp_path / "model.gguf", model, architecture="qwen3")
    path.write_bytes(path.read_bytes().replace(b"blk.1.attn_q_norm.weight", b"blk.1.attn_q_norm.weighs"))
    with pytest.raises(ModelLoadError, match=r"blk\.1\.attn_q_norm\.weighs"):
        resolve_model(str(path))
    plain = write_gguf_of(tmp_path / "plain.gguf", CASES["qwen2"].model(), architecture="qwen3")
    with pytest.raises(ModelLoadError, match=r"attn_q_norm\.weight' and \d+ more is missing"):
        resolve_model(str(plain))
