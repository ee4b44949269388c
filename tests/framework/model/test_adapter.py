"""The adapter: Hugging Face families through our attention, or refused with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenyard.errors import ModelLoadError
from tokenyard.model.adapter import TransformersAdapter, load_adapter
from tokenyard.model.files import ModelFiles
from tokenyard.model.hf_attention import ATTENTION_NAME, AttentionCall
from tokenyard.model.self_check import PackedReference, Part, check_packed_batch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

CPU = torch.device("cpu")
BASE: dict[str, object] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
MOE: dict[str, object] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DEEPSEEK: dict[str, object] = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 4,
    "first_k_dense_replace": 1,
}
FAMILIES: dict[str, dict[str, object]] = {
    "llama": {},
    "mistral": {"sliding_window": 6},
    "qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {"head_dim": 8, **MOE},
    "gemma2": {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8},
    "gemma3_text": {"head_dim": 8, "sliding_window": 6},
    "phi": {},
    "phi3": {"sliding_window": 6},
    "granite": {},
    "cohere2": {"sliding_window": 6},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6},
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 3, "n_positions": 64},
    "gpt_neox": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "deepseek_v3": DEEPSEEK,
}
MakeModel = Callable[..., ModelFiles]


@pytest.fixture
def make_model(tmp_path: Path) -> MakeModel:
    """A random model of a family, saved as a checkpoint, with weights large enough that attention matters."""

    def make(model_type: str, **extra: object) -> ModelFiles:
        torch.manual_seed(5)
        config = CONFIG_MAPPING[model_type].from_dict({**BASE, **extra})
        model = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(6)
        folder = tmp_path / model_type
        model.save_pretrained(folder)
        return files_in(folder)

    return make


def files_in(folder: Path) -> ModelFiles:
    config = json.loads((folder / "config.json").read_text())
    return ModelFiles(name=folder.name, path=folder, format="safetensors", config=config, generation_config={})


def load(files: ModelFiles, dtype: torch.dtype = torch.float32) -> TransformersAdapter:
    return load_adapter(files, dtype=dtype, device=CPU)


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_a_family_gives_the_logits_of_eager_attention(family: str, make_model: MakeModel) -> None:
    files = make_model(family, **FAMILIES[family])
    adapter = load(files)
    eager = transformers.AutoModelForCausalLM.from_pretrained(files.path, attn_implementation="eager")
    tokens = [torch.arange(3, 23), torch.arange(40, 31, -1)]
    expected = torch.cat([eager(row[None], use_cache=False).logits[0] for row in tokens])
    attention = PackedReference(adapter.shape.layers)
    attention.begin_step([Part(0, 0, 20), Part(1, 20, 29)])
    positions = torch.cat((torch.arange(20), torch.arange(9)))
    rows = torch.tensor([28, 0, 19])
    logits = adapter.forward(torch.cat(tokens), positions, rows, attention)  # type: ignore[arg-type]
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected[rows], rtol=1e-4, atol=1e-4)


def test_layers_carry_their_window_cap_sinks_and_scale(make_model: MakeModel) -> None:
    gemma = load(make_model("gemma2", **FAMILIES["gemma2"])).shape
    assert [layer.sliding_window for layer in gemma.layers] == [6, None, 6]
    assert {layer.soft_cap for layer in gemma.layers} == {50.0}
    oss = load(make_model("gpt_oss", **FAMILIES["gpt_oss"])).shape
    assert all(layer.sinks is not None and layer.sinks.shape == (4,) for layer in oss.layers)
    deepseek = load(make_model("deepseek_v3", **DEEPSEEK)).shape
    assert (deepseek.head_dim, deepseek.v_head_dim) == (12, 8)
    assert deepseek.layers[0].scale == pytest.approx(12**-0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_passes_the_self_check(dtype: torch.dtype, make_model: MakeModel) -> None:
    assert load(make_model("qwen3", head_dim=8), dtype).description == "adapter (Qwen3ForCausalLM)"


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "bloom": ({"n_head": 4, "n_layer": 3}, "does not declare that it uses the attention interface"),
    "mpt": ({"d_model": 32, "n_heads": 4, "n_layers": 3}, "does not declare that it uses the attention interface"),
    "falcon": ({"num_kv_heads": 2}, "does not declare that it uses the attention interface"),
    "mamba": ({"state_size": 4}, "keeps a recurrent state"),
    "minimax": ({"head_dim": 8, "num_local_experts": 2}, "layers of type linear_attention need more than a K/V cache"),
    "diffllama": ({}, r"of its 3 layers, attention runs in: \[0, 0, 1, 1, 2, 2\]"),
    "bert": ({}, "attention is not causal"),
    "doge": ({}, "brings a mask or bias of its own"),
    "nemotron": ({"head_dim": 8}, "does not receive the keywords"),
}


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_would_be_wrong_is_refused_with_the_reason(family: str, make_model: MakeModel) -> None:
    extra, reason = REFUSED[family]
    with pytest.raises(ModelLoadError, match=reason) as caught:
        load(make_model(family, **extra))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_tables_that_depend_on_batch_mates_are_refused(kind: str, make_model: MakeModel) -> None:
    files = make_model("llama")
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 32}
    scaling = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, **(factors if kind == "longrope" else {})}
    files = replace(files, config={**files.config, "rope_parameters": scaling})
    with pytest.raises(ModelLoadError, match=f"rope type '{kind}' changes with the longest sequence of a batch"):
        load(files)


def test_the_self_check_refuses_with_the_measured_difference(make_model: MakeModel) -> None:
    """A layer that caps its scores without saying so, as families do that only half follow the interface."""
    adapter = load(make_model("gemma2", **FAMILIES["gemma2"], attn_logit_softcapping=1.0))
    layers = tuple(replace(layer, soft_cap=None) for layer in adapter.shape.layers)
    adapter._shape = replace(adapter.shape, layers=layers)
    with (
        torch.inference_mode(),
        pytest.raises(ModelLoadError, match=r"differ by 0\.\d+ of their size, allowed is 0.0001"),
    ):
        adapter.check()


@pytest.mark.parametrize(
    ("dtype", "num_wrong", "is_refused"),
    [(torch.bfloat16, 2, False), (torch.bfloat16, 3, True), (torch.float32, 1, True)],
)
def test_in_half_precision_a_model_is_wrong_when_it_is_with_three_sets_of_tokens(
    dtype: torch.dtype, num_wrong: int, is_refused: bool
) -> None:
    calls = 0

    def packed(token_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionCall) -> torch.Tensor:
        nonlocal calls
        calls += 1  # two steps a set of tokens
        return alone(token_ids) + (10.0 if calls <= 2 * num_wrong else 0.0)

    def alone(token_ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(token_ids, 16).float()

    refusal = pytest.raises(ModelLoadError, match=r"they differ by \d") if is_refused else nullcontext()
    with refusal:
        check_packed_batch("Model", packed, alone, [], vocab_size=16, dtype=dtype, device=CPU)


def test_windows_that_the_layers_do_not_ask_for_are_refused(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The window is longer than the self-check's sequences, so that only the config can tell."""
    files = make_model("mistral", sliding_window=40)
    original = transformers.models.mistral.modeling_mistral.MistralAttention.forward

    def forget_window(self: Any, *args: object, **keywords: object) -> object:
        window, self.config.sliding_window = self.config.sliding_window, None
        try:
            return original(self, *args, **keywords)
        finally:
            self.config.sliding_window = window

    monkeypatch.setattr(transformers.models.mistral.modeling_mistral.MistralAttention, "forward", forget_window)
    with pytest.raises(ModelLoadError, match=r"asks for the sliding windows \[40, 40, 40\], its layers for \[None"):
        load(files)


