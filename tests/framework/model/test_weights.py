from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenyard.errors import ModelLoadError
from tokenyard.model.files import resolve_model
from tokenyard.model.loader import load_model
from tokenyard.model.weights import WeightSource, open_weights

MakeLlama = Callable[..., Path]


def weights_of(folder: Path) -> WeightSource:
    return open_weights(resolve_model(str(folder)))


def shard(folder: Path) -> dict[str, torch.Tensor]:
    """Turn a single-file folder into two shards with an index; returns all tensors."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file_name, part in halves.items():
        save_file({name: tensors[name] for name in part}, folder / file_name)
    write_index(folder, {name: file_name for file_name, part in halves.items() for name in part})
    return tensors


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def read_index(folder: Path) -> dict[str, str]:
    content: dict[str, dict[str, str]] = json.loads((folder / "model.safetensors.index.json").read_text())
    return content["weight_map"]


def test_mod_01_names_are_those_of_the_checkpoint(tiny_llama_dir: Path, tiny_tied_llama_dir: Path) -> None:
    with weights_of(tiny_llama_dir) as untied, weights_of(tiny_tied_llama_dir) as tied:
        assert untied.names() - tied.names() == {"lm_head.weight"}


def test_tensors_come_as_stored_or_in_the_dtype_asked_for(
    tiny_llama_dir: Path, tiny_weights: dict[str, torch.Tensor]
) -> None:
    with weights_of(tiny_llama_dir) as weights:
        assert weights.names() == tiny_weights.keys()
        for name, expected in tiny_weights.items():
            assert torch.equal(weights.get(name, torch.float32), expected)
            assert torch.equal(weights.get(name, torch.bfloat16), expected.bfloat16())


def test_tensors_outlive_the_closed_source(tiny_llama_dir: Path, tiny_weights: dict[str, torch.Tensor]) -> None:
    weights = weights_of(tiny_llama_dir)
    tensor = weights.get("model.norm.weight", torch.float32)
    weights.close()
    weights.close()
    assert torch.equal(tensor, tiny_weights["model.norm.weight"])
    with pytest.raises(ModelLoadError):
        weights.get("model.norm.weight", torch.float32)


def test_an_unknown_name_is_answered_with_the_nearest(tiny_llama_dir: Path) -> None:
    with (
        weights_of(tiny_llama_dir) as weights,
        pytest.raises(ModelLoadError, match=r"did you mean 'model.norm.weight'"),
    ):
        weights.get("model.norms.weight", torch.float32)


def test_shards_are_read_through_their_index(make_llama: MakeLlama) -> None:
    folder = make_llama()
    tensors = shard(folder)
    with weights_of(folder) as weights:
        assert weights.names() == tensors.keys()
        assert all(torch.equal(weights.get(name, torch.float32), tensors[name]) for name in tensors)


def test_mod_08_the_index_decides_which_shard_a_tensor_comes_from(make_llama: MakeLlama) -> None:
    folder = make_llama()
    tensors = shard(folder)
    index = read_index(folder)
    name = next(name for name, file in index.items() if file == "a.safetensors")
    foreign = load_file(folder / "b.safetensors")
    save_file({**foreign, name: tensors[name] + 1}, folder / "b.safetensors")
    save_file({key: value - 1 for key, value in tensors.items()}, folder / "consolidated.safetensors")
    with weights_of(folder) as weights:
        assert weights.names() == tensors.keys()
        assert torch.equal(weights.get(name, torch.float32), tensors[name])


def test_a_missing_shard_or_tensor_is_named(make_llama: MakeLlama) -> None:
    folder = make_llama()
    shard(folder)
    index = read_index(folder)
    write_index(folder, {**index, "extra.weight": "a.safetensors"})
    with pytest.raises(ModelLoadError, match=r"extra\.weight"):
        weights_of(folder)
    write_index(folder, {**index, "extra.weight": "c.safetensors"})
    with pytest.raises(ModelLoadError, match=r"c\.safetensors"):
        weights_of(folder)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/passwd", "a/b", "", ".", "..", "a\0b", "x" * 200, 3, None, "ü"]
)
def test_b9_file_names_in_the_index_never_leave_the_folder(make_llama: MakeLlama, name: object) -> None:
    folder = make_llama()
    shard(folder)
    (folder.parent / "x.safetensors").write_bytes((folder / "a.safetensors").read_bytes())
    write_index(folder, {**read_index(folder), "x": name})
    with pytest.raises(ModelLoadError, match=r"plain names|missing"):
        weights_of(folder)


def test_links_to_blobs_as_the_hub_cache_makes_them_are_followed(make_llama: MakeLlama) -> None:
    folder = make_llama()
    blob = folder.parent / "blob"
    (folder / "model.safetensors").rename(blob)
    (folder / "model.safetensors").symlink_to(blob)
    with weights_of(folder) as weights:
        assert weights.names()


@pytest.mark.parametrize("keep", [0, 4, 100, -10])
def test_a_truncated_file_is_refused_when_it_is_opened(make_llama: MakeLlama, keep: int) -> None:
    path = make_llama() / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: not a complete"):
        weights_of(path.parent)


@pytest.mark.parametrize("weight_map", [{}, [], "x", None])
def test_an_index_without_a_map_is_refused(make_llama: MakeLlama, weight_map: object) -> None:
    folder = make_llama()
    write_index(folder, weight_map)
    with pytest.raises(ModelLoadError, match="weight_map"):
        weights_of(folder)


def test_integers_are_not_taken_for_weights(make_llama: MakeLlama) -> None:
    folder = make_llama()
    save_file({"packed": torch.zeros(4, dtype=torch.int32)}, folder / "model.safetensors")
    with weights_of(folder) as weights, pytest.raises(ModelLoadError, match="int32"):
        weights.get("packed", torch.float32)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_weights_of_one_dtype_are_mapped_not_copied(tiny_llama_dir: Path) -> None:
    with weights_of(tiny_llama_dir) as weights:
        first = weights.get("model.embed_tokens.weight", torch.float32)
        again = weights.get("model.embed_tokens.weight", torch.float32)
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "model.safetensors" in line]
    ranges = [tuple(int(part, 16) for part in line.split()[0].split("-")) for line in mapped]
    for tensor in (first, again):
        assert any(start <= tensor.data_ptr() < end for start, end in ranges)


# Shards


def olmo2(folder: Path, tokenizer_from: Path, **changes: object) -> Path:
    """A sharded model that only transformers' own code can run."""
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    vocab_size = json.loads((tokenizer_from / "config.json").read_text())["vocab_size"]
    config = transformers.Olmo2Config.from_dict({**sizes, "vocab_size": vocab_size, **changes})
    torch.manual_seed(3)
    transformers.Olmo2ForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_from / name, folder / name)
    return folder


