from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tokenyard.errors import ModelLoadError
from tokenyard.model.files import resolve_model
from tokenyard.model.gguf_reader import read_gguf
from tokenyard.model.gguf_tokenizer import tokenizer_from_gguf
from tokenyard.model.tokenizer import load_tokenizer
from tokenyard.model.weights import open_weights

MakeGGUF = Callable[..., Path]
WeightTable = dict[str, torch.Tensor]
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")


def header_bytes(*, version: int = 3, tensors: int = 0, keys: int = 0, body: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + body


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def tensor_info(*, dimensions: tuple[int, ...] = (32,), type_id: int = 0, offset: int = 0) -> bytes:
    shape = struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
    return text("t") + shape + struct.pack("<IQ", type_id, offset)


def refusal(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(ModelLoadError) as caught:
        read_gguf(path)
    return str(caught.value)


def test_the_header_reads_as_the_gguf_package_reads_it(tiny_gguf: Path) -> None:
    header, reference = read_gguf(tiny_gguf), gguf.GGUFReader(tiny_gguf)
    keys = [key for key in reference.fields if not key.startswith("GGUF.")]
    assert list(header.metadata) == keys
    assert all(header.metadata[key] == reference.fields[key].contents() for key in keys)
    assert [(t.name, t.offset, t.num_bytes) for t in header.tensors.values()] == [
        (t.name, t.data_offset, t.n_bytes) for t in reference.tensors
    ]


def test_metadata_becomes_the_same_config_as_the_folder_has(tiny_gguf: Path, tiny_llama_dir: Path) -> None:
    made, expected = resolve_model(str(tiny_gguf)), resolve_model(str(tiny_llama_dir))
    assert made.config == expected.config
    assert made.format == "gguf"
    assert made.eos_token_ids == (2,)


def test_tied_embeddings_are_those_without_an_output_tensor(make_gguf: MakeGGUF, tiny_weights: WeightTable) -> None:
    tied = {name: tensor for name, tensor in tiny_weights.items() if name != "lm_head.weight"}
    files = resolve_model(str(make_gguf(tied)))
    assert files.config["tie_word_embeddings"] is True
    with open_weights(files) as weights:
        assert weights.names() == tied.keys()


def test_mod_03_q_and_k_rows_come_back_in_the_order_of_their_heads(tiny_gguf: Path, tiny_weights: WeightTable) -> None:
    with open_weights(resolve_model(str(tiny_gguf))) as weights:
        assert weights.names() == tiny_weights.keys()
        for name, expected in tiny_weights.items():
            assert torch.equal(weights.get(name, torch.float32), expected), name


@pytest.mark.parametrize("type_name", TYPES)
def test_every_type_dequantises_near_the_original(
    make_gguf: MakeGGUF, tiny_weights: WeightTable, type_name: str
) -> None:
    path = make_gguf(quantisation=gguf.GGMLQuantizationType[type_name])
    with open_weights(resolve_model(str(path))) as weights:
        for name, expected in tiny_weights.items():
            got = weights.get(name, torch.float32)
            cosine = torch.nn.functional.cosine_similarity(got.flatten(), expected.flatten(), dim=0)
            assert cosine > 0.99, name
            assert torch.equal(weights.get(name, torch.bfloat16), got.bfloat16())


def test_large_tensors_dequantise_in_pieces_as_in_one(make_gguf: MakeGGUF, monkeypatch: pytest.MonkeyPatch) -> None:
    files = resolve_model(str(make_gguf(quantisation=gguf.GGMLQuantizationType.Q8_0)))
    with open_weights(files) as weights:
        whole = weights.get("model.embed_tokens.weight", torch.float32)
        monkeypatch.setattr("tokenyard.model.gguf_weights._CHUNK_VALUES", 200)
        assert torch.equal(weights.get("model.embed_tokens.weight", torch.float32), whole)


def test_types_without_a_checked_dequantiser_are_refused_by_name(make_gguf: MakeGGUF) -> None:
    path = make_gguf(quantisation=gguf.GGMLQuantizationType.MXFP4)
    with pytest.raises(ModelLoadError, match="MXFP4"):
        open_weights(resolve_model(str(path)))


def test_other_architectures_and_features_are_refused_by_name(make_gguf: MakeGGUF, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "qwen.gguf", "qwen2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    edits = {
        "experts": lambda writer: writer.add_expert_count(4),
        "part of each head": lambda writer: writer.add_rope_dimension_count(8),
        "longrope": lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE),
    }
    with pytest.raises(ModelLoadError, match="qwen2"):
        resolve_model(str(tmp_path / "qwen.gguf"))
    for words, edit in edits.items():
        with pytest.raises(ModelLoadError, match=words):
            resolve_model(str(make_gguf(edit=edit)))


def test_rope_scaling_is_read_from_metadata(make_gguf: MakeGGUF) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(128)

    files = resolve_model(str(make_gguf(edit=edit)))
    assert files.config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    assert files.max_model_len == 512


def test_llama_3_scaling_is_recovered_from_its_frequency_divisors(make_gguf: MakeGGUF) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, head_dim=16, max_position_embeddings=131072,
        rope_parameters={**scaling, "rope_theta": 500000.0},
    )  # fmt: skip
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500000.0 ** -(torch.arange(0, 16, 2).float() / 16)

    def edit(writer: gguf.GGUFWriter, divisors: torch.Tensor = plain / scaled) -> None:
        writer.add_tensor("rope_freqs.weight", divisors.numpy().astype(np.float32))

    weights = resolve_model(str(make_gguf(edit=edit, rope_theta=500000.0)))
    assert weights.config["rope_scaling"] == scaling
    with open_weights(weights) as source:
        assert not [name for name in source.names() if "rope" in name]
    with pytest.raises(ModelLoadError, match="rope_freqs"):
        resolve_model(str(make_gguf(edit=lambda writer: edit(writer, plain / scaled * 1.5), rope_theta=500000.0)))


