from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import fake_hub
import pytest
import torch
import transformers
from fake_hub import FakeHub, place_in_cache, refusal
from safetensors.torch import load_file, save_file
from tokenyard import LLM, SamplingParams
from tokenyard.cli.doctor import main as doctor
from tokenyard.launch.assemble import build_engine
from tokenyard.launch.compose import load_engine_config
from tokenyard.model.files import resolve_model
from tokenyard.model.tokenizer import load_tokenizer
from tokenyard.model.weights import open_weights

REPO = "Org/Tiny"

MakeLlama = Callable[..., Path]


def shard(folder: Path, names: tuple[str, str] = ("a.safetensors", "b.safetensors")) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    keys = sorted(tensors)
    weight_map = {key: names[index % 2] for index, key in enumerate(keys)}
    for name in names:
        save_file({key: tensors[key] for key in keys if weight_map[key] == name}, folder / name)
    content = {"metadata": {"total_size": 3e9}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


# Without a network


def test_a_model_in_the_cache_loads_without_any_network(tiny_llama_dir: Path, offline: Path) -> None:
    commit = place_in_cache(tiny_llama_dir, REPO, offline)
    files = resolve_model(REPO)
    assert (files.name, files.commit) == (REPO, commit)
    assert load_tokenizer(files).has_chat_template
    with open_weights(files) as weights:
        assert "model.norm.weight" in weights.names()


def test_a_cached_model_is_not_asked_for_even_where_there_is_a_network(
    tiny_llama_dir: Path, hub: FakeHub, cache: Path
) -> None:
    place_in_cache(tiny_llama_dir, REPO, cache)
    hub.status = 500
    assert resolve_model(REPO).name == REPO
    assert hub.seen == []


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_llm_takes_a_hub_id_from_the_cache(
    tiny_llama_dir: Path, offline: Path, tmp_path: Path, architecture: str
) -> None:
    folder = tiny_llama_dir if architecture == "llama" else write_qwen3(tmp_path / "qwen3", tiny_llama_dir)
    place_in_cache(folder, "Qwen/Qwen3-0.6B", offline)
    with LLM("Qwen/Qwen3-0.6B", max_model_len=128) as llm:
        assert llm.model_config.model == "Qwen/Qwen3-0.6B"
        outputs = llm.generate("hello", SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), use_tqdm=False)
    assert len(outputs[0].outputs[0].token_ids) == 3


def write_qwen3(folder: Path, tokenizer_from: Path) -> Path:
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    vocab_size = json.loads((tokenizer_from / "config.json").read_text())["vocab_size"]
    sizes |= {"hidden_size": 32, "intermediate_size": 48, "vocab_size": vocab_size}
    config = transformers.Qwen3Config.from_dict(sizes)
    torch.manual_seed(1)
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tokenizer_from / name, folder / name)
    return folder


