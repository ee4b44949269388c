"""`tokenyard doctor MODEL`: which decoder a model gets and why, from its configs alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from safetensors.torch import save_file
from tokenyard.cli import run
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

Report = dict[str, object]
SIZES: dict[str, object] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
}
SLIDING: dict[str, object] = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
RECURRENT = "it keeps a recurrent state, which a K/V cache cannot hold"
NO_INTERFACE = "transformers does not declare that it uses the attention interface"
ENCODER = "it is an encoder-decoder"


@pytest.fixture
def examine(
    tmp_path: Path, tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[[Mapping[str, object]], Report]:
    """A function that gives the doctor's findings on a config, with a tokenizer and weights that it need not read."""

    def report_of(config: Mapping[str, object]) -> Report:
        save_file({}, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(dict(config)))
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(tiny_llama_dir / name, tmp_path / name)
        code = run(["doctor", str(tmp_path), "--json"])
        report = json.loads(capsys.readouterr().out)
        assert code == (2 if "problem" in report["model"] else 0)
        assert report["problems"] == ([report["model"]["problem"]] if code else [])
        return {str(key): value for key, value in report["model"].items()}

    return report_of


def made(model_type: str, architecture: str, **values: object) -> dict[str, object]:
    """The config that transformers writes for a model type."""
    config = CONFIG_MAPPING[model_type].from_dict({**values, "architectures": [architecture], "dtype": "float32"})
    written: dict[str, object] = json.loads(config.to_json_string())
    return written


@pytest.mark.parametrize(
    ("model_type", "architecture", "extra", "rope", "window"),
    [
        ("llama", "LlamaForCausalLM", {}, "default, theta 10000", "none"),
        (
            "llama",
            "LlamaForCausalLM",
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "dynamic x 2, theta 10000; prompts of at most 64 tokens",
            "none",
        ),
        ("qwen2", "Qwen2ForCausalLM", SLIDING, "default, theta 10000", "16 tokens in 3 of 4 layers"),
        ("qwen3", "Qwen3ForCausalLM", {}, "default, theta 10000", "none"),
        ("mistral", "MistralForCausalLM", {"sliding_window": 24}, "default, theta 10000", "24 tokens in 4 of 4 layers"),
        ("smollm3", "SmolLM3ForCausalLM", {}, "default, theta 2e+06; none in 1 of 4 layers", "none"),
        ("granite", "GraniteForCausalLM", {"attention_multiplier": 0.1}, "default, theta 10000", "none"),
    ],
)
def test_a_fast_family_is_told_with_what_a_user_wants_to_know(
    model_type: str,
    architecture: str,
    extra: dict[str, object],
    rope: str,
    window: str,
    examine: Callable[[Mapping[str, object]], Report],
) -> None:
    report = examine(made(model_type, architecture, **SIZES, **extra))
    assert report["decoder"] == f"fast decoder ({model_type})"
    assert "why" not in report
    assert (report["rope"], report["window"], report["dtype"]) == (rope, window, "float32")
    assert report["layers"] == "4, 4 query and 2 KV heads of 8"
    assert report["max_model_len"] == (128 if "dynamic" in rope else 64)
    assert report["eos"] == ["2 <|im_end|>"]
    assert report["chat template"] == "yes"


@pytest.mark.parametrize(
    ("model_type", "architecture", "extra", "why"),
    [
        ("gemma", "GemmaForCausalLM", {}, "architecture GemmaForCausalLM is not one of: LlamaForCausalLM, "),
        ("phi3", "Phi3ForCausalLM", {"pad_token_id": 0}, "architecture Phi3ForCausalLM is not one of"),
        ("llama", "LlamaForCausalLM", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not silu"),
    ],
)
def test_an_adapter_model_is_told_with_why_and_what_is_left_to_check(
    model_type: str,
    architecture: str,
    extra: dict[str, object],
    why: str,
    examine: Callable[[Mapping[str, object]], Report],
) -> None:
    report = examine(made(model_type, architecture, **SIZES, **extra))
    assert report["decoder"] == f"adapter ({architecture})"
    assert str(report["why"]).startswith(f"not the fast decoder: {why}")
    assert "compared with transformers' own" in str(report["check"])
    assert report["max_model_len"] == 64


@pytest.mark.parametrize(
    ("model_type", "architecture", "extra", "reason"),
    [
        ("mamba", "MambaForCausalLM", {}, RECURRENT),
        ("mamba2", "Mamba2ForCausalLM", {}, RECURRENT),
        ("rwkv", "RwkvForCausalLM", {}, RECURRENT),
        ("qwen3_next", "Qwen3NextForCausalLM", {}, RECURRENT),
        ("bamba", "BambaForCausalLM", {}, RECURRENT),
        ("jamba", "JambaForCausalLM", {}, RECURRENT),
        ("minimax", "MiniMaxForCausalLM", {}, "its layers of type linear_attention need more than a K/V cache"),
        (
            "lfm2",
            "Lfm2ForCausalLM",
            {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
            "its layers of type conv need more than a K/V cache",
        ),
        ("t5", "T5ForConditionalGeneration", {}, ENCODER),
        ("bart", "BartForConditionalGeneration", {}, ENCODER),
        ("falcon", "FalconForCausalLM", {}, NO_INTERFACE),
        ("bloom", "BloomForCausalLM", {}, NO_INTERFACE),
        ("mpt", "MptForCausalLM", {}, NO_INTERFACE),
        ("gpt_neo", "GPTNeoForCausalLM", {}, NO_INTERFACE),
    ],
)
def test_a_model_that_cannot_be_run_is_refused_with_the_reason(
    model_type: str,
    architecture: str,
    extra: dict[str, object],
    reason: str,
    examine: Callable[[Mapping[str, object]], Report],
) -> None:
    report = examine(made(model_type, architecture, **extra))
    assert report["decoder"] == "none"
    assert str(report["problem"]).startswith(f"{architecture} cannot be run: ")
    assert reason in str(report["problem"])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"model_type": "llamma"}, "transformers does not know the model type 'llamma'; did you mean 'llama'"),
        ({"architectures": ["NoSuchForCausalLM"]}, "NoSuchForCausalLM is not a causal language model of model type"),
        ({"architectures": []}, "names no architecture"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"rope_scaling": {"type": "llama4"}}, "unknown rope type 'llama4'"),
        ({"max_position_embeddings": None}, "no length limit"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "LlamaForCausalLM cannot be run: "),
    ],
    ids=str,
)
def test_a_config_that_does_not_hold_is_a_problem_in_one_line(
    change: dict[str, object], problem: str, examine: Callable[[Mapping[str, object]], Report]
) -> None:
    config = {**made("llama", "LlamaForCausalLM", **SIZES), "rope_parameters": None, **change}
    found = str(examine(config)["problem"])
    assert problem in found
    assert "\n" not in found


def test_the_text_shows_the_same(tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", str(tiny_llama_dir)]) == 0
    shown = capsys.readouterr().out
    for line in ("decoder          fast decoder (llama)", "rope             default", "no problem found"):
        assert line in shown