def test_mod_08_transformers_decoders_too_get_what_the_index_assigns(tiny_llama_dir: Path, tmp_path: Path) -> None:
    folder = olmo2(tmp_path / "model", tiny_llama_dir)
    tensors = shard(folder)
    for file_name, own in (("a.safetensors", 0), ("b.safetensors", 1)):
        foreign = {name: tensors[name] + 1 for name in sorted(tensors)[1 - own :: 2]}
        save_file({**load_file(folder / file_name), **foreign, "of.another.model": torch.zeros(3)}, folder / file_name)
    save_file({name: tensor - 1 for name, tensor in tensors.items()}, folder / "consolidated.safetensors")
    (folder / "adapter_config.json").write_text("{}")
    model = load_with_transformers(folder)
    state = model.state_dict()
    assert state.keys() == tensors.keys()
    assert all(torch.equal(state[name], tensors[name]) for name in tensors)


def load_with_transformers(folder: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    from tokenyard.model import hf_attention
    from tokenyard.model.hf_loading import build_config, find_class, load_weights

    hf_attention.register()
    files = resolve_model(str(folder))
    config = build_config(files)
    model: torch.nn.Module = load_weights(files, find_class(files, config), config, dtype, torch.device("cpu"))
    return model


def test_a_tensor_that_the_index_names_twice_is_an_error_that_names_it(make_llama: MakeLlama) -> None:
    folder = make_llama()
    shard(folder)
    index = folder / "model.safetensors.index.json"
    text = index.read_text()
    index.write_text(text.replace('"weight_map": {', '"weight_map": {"model.norm.weight": "a.safetensors", ', 1))
    with pytest.raises(ModelLoadError, match=r"index\.json: .*'model\.norm\.weight' stands in it twice"):
        weights_of(folder)


@pytest.mark.parametrize("names", [("x", "x"), ("x", "y")])
def test_a_header_with_a_name_twice_or_overlapping_tensors_is_refused(
    make_llama: MakeLlama, names: tuple[str, str]
) -> None:
    entries = ", ".join(f'"{name}": {{"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}' for name in names)
    header = f"{{{entries}}}".encode()
    folder = make_llama()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: .*(twice|not a complete)"):
        weights_of(folder)


@pytest.mark.parametrize("decoder", ["fast", "adapter"])
@pytest.mark.parametrize("damage", ["missing", "truncated", "empty", "of another model"])
def test_a_damaged_shard_is_named(
    make_llama: MakeLlama, tiny_llama_dir: Path, tmp_path: Path, decoder: str, damage: str
) -> None:
    folder = make_llama() if decoder == "fast" else olmo2(tmp_path / "olmo", tiny_llama_dir)
    shard(folder)
    path = folder / "b.safetensors"
    if damage == "missing":
        path.unlink()
    elif damage == "of another model":
        save_file({name: torch.zeros(3) for name in ("x", "y")}, path)
    else:
        path.write_bytes(path.read_bytes()[: 0 if damage == "empty" else -5])
    with pytest.raises(ModelLoadError, match=r"b\.safetensors") as caught:
        load_model(resolve_model(str(folder)), dtype=torch.float32, device=torch.device("cpu"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("decoder", ["fast", "adapter"])
def test_a_shard_of_a_model_of_other_sizes_is_an_error_that_names_a_tensor(
    make_llama: MakeLlama, tiny_llama_dir: Path, tmp_path: Path, decoder: str
) -> None:
    folder = make_llama() if decoder == "fast" else olmo2(tmp_path / "olmo", tiny_llama_dir)
    shard(folder)
    wrong = {name: torch.zeros(3, 5) for name in load_file(folder / "b.safetensors")}
    save_file(wrong, folder / "b.safetensors")
    with pytest.raises(ModelLoadError, match=r"model\.|lm_head"):
        load_model(resolve_model(str(folder)), dtype=torch.float32, device=torch.device("cpu"))


# Memory and dtypes


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_transformers_decoders_too_use_the_file_s_own_memory(tiny_llama_dir: Path, tmp_path: Path) -> None:
    folder = olmo2(tmp_path / "mapped-model", tiny_llama_dir)
    model = load_with_transformers(folder)
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "mapped-model" in line]
    ranges = [[int(part, 16) for part in line[0].split("-")] for line in maps]
    for name, parameter in model.named_parameters():
        assert any(start <= parameter.data_ptr() < end for start, end in ranges), name


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
@pytest.mark.parametrize("decoder", ["fast", "adapter"])
def test_loading_holds_the_weights_at_most_once_outside_of_the_file(
    tiny_llama_dir: Path, tmp_path: Path, decoder: str
) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 3072, "num_hidden_layers": 3}
    folder = olmo2(tmp_path / "model", tiny_llama_dir, **sizes) if decoder == "adapter" else tmp_path / "model"
    if decoder == "fast":
        write_large_llama(folder, tiny_llama_dir, sizes)
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(folder)], capture_output=True, text=True, check=True, env=os.environ
    )
    share = int(done.stdout) / (folder / "model.safetensors").stat().st_size
    assert share < (1.5 if decoder == "fast" else 0.5)  # the fast decoder packs its layers anew


