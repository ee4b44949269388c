from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tokenyard.errors import ModelLoadError
from tokenyard.model.eos import eos_token_ids
from tokenyard.model.files import ModelFiles, resolve_model
from tokenyard.model.json_files import read_json
from tokenyard.model.tokenizer import load_tokenizer

MakeLlama = Callable[..., Path]


def files_with(config: dict[str, object], generation_config: dict[str, object] | None = None) -> ModelFiles:
    return ModelFiles(
        name="m",
        path=Path("m"),
        format="safetensors",
        config={"max_position_embeddings": 1000, **config},
        generation_config=generation_config or {},
    )


def edit_json(path: Path, **changes: object) -> None:
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**content, **changes}))


def message_of(name: str) -> str:
    with pytest.raises(ModelLoadError) as caught:
        resolve_model(name)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_folder_resolves_to_its_config(tiny_llama_dir: Path) -> None:
    files = resolve_model(str(tiny_llama_dir))
    assert (files.format, files.path, files.architecture) == ("safetensors", tiny_llama_dir, "LlamaForCausalLM")
    assert files.max_model_len == 256
    assert files.torch_dtype == "float32"


def test_smp_10_all_eos_ids_of_the_generation_config_count(tiny_llama_dir: Path) -> None:
    assert resolve_model(str(tiny_llama_dir)).eos_token_ids == (2, 0)
    assert files_with({"eos_token_id": 5}).eos_token_ids == (5,)
    assert files_with({"eos_token_id": 5}, {"eos_token_id": [7, 5, 7]}).eos_token_ids == (7, 5)
    assert files_with({}).eos_token_ids == ()


@pytest.mark.parametrize("nothing", [{}, {"eos_token_id": None}, {"eos_token_id": []}])
def test_smp_10_where_one_config_names_no_eos_the_next_is_asked(
    make_llama: MakeLlama, nothing: dict[str, object]
) -> None:
    assert files_with({"eos_token_id": [5, 6]}, nothing).eos_token_ids == (5, 6)
    folder = make_llama()
    edit_json(folder / "config.json", eos_token_id=nothing.get("eos_token_id"))
    (folder / "generation_config.json").write_text(json.dumps(nothing))
    files = resolve_model(str(folder))
    tokenizer = load_tokenizer(files)
    assert eos_token_ids(files, tokenizer) == (tokenizer.token_to_id("<|im_end|>"),)
    assert eos_token_ids(replace(files, config={"eos_token_id": 7}), tokenizer) == (7,)
    for eos_token in ("no such token", None):
        assert eos_token_ids(replace(files, eos_token=eos_token), tokenizer) == ()


@pytest.mark.parametrize("way", ["text", "object", "special_tokens_map"])
def test_the_tokenizer_s_eos_is_read_however_it_is_written(make_llama: MakeLlama, way: str) -> None:
    folder = make_llama()
    value = {"content": "<|endoftext|>", "special": True} if way == "object" else "<|endoftext|>"
    if way == "special_tokens_map":
        (folder / "tokenizer_config.json").write_text("{}")
        edit_json(folder / "special_tokens_map.json", eos_token=value)
    else:
        edit_json(folder / "tokenizer_config.json", eos_token=value)
    assert resolve_model(str(folder)).eos_token == "<|endoftext|>"


@pytest.mark.parametrize("value", ["2", [2, "x"], True, -1, [[2]], 1.5])
def test_an_eos_id_that_is_no_id_is_refused(value: object) -> None:
    with pytest.raises(ModelLoadError, match="eos_token_id"):
        _ = files_with({"eos_token_id": value}).eos_token_ids


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (None, 1000),
        ({"rope_type": "linear", "factor": 4.0}, 4000),
        ({"type": "dynamic", "factor": 2}, 2000),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 500}, 2000),
        ({"rope_type": "yarn", "factor": 4.0}, 4000),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 100}, 1000),
        ({"rope_type": "longrope", "factor": 8.0}, 1000),
        ({"rope_type": "linear"}, 1000),
        ({"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {}}, 8000),
    ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_mod_06_the_length_limit_follows_the_rope_scaling(key: str, scaling: object, expected: int) -> None:
    assert files_with({key: scaling}).max_model_len == expected


def test_mod_06_where_the_original_length_stands_and_which_models_state_the_scaled_one() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 500}
    assert files_with({"rope_scaling": yarn, "original_max_position_embeddings": 300}).max_model_len == 1200
    gemma = {"rope_type": "linear", "factor": 8.0}
    assert files_with({"model_type": "gemma3_text", "rope_scaling": gemma}).max_model_len == 1000
    assert files_with({"rope_scaling": {**gemma, "factor": float("inf")}}).max_model_len == 1000


def test_a_config_without_a_length_or_with_an_odd_dtype_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="max_position_embeddings"):
        _ = files_with({"max_position_embeddings": None}).max_model_len
    with pytest.raises(ModelLoadError, match="float8_e4m3fn"):
        _ = files_with({"torch_dtype": "float8_e4m3fn"}).torch_dtype