def test_a_folder_of_that_name_wins_and_dot_slash_asks_for_one(
    tiny_llama_dir: Path, offline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place_in_cache(tiny_llama_dir, REPO, offline)
    monkeypatch.chdir(tmp_path)
    assert "no such file or folder" in refusal(f"./{REPO}")
    shutil.copytree(tiny_llama_dir, tmp_path / REPO)
    assert resolve_model(REPO).commit is None
    assert resolve_model(f"./{REPO}").path == Path(REPO)


def test_a_name_without_an_owner_is_looked_up_in_the_cache_alone(
    tiny_llama_dir: Path, hub: FakeHub, cache: Path
) -> None:
    assert "unknown model 'gpt2'" in refusal("gpt2")
    place_in_cache(tiny_llama_dir, "gpt2", cache)
    assert resolve_model("gpt2").commit is not None
    assert hub.seen == []


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors", "b.safetensors"])
def test_offline_an_incomplete_model_is_named_with_what_it_lacks(
    make_llama: MakeLlama, offline: Path, missing: str
) -> None:
    folder = make_llama()
    if missing == "b.safetensors":
        shard(folder)
    (folder / missing).unlink()
    place_in_cache(folder, REPO, offline)
    message = refusal(REPO)
    assert missing in message
    assert "HF_HUB_OFFLINE" in message
    assert "everything" in refusal("Org/Other")


def test_without_a_connection_the_error_says_where_it_looked(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_hub.use_in_process(monkeypatch, cache, "http://127.0.0.1:9")
    message = refusal(REPO)
    assert "http://127.0.0.1:9" in message
    assert "check the network" in message


# Fetching


def test_a_fetched_model_is_found_again_without_the_network(
    tiny_llama_dir: Path, hub: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    commit = hub.add(REPO, tiny_llama_dir)
    told: list[str] = []
    assert resolve_model(REPO, told.append).commit == commit
    assert [REPO in told[0], "1 file" in told[1], commit[:12] in told[2]] == [True] * 3
    assert capfd.readouterr() == ("", "")  # no progress bar where nobody watches
    hub.seen.clear()
    assert resolve_model(REPO, told.append).commit == commit
    assert (hub.seen, len(told)) == ([], 3)
    fake_hub.use_in_process(monkeypatch, cache, None)
    assert resolve_model(REPO).commit == commit


def test_only_files_of_the_allow_list_are_fetched_and_weights_last(make_llama: MakeLlama, hub: FakeHub) -> None:
    folder = make_llama()
    shard(folder, ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"))
    wanted = {path.name for path in folder.iterdir()}
    for name in ("pytorch_model.bin", "modeling_evil.py", "consolidated.safetensors", "tokenizer.py", "x.gguf"):
        (folder / name).write_bytes(b"x")
    (folder / "original").mkdir()
    shutil.copy(folder / "config.json", folder / "original" / "config.json")
    hub.add(REPO, folder)
    told: list[str] = []
    files = resolve_model(REPO, told.append)
    assert {path.name for path in files.path.iterdir()} == wanted == set(hub.fetched())
    assert {name.split("-")[0] for name in hub.fetched()[-2:]} == {"model"}
    assert any("2 file(s), 3.0 GB" in line for line in told)


def test_without_weights_the_small_files_alone_are_fetched(tiny_llama_dir: Path, hub: FakeHub) -> None:
    hub.add(REPO, tiny_llama_dir)
    assert resolve_model(REPO, weights=False).architecture == "LlamaForCausalLM"
    assert "model.safetensors" not in hub.fetched()
    assert resolve_model(REPO).torch_dtype == "float32"
    assert hub.fetched().count("config.json") == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"auto_map": {"AutoConfig": "evil.C"}}, "auto_map"), ({"quantization_config": {"quant_method": "awq"}}, "awq")],
)
def test_b2_a_model_that_cannot_be_run_is_refused_before_its_weights_are_fetched(
    make_llama: MakeLlama, hub: FakeHub, change: dict[str, object], reason: str
) -> None:
    folder = make_llama()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    hub.add(REPO, folder)
    assert reason in refusal(REPO)
    assert "model.safetensors" not in hub.fetched()


def test_b1_a_repository_with_pickles_alone_is_refused_and_none_is_fetched(make_llama: MakeLlama, hub: FakeHub) -> None:
    folder = make_llama()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    hub.add(REPO, folder)
    message = refusal(REPO)
    assert "pytorch_model.bin, a pickle" in message
    assert "pytorch_model.bin" not in hub.fetched()


@pytest.mark.parametrize("name", ["*", "../x.safetensors", "sub/x.safetensors", "/etc/passwd", "m?del.safetensors"])
def test_b9_file_names_of_a_fetched_index_never_become_patterns_or_paths(
    make_llama: MakeLlama, hub: FakeHub, name: str
) -> None:
    folder = make_llama()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    hub.add(REPO, folder)
    assert "plain names" in refusal(REPO)
    assert "model.safetensors" not in hub.fetched()


def test_a_shard_that_the_repository_lacks_is_named(make_llama: MakeLlama, hub: FakeHub) -> None:
    folder = make_llama()
    shard(folder)
    (folder / "b.safetensors").unlink()
    hub.add(REPO, folder)
    assert "b.safetensors" in refusal(REPO)


def test_a_repository_without_a_config_says_what_it_has(tiny_gguf: Path, tmp_path: Path, hub: FakeHub) -> None:
    folder = tmp_path / "repo"
    folder.mkdir()
    shutil.copy(tiny_gguf, folder / "tiny-F32.gguf")
    (folder / "README.md").write_text("x")
    hub.add(REPO, folder)
    assert f"tiny-F32.gguf; give one as {REPO}:FILE" in refusal(REPO)
    assert "its .gguf files: tiny-F32.gguf" in refusal(f"{REPO}:other.gguf")
    files = resolve_model(f"{REPO}:tiny-F32.gguf")
    assert (files.format, files.path.name, files.commit) == ("gguf", "tiny-F32.gguf", hub.refs[REPO]["main"])
    hub.seen.clear()
    assert resolve_model(f"{REPO}:tiny-F32.gguf").path == files.path
    assert hub.seen == []