PEAK = """
import sys, threading, torch
from tokenyard.model.files import resolve_model
from tokenyard.model.loader import load_model
import tokenyard.model.adapter, tokenyard.model.decoder

def anonymous():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024

def load(folder):
    return load_model(resolve_model(folder), dtype=torch.float32, device=torch.device("cpu"))

load(sys.argv[2] if len(sys.argv) > 2 else sys.argv[1])  # what is imported and allocated once
import gc
gc.collect()
before, peak, done = anonymous(), 0, threading.Event()

def watch():
    global peak
    while not done.wait(0.001):
        peak = max(peak, anonymous())

watcher = threading.Thread(target=watch)
watcher.start()
model = load(sys.argv[1])
done.set()
watcher.join()
print(max(peak, anonymous()) - before)
"""


def write_large_llama(folder: Path, tokenizer_from: Path, sizes: dict[str, int]) -> None:
    import transformers

    vocab_size = json.loads((tokenizer_from / "config.json").read_text())["vocab_size"]
    config = transformers.LlamaConfig.from_dict({**sizes, "vocab_size": vocab_size, "num_attention_heads": 8})
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


@pytest.mark.parametrize("decoder", ["fast", "adapter"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_dtype_runs_on_a_cpu(tiny_llama_dir: Path, tmp_path: Path, decoder: str, dtype: str) -> None:
    from tokenyard import LLM, SamplingParams

    folder = tiny_llama_dir if decoder == "fast" else olmo2(tmp_path / "olmo", tiny_llama_dir)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(str(folder), dtype=dtype, max_model_len=64) as llm:
        assert llm.model_config.dtype == dtype
        outputs = llm.generate([[5, 6, 7]], params, use_tqdm=False)
    assert outputs[0].outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("config", "stored", "expected"),
    [
        ({"dtype": "bfloat16"}, torch.float32, "bfloat16"),
        ({"torch_dtype": "float16"}, torch.float32, "float16"),
        ({}, torch.bfloat16, "bfloat16"),
        ({}, torch.float16, "float16"),
        ({"dtype": None, "torch_dtype": None}, torch.float32, "float32"),
        ({}, torch.int64, "float32"),
    ],
)
@pytest.mark.parametrize("sharded", [False, True])
def test_auto_is_what_the_config_says_or_else_what_the_file_holds(
    make_llama: MakeLlama, config: dict[str, object], stored: torch.dtype, expected: str, sharded: bool
) -> None:
    folder = make_llama()
    content = json.loads((folder / "config.json").read_text())
    content.pop("dtype")
    (folder / "config.json").write_text(json.dumps({**content, **config}))
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor.to(stored) for name, tensor in tensors.items()}, folder / "model.safetensors")
    if sharded:
        shard(folder)
    assert resolve_model(str(folder)).torch_dtype == expected