def test_names_that_lead_nowhere_say_what_is_allowed(tmp_path: Path, tiny_llama_dir: Path) -> None:
    assert "did you mean 'smollm2-135m'" in message_of("smollm2-135M")
    near = message_of(str(tiny_llama_dir.parent / "tinny"))
    assert "did you mean 'tiny'" in near
    assert "config.json" in near
    assert "no such file" in message_of(str(tmp_path / "absent.gguf"))
    message_of("")
    message_of("a\nb")
    message_of("\0")


def test_a_folder_without_config_says_what_it_is_instead(tmp_path: Path) -> None:
    assert "no config.json" in message_of(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "LoRA" in message_of(str(tmp_path))
    (tmp_path / "weights.gguf").write_bytes(b"")
    assert "weights.gguf" in message_of(str(tmp_path))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt"])
def test_b1_pickled_weights_are_refused_unread(make_llama: MakeLlama, name: str) -> None:
    folder = make_llama()
    (folder / "model.safetensors").rename(folder / name)
    assert "pickle" in message_of(str(folder))
    (folder / name).unlink()
    assert "model.safetensors" in message_of(str(folder))


def test_a_single_file_that_is_no_gguf_is_refused(tiny_llama_dir: Path) -> None:
    assert ".gguf" in message_of(str(tiny_llama_dir / "model.safetensors"))


@pytest.mark.parametrize("auto_map", [7, 0, None, {}, []])
def test_b2_in_a_vocabulary_auto_map_is_a_word_like_any_other(make_llama: MakeLlama, auto_map: object) -> None:
    folder = make_llama()
    edit_json(folder / "added_tokens.json", auto_map=auto_map)
    assert resolve_model(str(folder)).format == "safetensors"


def test_json_that_nobody_reads_need_not_be_valid(make_llama: MakeLlama) -> None:
    folder = make_llama()
    (folder / "notes.json").write_text("{not JSON")
    (folder / "folder.json").mkdir()
    assert resolve_model(str(folder)).format == "safetensors"
    (folder / "special_tokens_map.json").write_text("{not JSON")
    assert "special_tokens_map.json" in message_of(str(folder))


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer_config.json", "processor_config.json"]
)
def test_b2_remote_code_is_refused_wherever_it_is_named(make_llama: MakeLlama, name: str) -> None:
    folder = make_llama()
    edit_json(folder / name, nested=[{"auto_map": {"AutoConfig": "evil.Config"}}])
    message = message_of(str(folder))
    assert "auto_map" in message
    assert name in message


def test_b4_b5_keys_that_choose_code_are_dropped_at_every_depth(make_llama: MakeLlama) -> None:
    folder = make_llama()
    evil = {
        "_attn_implementation_internal": "someone/kernels",
        "_attn_implementation": "x/y",
        "attn_implementation": "x/y",
        "use_kernels": True,
        "trust_remote_code": True,
        "_experts_implementation_internal": "x/y",
        "transformers_weights": "../x.safetensors",
        "_target_": "os.system",
    }
    edit_json(folder / "config.json", **evil, text_config={**evil, "list": [dict(evil)], "kept": 1})
    config = resolve_model(str(folder)).config
    assert not evil.keys() & config.keys()
    assert config["text_config"] == {"list": [{}], "kept": 1}


def test_quantised_checkpoints_are_refused_by_method(make_llama: MakeLlama) -> None:
    folder = make_llama()
    edit_json(folder / "config.json", quantization_config={"quant_method": "awq"})
    assert "awq" in message_of(str(folder))


@pytest.mark.parametrize(
    "content", [b"{", b"[1]", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 600 + b"1" + b"}" * 600, b""]
)
def test_broken_json_is_one_clear_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"config\.json") as caught:
        read_json(path)
    assert "\n" not in str(caught.value)


def test_json_beyond_the_cap_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(2**30)
    with pytest.raises(ModelLoadError, match="at most"):
        read_json(path)


def test_resolving_and_tokenizing_import_neither_torch_nor_transformers(tiny_llama_dir: Path) -> None:
    code = (
        "import sys\n"
        "from tokenyard.model.files import resolve_model\n"
        "from tokenyard.model.tokenizer import load_tokenizer\n"
        "tokenizer = load_tokenizer(resolve_model(sys.argv[1]))\n"
        "tokenizer.encode_chat([{'role': 'user', 'content': 'hi <|im_end|>'}])\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'gguf'} & set(sys.modules)))\n"
    )
    command = [sys.executable, "-c", code, str(tiny_llama_dir)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "[]"