def test_missing_and_unexpected_tensors_are_listed(make_model: MakeModel) -> None:
    files = make_model("qwen3", head_dim=8)
    path = files.path / "model.safetensors"
    table = load_file(path)
    del table["model.layers.1.mlp.up_proj.weight"]
    save_file({**table, "model.layers.0.extra": torch.zeros(1)}, path, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError) as caught:
        load(files)
    assert "missing tensors: model.layers.1.mlp.up_proj.weight" in str(caught.value)
    assert "unexpected tensors: model.layers.0.extra" in str(caught.value)


def test_a_checkpoint_that_cannot_be_read_is_one_line(make_model: MakeModel) -> None:
    files = make_model("qwen3", head_dim=8)
    (files.path / "model.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(ModelLoadError, match="not a complete safetensors file") as caught:
        load(files)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen33"}, "does not know the model type 'qwen33'; did you mean 'qwen3'"),
        ({"model_type": None}, "does not know the model type None"),
        ({"architectures": ["Qwen3ForTokenClassification"]}, "not a causal language model .* known: Qwen3ForCausalLM"),
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "not a causal language model"),
        ({"hidden_size": "wide"}, "config.json is not valid"),
    ],
)
def test_a_config_that_names_no_runnable_model_is_refused(
    change: dict[str, object], message: str, make_model: MakeModel
) -> None:
    files = make_model("qwen3", head_dim=8)
    with pytest.raises(ModelLoadError, match=message):
        load(replace(files, config={**files.config, **change}))


def test_a_model_that_keeps_another_attention_is_refused(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = make_model("qwen3", head_dim=8)
    cls = transformers.Qwen3ForCausalLM
    original = vars(transformers.PreTrainedModel)["from_pretrained"].__func__

    def silently_eager(cls: type[Any], /, *args: object, **keywords: object) -> object:
        return original(cls, *args, **{**keywords, "attn_implementation": "eager"})

    monkeypatch.setattr(cls, "from_pretrained", classmethod(silently_eager))
    with pytest.raises(ModelLoadError, match="it keeps the attention 'eager'"):
        load(files)


def test_our_name_is_in_the_attention_interface_only(make_model: MakeModel) -> None:
    load(make_model("qwen3", head_dim=8))
    assert ATTENTION_NAME in transformers.AttentionInterface()  # type: ignore[no-untyped-call]
    assert ATTENTION_NAME not in transformers.AttentionMaskInterface()  # type: ignore[no-untyped-call]


def test_transformers_progress_bars_are_back_after_loading(
    make_model: MakeModel, capfd: pytest.CaptureFixture[str]
) -> None:
    files = make_model("qwen3", head_dim=8)
    shown = transformers.utils.logging.is_progress_bar_enabled()
    capfd.readouterr()
    load(files)
    assert capfd.readouterr().err == ""
    assert transformers.utils.logging.is_progress_bar_enabled() == shown
