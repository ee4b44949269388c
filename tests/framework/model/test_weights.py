from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenyard.errors import ModelLoadError
from tokenyard.model.files import resolve_model
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