# One commit


def two_commits(make_llama: MakeLlama, hub: FakeHub) -> tuple[str, str]:
    """Every file that matters differs between them."""
    folder = make_llama()
    old = hub.add(REPO, folder)
    change_everything(folder)
    return old, hub.add(REPO, folder)


def change_everything(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("NEW {{ messages[0].content }}")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [9]}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, indent=1))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 5.0}))
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, folder / "model.safetensors")


def test_b7_a_revision_holds_for_every_file(make_llama: MakeLlama, hub: FakeHub) -> None:
    old, new = two_commits(make_llama, hub)
    hub.refs[REPO]["v1"] = old
    for revision, commit in (("v1", old), (new, new), (None, new), (old, old), ("main", new)):
        files = resolve_model(REPO, revision=revision)
        assert files.commit == commit
        assert files.config["rope_theta"] == (5.0 if commit == new else 10000.0)
        assert files.eos_token_ids == ((9,) if commit == new else (2, 0))
        rendered = load_tokenizer(files).render_chat([{"role": "user", "content": "x"}])
        assert rendered.startswith("NEW") == (commit == new)
        with open_weights(files) as weights:
            assert bool(weights.get("model.norm.weight", torch.float32).mean() > 1.5) == (commit == new)


def test_b7_a_branch_that_moves_while_it_is_fetched_gives_no_mixture(make_llama: MakeLlama, hub: FakeHub) -> None:
    folder = make_llama()
    first = hub.add(REPO, folder)
    change_everything(folder)

    def move(name: str) -> None:
        hub.add(REPO, folder)

    hub.before_file = move
    files = resolve_model(REPO)
    assert files.commit == first != hub.refs[REPO]["main"]
    assert {path.name: path.read_bytes() for path in files.path.iterdir()} == hub.commits[REPO][first]


def test_b7_a_worker_gets_the_commit_that_the_engine_found(
    make_llama: MakeLlama, offline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_llama()
    commit = place_in_cache(folder, REPO, offline)
    asked: list[str | None] = []

    def resolve(name: str, *arguments: object, revision: str | None = None, **options: object) -> object:
        asked.append(revision)
        found = resolve_model(name, revision=revision)
        change_everything(folder)
        place_in_cache(folder, REPO, offline)  # the branch moves
        return found

    monkeypatch.setattr("tokenyard.launch.assemble.resolve_model", resolve)
    monkeypatch.setattr("tokenyard.worker.worker.resolve_model", resolve)
    config, catalogue = load_engine_config([f"model.name={REPO}", "model.max_model_len=64"])
    build_engine(config, catalogue).core.shutdown()
    assert asked == [None, commit]


@pytest.mark.parametrize(
    "revision", ["../../x", "a/../b", "", "a b", "-x", "/main", "main/", "a//b", "x" * 200, "a\0", "a\n", "ä", "*"]
)
def test_b9_a_revision_never_leaves_the_cache(offline: Path, revision: str) -> None:
    assert "branch" in refusal(REPO, revision=revision)


def test_a_revision_of_something_on_this_machine_is_refused(tiny_llama_dir: Path, tiny_gguf: Path) -> None:
    for name in (str(tiny_llama_dir), str(tiny_gguf), "smollm2-135m"):
        assert "is for Hub ids" in refusal(name, revision="main")


def test_an_unknown_revision_is_named(tiny_llama_dir: Path, hub: FakeHub) -> None:
    hub.add(REPO, tiny_llama_dir)
    assert "no revision 'v9'" in refusal(REPO, revision="v9")
    assert "no revision" in refusal(REPO, revision="0" * 40)


def test_doctor_tells_about_a_model_without_fetching_its_weights(
    tiny_llama_dir: Path, hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add(REPO, tiny_llama_dir)
    assert doctor([REPO, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"]["architecture"] == "LlamaForCausalLM"
    assert "config.json" in hub.fetched()
    assert "model.safetensors" not in hub.fetched()
