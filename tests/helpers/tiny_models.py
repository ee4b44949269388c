"""Tiny random models of every causal LM family of transformers that attends through its attention interface."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from tokenyard.model.hf_loading import config_for
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

VOCAB = 272  # with room for the tiny tokenizer's
WINDOW = 8
MAX_LENGTH = 128
Values = dict[str, object]


@dataclass(frozen=True, slots=True)
class Case:
    """A model type, and what its config has beyond `_BASE`; None takes a key of `_BASE` away."""

    model_type: str
    extra: Values = field(default_factory=dict)


_BASE: Values = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LENGTH,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEADS: Values = {"head_dim": 16}  # more than hidden_size / num_attention_heads
_WINDOW: Values = {"sliding_window": WINDOW}
_SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
_WINDOWS: Values = {**_WINDOW, "layer_types": _SLIDING}
_TIED: Values = {"tie_word_embeddings": True}
_EXPERTS: Values = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LOCAL_EXPERTS: Values = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED: Values = {
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
_LATENT: Values = {  # MLA: keys of 12 and values of 8 numbers a head
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 4,
}
_GPT2: Values = {"num_key_value_heads": None, "intermediate_size": None}
_TOWER: Values = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
_BERT: Values = {"is_decoder": True}
_PER_LAYER: Values = {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8}
_ROPE: Values = {"rope_type": "default", "rope_theta": 1e4}
_AUDIO: Values = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_blocks": 1,
    "num_attention_heads": 2,
    "ext_pw_out_channel": 16,
    "depthwise_separable_out_channel": 16,
    "nemo_conv_channels": 16,
}

RUNNING: dict[str, Case] = {
    "llama": Case("llama"),
    "mistral": Case("mistral", _WINDOW),
    "qwen2": Case("qwen2", _TIED),
    "qwen3": Case("qwen3", _HEADS),
    "smollm3": Case("smollm3"),
    "granite": Case("granite", {"attention_multiplier": 0.125, "residual_multiplier": 0.5}),
    "afmoe": Case("afmoe", {**_EXPERTS, **_HEADS, **_WINDOWS}),
    "apertus": Case("apertus"),
    "apertus1p5_text": Case("apertus1p5_text"),
    "arcee": Case("arcee"),
    "aria_text": Case("aria_text", {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1}),
    "axk1": Case("axk1", {**_ROUTED, **_LATENT}),
    "beam": Case("beam", {**_EXPERTS, **_HEADS, **_WINDOW}),
    "bitnet": Case("bitnet"),
    "codegen": Case("codegen", {"rotary_dim": 8}),
    "cohere": Case("cohere"),
    "cohere, q and k normed": Case("cohere", {"use_qk_norm": True}),
    "cohere2": Case("cohere2", {**_HEADS, **_WINDOWS}),
    "cohere2_moe": Case("cohere2_moe", {**_EXPERTS, **_HEADS, **_WINDOWS}),
    "cwm": Case("cwm", {**_HEADS, **_WINDOWS}),
    "deepseek_v2": Case("deepseek_v2", {**_ROUTED, **_LATENT}),
    "deepseek_v3": Case("deepseek_v3", {**_ROUTED, **_LATENT}),
    "dots1": Case("dots1", {**_ROUTED, **_WINDOWS, "n_shared_experts": 1}),
    "ernie4_5": Case("ernie4_5", _HEADS),
    "ernie4_5_moe": Case("ernie4_5_moe", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16}),
    "exaone": Case("exaone"),
    "exaone4": Case("exaone4", _WINDOWS),
    "exaone_moe": Case("exaone_moe", {**_EXPERTS, **_WINDOWS}),
    "flex_olmo": Case("flex_olmo", {"num_experts": 4, "num_experts_per_tok": 2}),
    "flint": Case("flint", {**_EXPERTS, **_HEADS, **_WINDOWS}),
    "gemma": Case("gemma", {**_HEADS, **_TIED}),
    "gemma2": Case("gemma2", {**_HEADS, **_WINDOWS, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0}),
    "gemma3_text": Case("gemma3_text", {**_HEADS, **_WINDOWS, **_TIED}),
    "glm": Case("glm", _HEADS),
    "glm4": Case("glm4", _HEADS),
    "glm4_moe": Case("glm4_moe", {**_ROUTED, "n_shared_experts": 1, "use_qk_norm": True}),
    "glm4_moe_lite": Case("glm4_moe_lite", {**_ROUTED, **_LATENT}),
    "gpt-sw3": Case("gpt-sw3", _GPT2),
    "gpt2": Case("gpt2", {**_GPT2, **_TIED}),
    "gpt_bigcode": Case("gpt_bigcode", _GPT2),
    "gpt_bigcode, all heads": Case("gpt_bigcode", {**_GPT2, "multi_query": False}),
    "gpt_neox": Case("gpt_neox"),
    "gpt_neox, one after the other": Case("gpt_neox", {"use_parallel_residual": False, "rotary_pct": 0.5}),
    "gpt_oss": Case("gpt_oss", {**_LOCAL_EXPERTS, **_HEADS, **_WINDOWS}),
    "gptj": Case("gptj", {"rotary_dim": 8}),
    "granite_swa": Case("granite_swa", _WINDOWS),
    "granitemoe": Case("granitemoe", _LOCAL_EXPERTS),
    "granitemoe_swa": Case("granitemoe_swa", {**_LOCAL_EXPERTS, **_WINDOWS}),
    "granitemoeshared": Case("granitemoeshared", {**_LOCAL_EXPERTS, "shared_intermediate_size": 16}),
    "helium": Case("helium", {"head_dim": 12}),
    "hunyuan_v1_dense": Case("hunyuan_v1_dense", _HEADS),
    "hunyuan_v1_moe": Case("hunyuan_v1_moe", {"num_experts": 4, "moe_topk": 2, **_HEADS}),
    "hy_v3": Case("hy_v3", {**_EXPERTS, **_HEADS}),
    "hyperclovax": Case("hyperclovax"),
    "internlm3": Case("internlm3", {"head_dim": 12}),
    "iquestcoder": Case("iquestcoder", {"head_dim": 12}),
    "jais2": Case("jais2"),
    "jetmoe": Case("jetmoe", {**_LOCAL_EXPERTS, "kv_channels": 12}),
    "kolibri1": Case("kolibri1", {**_EXPERTS, **_HEADS, **_WINDOWS}),
    "laguna": Case("laguna", {**_EXPERTS, **_HEADS, **_WINDOWS}),
    "mellum": Case("mellum", {**_EXPERTS, **_HEADS, **_WINDOWS}),
    "minicpm3": Case("minicpm3", {**_LATENT, "head_dim": None}),
    "minimax_m2": Case("minimax_m2", {**_LOCAL_EXPERTS, **_HEADS}),
    "ministral": Case("ministral", {**_HEADS, **_WINDOWS}),
    "ministral3": Case("ministral3", _HEADS),
    "mixtral": Case("mixtral", {**_LOCAL_EXPERTS, **_WINDOW}),
    "modernbert-decoder": Case("modernbert-decoder", {"local_attention": 2 * WINDOW}),
    "nanochat": Case("nanochat"),
    "olmo": Case("olmo", {"clip_qkv": 0.5}),
    "olmo2": Case("olmo2"),
    "olmo3": Case("olmo3", _WINDOWS),
    "olmoe": Case("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "opt": Case("opt", {"ffn_dim": 64, "word_embed_proj_dim": 48}),
    "persimmon": Case("persimmon"),
    "phi": Case("phi"),
    "phi3": Case("phi3", _WINDOW),
    "phimoe": Case("phimoe", _LOCAL_EXPERTS),
    "qwen2_moe": Case("qwen2_moe", {**_EXPERTS, "shared_expert_intermediate_size": 16}),
    "qwen3_moe": Case("qwen3_moe", {**_EXPERTS, **_HEADS}),
    "sarvam_mla": Case("sarvam_mla", {**_ROUTED, **_LATENT}),
    "sarvam_moe": Case("sarvam_moe", {**_ROUTED, "head_dim": 12}),
    "seed_oss": Case("seed_oss", _HEADS),
    "solar_open": Case("solar_open", {**_ROUTED, **_HEADS}),
    "starcoder2": Case("starcoder2", _WINDOW),
    "vaultgemma": Case("vaultgemma", {**_HEADS, **_WINDOWS}),
    "youtu": Case("youtu", _LATENT),
    "bert-generation": Case("bert-generation", _BERT),
    "bert as decoder": Case("bert", _BERT),
    "cohere_compass_text": Case(
        "cohere_compass_text",
        {**_HEADS, **_WINDOWS, "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    ),
    "ctrl": Case("ctrl", {"dff": 64}),
    "dbrx": Case(
        "dbrx",
        {
            "d_model": 48,
            "n_heads": 4,
            "n_layers": 3,
            "max_seq_len": MAX_LENGTH,
            "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8},
            "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    "electra": Case("electra", {**_BERT, "embedding_size": 48}),
    "ernie": Case("ernie", _BERT),
    "gemma3n_text": Case(
        "gemma3n_text",
        {
            **_HEADS,
            **_PER_LAYER,
            **_WINDOW,
            "layer_types": _SLIDING[:2] * 3,
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 2,
            "activation_sparsity_pattern": [0.0] * 6,
            "laurel_rank": 4,
        },
    ),
    "gemma4_text, heads of one size": Case("gemma4_text", {**_HEADS, **_PER_LAYER, **_WINDOWS, "global_head_dim": 16}),
    "longcat_flash": Case(
        "longcat_flash",
        {
            **_LATENT,
            "num_layers": 2,
            "num_hidden_layers": None,
            "ffn_hidden_size": 64,
            "expert_ffn_hidden_size": 16,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "moe_topk": 2,
        },
    ),
    "minimax_m3_vl_text": Case(
        "minimax_m3_vl_text",
        {**_LOCAL_EXPERTS, **_HEADS, "dense_intermediate_size": 32, "shared_intermediate_size": 16, "rotary_dim": 8},
    ),
    "roc_bert": Case(
        "roc_bert",
        {
            **_BERT,
            "enable_pronunciation": False,
            "enable_shape": False,
            "concat_input": False,
            "pronunciation_vocab_size": 8,
            "shape_vocab_size": 8,
        },
    ),
    "phi4_multimodal": Case("phi4_multimodal", {"vision_config": {**_TOWER, "crop_size": 16}, "audio_config": _AUDIO}),
    "emu3": Case("emu3", {"text_config": {}}),
    "fuyu": Case("fuyu", {"text_config": {}}),
    "gemma3": Case(
        "gemma3", {"text_config": {**_HEADS, **_WINDOWS}, "vision_config": _TOWER, "mm_tokens_per_image": 4}
    ),
    "got_ocr2": Case(
        "got_ocr2",
        {"text_config": {}, "vision_config": {**_TOWER, "mlp_dim": 16, "window_size": 2, "output_channels": 16}},
    ),
    "moss_transcribe_diarize": Case("moss_transcribe_diarize", {"text_config": _HEADS, "audio_config": _TOWER}),
}
"""Families that run. Of models for more than text, whose config nests that of their text model, the text is run."""

_COUNTS_FROM_PADDING = "counts positions from its padding id on"
_TWICE = "attends more than once in a layer"
_MIXED_HEADS = "its layers differ in their heads"
_A_DRAFT = "drafts from another model's states"
_CONVOLUTIONS = "its layers of type conv need more than a K/V cache"
_HIDDEN_WINDOWS = "does not tell its attention of its sliding windows"
_POSITIONS = "gives other logits in a packed batch than alone"  # it counts positions from pad_token_id + 1
_HEAD_SIZES = "its layers differ in their numbers or sizes of heads"
_NEEDS_STATES = "its forward fails: ValueError: inputs_embeds and shared_kv_states cannot be None"


class Refusal(NamedTuple):
    """A model that only loading finds out: what the error says, as a pattern, and that in a few words for the docs."""

    case: Case
    says: str
    because: str


REFUSED: dict[str, Refusal] = {
    "bert": Refusal(Case("bert"), "its attention is not causal", "is an encoder"),
    "camembert": Refusal(Case("camembert", _BERT), _POSITIONS, _COUNTS_FROM_PADDING),
    "data2vec-text": Refusal(Case("data2vec-text", _BERT), _POSITIONS, _COUNTS_FROM_PADDING),
    "diffllama": Refusal(Case("diffllama"), r"of its 3 layers, attention runs in: \[0, 0, 1, 1, 2, 2\]", _TWICE),
    "doge": Refusal(Case("doge"), "its attention brings a mask or bias of its own", "brings a mask or bias of its own"),
    "dory": Refusal(Case("dory"), r"of its 3 layers, attention runs in: \[0, 1, 2, 0, 1, 2\]", _TWICE),
    "gemma4": Refusal(Case("gemma4", {"text_config": {**_HEADS, **_PER_LAYER, **_WINDOWS}}), _HEAD_SIZES, _MIXED_HEADS),
    "gemma4_text": Refusal(Case("gemma4_text", {**_HEADS, **_PER_LAYER, **_WINDOWS}), _HEAD_SIZES, _MIXED_HEADS),
    "gemma4_assistant": Refusal(
        Case(
            "gemma4_assistant",
            {
                "text_config": {
                    **_HEADS,
                    **_WINDOWS,
                    "hidden_size_per_layer_input": 0,
                    "vocab_size_per_layer_input": 0,
                    "num_kv_shared_layers": 3,
                }
            },
        ),
        _NEEDS_STATES,
        _A_DRAFT,
    ),
    "gemma4_unified": Refusal(
        Case("gemma4_unified", {"text_config": {**_HEADS, **_WINDOWS}}), _HEAD_SIZES, _MIXED_HEADS
    ),
    "gemma4_unified_assistant": Refusal(
        Case(
            "gemma4_unified_assistant",
            {"text_config": {**_HEADS, **_WINDOWS, "num_kv_shared_layers": 3}, "backbone_hidden_size": 48},
        ),
        _NEEDS_STATES,
        _A_DRAFT,
    ),
    "gemma4_unified_text": Refusal(Case("gemma4_unified_text", {**_HEADS, **_WINDOWS}), _HEAD_SIZES, _MIXED_HEADS),
    "hrm_text": Refusal(Case("hrm_text"), "of its 24 layers, attention runs in", _TWICE),
    "lfm2": Refusal(
        Case("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}),
        "its layers of type conv need more",
        _CONVOLUTIONS,
    ),
    "lfm2_moe": Refusal(
        Case("lfm2_moe", {**_EXPERTS, "layer_types": ["conv", "full_attention", "conv"]}),
        "its layers of type conv need more than a K/V cache",
        _CONVOLUTIONS,
    ),
    "mimo_v2_flash": Refusal(
        Case("mimo_v2_flash", {**_ROUTED, **_HEADS, **_WINDOWS, "v_head_dim": 8}), _HEAD_SIZES, _MIXED_HEADS
    ),
    "minicpm3 with fewer heads of keys": Refusal(
        Case("minicpm3", {**_LATENT, "head_dim": None, "num_key_value_heads": 2}),
        "its forward fails: RuntimeError: The size of tensor",
        "has as many heads of keys as of queries",
    ),
    "mllama": Refusal(
        Case("mllama", {"text_config": {"cross_attention_layers": [1]}}),
        r"of its 3 layers, attention runs in: \[0, 2\]",
        "some of its layers attend to an image",
    ),
    "moshi": Refusal(
        Case("moshi", {"ffn_dim": 64}), r"its config asks for the sliding windows \[3000, 3000, 3000\]", _HIDDEN_WINDOWS
    ),
    "nemotron": Refusal(
        Case("nemotron"),
        "does not receive the keywords of the model's forward",
        "does not hand the keywords of its forward to its attention",
    ),
    "phimoe with windows": Refusal(
        Case("phimoe", {**_LOCAL_EXPERTS, **_WINDOW}),
        r"its config asks for the sliding windows \[8, 8, 8\], its layers for \[None, None, None\]",
        _HIDDEN_WINDOWS,
    ),
    "roberta": Refusal(Case("roberta", _BERT), _POSITIONS, _COUNTS_FROM_PADDING),
    "roberta-prelayernorm": Refusal(Case("roberta-prelayernorm", _BERT), _POSITIONS, _COUNTS_FROM_PADDING),
    "xlm-roberta": Refusal(Case("xlm-roberta", _BERT), _POSITIONS, _COUNTS_FROM_PADDING),
    "xlm-roberta-xl": Refusal(Case("xlm-roberta-xl", _BERT), _POSITIONS, _COUNTS_FROM_PADDING),
    "xmod": Refusal(Case("xmod", {**_BERT, "default_language": "en_XX"}), _POSITIONS, _COUNTS_FROM_PADDING),
}
"""Families that only loading finds out, with the reason that it gives."""


def config_of(case: Case) -> PreTrainedConfig:
    """A config of tiny sizes."""
    text = case.extra.get("text_config")
    values = {**case.extra, "text_config": _without_none({**_BASE, **text})} if isinstance(text, dict) else case.extra
    base = {} if isinstance(text, dict) else _BASE
    config: PreTrainedConfig = CONFIG_MAPPING[case.model_type].from_dict(_without_none({**base, **values}))
    return config


def make_model(case: Case) -> PreTrainedModel:
    """A random model; its weights are large, so that attention matters, and its norms and biases are not the usual."""
    config = config_of(case)
    model_class: type[PreTrainedModel] = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model = model_class(config_for(model_class, config))
    _fill(model)
    return model


def _without_none(values: Values) -> Values:
    return {key: value for key, value in values.items() if value is not None}


def write_model(folder: Path, case: Case, tokenizer_from: Path) -> Path:
    """A folder with the model as transformers saves it and the tokenizer of another folder."""
    model = make_model(case)
    model.save_pretrained(folder)
    config = config_of(case)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_from / name, folder / name)
    return folder


@torch.no_grad()
def _fill(model: PreTrainedModel) -> None:
    torch.manual_seed(11)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_(0, 0.1)
        elif "norm" in name or "ln_" in name:
            parameter.uniform_(0.5, 1.5)
        else:
            parameter.normal_(0, 0.3 if parameter.dim() == 1 else 0.2)