def test_a_file_with_other_layers_than_it_declares_is_refused(make_gguf: MakeGGUF, tiny_weights: WeightTable) -> None:
    part = {name: tensor for name, tensor in tiny_weights.items() if ".layers.1." not in name}
    with pytest.raises(ModelLoadError, match="2 layers are declared and 1"):
        resolve_model(str(make_gguf(part)))


def test_a_tensor_without_a_place_is_refused_by_name(make_gguf: MakeGGUF) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.0.surprise.weight", np.zeros(32, dtype=np.float32))

    with pytest.raises(ModelLoadError, match=r"blk\.0\.surprise"):
        resolve_model(str(make_gguf(edit=edit)))


def test_mod_04_control_tokens_stay_whole_and_are_skipped_in_decoding(tiny_gguf: Path, tiny_llama_dir: Path) -> None:
    made, original = (load_tokenizer(resolve_model(str(path))) for path in (tiny_gguf, tiny_llama_dir))
    prompt = "<|im_start|>user\nhi 12 the<think><|im_end|>"
    ids = made.encode(prompt)
    assert ids == original.encode(prompt)
    assert (ids[0], ids[-1]) == (1, 2)
    assert made.decode(ids) == "user\nhi 12 the<think>"
    assert made.decode(ids, skip_special_tokens=False) == prompt
    messages = [{"role": "user", "content": "hi"}]
    assert made.render_chat(messages) == original.render_chat(messages)


@pytest.mark.parametrize("add_bos", [False, True])
def test_mod_04_add_bos_token_is_obeyed(make_gguf: MakeGGUF, add_bos: bool) -> None:
    tokenizer = load_tokenizer(resolve_model(str(make_gguf(add_bos=add_bos))))
    assert tokenizer.encode("") == ([1] if add_bos else [])
    assert 1 not in tokenizer.encode("hi", add_special_tokens=False)


@pytest.mark.parametrize("pre", ["gpt-4o", "unheard-of"])
def test_pre_tokenizers_that_are_not_known_exactly_are_refused_by_name(make_gguf: MakeGGUF, pre: str) -> None:
    files = resolve_model(str(make_gguf(pre=pre)))
    with pytest.raises(ModelLoadError, match=pre):
        load_tokenizer(files)


def test_c2_a_vocabulary_that_does_not_hold_is_refused(make_gguf: MakeGGUF, tiny_weights: WeightTable) -> None:
    short = {**tiny_weights, "model.embed_tokens.weight": tiny_weights["model.embed_tokens.weight"][:100]}
    with pytest.raises(ModelLoadError, match="more tokens than embeddings"):
        tokenizer_from_gguf(read_gguf(make_gguf(short)))
    path = make_gguf()
    path.write_bytes(path.read_bytes().replace(text("h i"), text("h \xfe"[:3])))
    with pytest.raises(ModelLoadError, match="merges"):
        tokenizer_from_gguf(read_gguf(path))


def test_c1_counts_sizes_and_offsets_are_checked_before_use(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    assert "begin" in refusal(path, b"GGML" + bytes(60))
    assert "mapped" in refusal(path, b"") or "empty" in refusal(path, b"")
    assert "version 1" in refusal(path, header_bytes(version=1))
    assert "tensors" in refusal(path, header_bytes(tensors=100_001))
    assert "keys" in refusal(path, header_bytes(keys=2**63))
    assert "ends" in refusal(path, header_bytes(keys=1))
    assert "string of" in refusal(path, header_bytes(keys=1, body=struct.pack("<Q", 2**40)))
    key = text("k")
    assert "value type" in refusal(path, header_bytes(keys=1, body=key + struct.pack("<I", 77)))
    array = struct.pack("<IIQ", 9, 4, 2**60)
    assert "array of" in refusal(path, header_bytes(keys=1, body=key + array))
    assert "array of type 9" in refusal(path, header_bytes(keys=1, body=key + struct.pack("<IIQ", 9, 9, 1)))
    twice = (key + struct.pack("<II", 4, 1)) * 2
    assert "twice" in refusal(path, header_bytes(keys=2, body=twice))


@pytest.mark.parametrize("alignment", [0, 3, 2**21])
def test_c1_alignment_is_a_power_of_two_within_bounds(tmp_path: Path, alignment: int) -> None:
    body = text("general.alignment") + struct.pack("<II", 4, alignment)
    assert "power of two" in refusal(tmp_path / "x.gguf", header_bytes(keys=1, body=body))


@pytest.mark.parametrize(
    ("info", "words"),
    [
        (tensor_info(dimensions=(2**42 + 1, 2**42 + 1, 2**42 + 1)), "outside"),
        (tensor_info(dimensions=(2**63, 2)), "outside"),
        (tensor_info(dimensions=(2**32, 2**32)), "outside"),
        (tensor_info(dimensions=(0,)), "blocks"),
        (tensor_info(dimensions=(1,) * 5), "dimensions"),
        (tensor_info(dimensions=(33,), type_id=8), "blocks"),
        (tensor_info(type_id=4), "type 4"),
        (tensor_info(type_id=2**31), "type"),
        (tensor_info(offset=1), "outside"),
        (tensor_info(offset=2**63), "outside"),
        (tensor_info() * 2, "twice"),
    ],
)
def test_c1_tensors_must_lie_inside_of_the_file(tmp_path: Path, info: bytes, words: str) -> None:
    count = 2 if words == "twice" else 1
    assert words in refusal(tmp_path / "x.gguf", header_bytes(tensors=count, body=info) + bytes(256))
