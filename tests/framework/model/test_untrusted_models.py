"""What a model's folder may hold and must not be able to do: robustness.md 1.B.

Every folder is loaded in a process with an audit hook, once as usual and once under python -O, where asserts are gone.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

HELPERS = Path(__file__).resolve().parents[2] / "helpers"
PROBE = "touched-by-a-model"


@dataclass(frozen=True)
class Attack:
    """`spoil(folder, marker)` plants it; `marker` is a file that its code would write."""

    spoil: Callable[[Path, Path], None]
    refused: str | None = None  # a part of the error; None = the model loads as if it were not there


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.system, (f"touch {self._marker}",)


def edit(folder: Path, name: str, **changes: object) -> None:
    path = folder / name
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**content, **changes}))


def set_keys(name: str, /, **changes: object) -> Callable[[Path, Path], None]:
    return lambda folder, marker: edit(folder, name, **changes)


def write_code(folder: Path, marker: Path) -> None:
    """Modules of every name that some loader looks for."""
    code = f"open({str(marker)!r}, 'w').close()\nclass Evil: pass\n"
    evil = ("modeling_evil", "configuration_evil", "tokenization_evil")
    for name in (*evil, "tokenizers", "json", "sitecustomize", "__init__"):
        (folder / f"{name}.py").write_text(code)
    (folder / "custom_generate").mkdir(exist_ok=True)
    (folder / "custom_generate" / "generate.py").write_text(code)


def name_code(name: str) -> Callable[[Path, Path], None]:
    def spoil(folder: Path, marker: Path) -> None:
        write_code(folder, marker)
        edit(folder, name, deep=[{"auto_map": {"AutoConfig": "configuration_evil.Evil"}}])

    return spoil


def only_pickles(folder: Path, marker: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(marker)))


def pickles_beside(folder: Path, marker: Path) -> None:
    for name in ("pytorch_model.bin", "adapter_model.bin", "training_args.bin", "model.pt", "rng_state.pth"):
        (folder / name).write_bytes(pickle.dumps(Payload(marker)))


def adapter_beside(folder: Path, marker: Path) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "evil/base"}))
    (folder / "adapter_model.safetensors").write_bytes(b"x")


def weights_elsewhere(folder: Path, marker: Path) -> None:
    outside = folder.parent / "outside.safetensors"
    save_file({"stolen": torch.zeros(1)}, outside)
    edit(folder, "config.json", transformers_weights="../outside.safetensors")


def index_leads_out(name: str) -> Callable[[Path, Path], None]:
    def spoil(folder: Path, marker: Path) -> None:
        shutil.copy(folder / "model.safetensors", folder.parent / "outside.safetensors")
        names = load_file(folder / "model.safetensors")
        index = {"weight_map": dict.fromkeys(names, name)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return spoil


def link_to_a_secret(name: str) -> Callable[[Path, Path], None]:
    def spoil(folder: Path, marker: Path) -> None:
        secret = folder.parent / "secret.txt"
        secret.write_text("TOP-SECRET-CONTENT")
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(secret)

    return spoil


def targets_everywhere(folder: Path, marker: Path) -> None:
    target = {"_target_": "os.system", "_args_": [f"touch {marker}"], "command": f"touch {marker}"}
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        edit(folder, name, **target, nested=target)
    path = folder / "model.safetensors"
    save_file(load_file(path), path, metadata={"format": "pt", "_target_": "os.system"})


def unknown_type(folder: Path, marker: Path) -> None:
    write_code(folder, marker)
    edit(folder, "config.json", architectures=["EvilForCausalLM"], model_type="configuration_evil")


def unknown_architecture(folder: Path, marker: Path) -> None:
    write_code(folder, marker)
    edit(folder, "config.json", architectures=["Evil_Model"])


EVIL_KEYS: dict[str, object] = {
    "_attn_implementation_internal": "evil/kernels",
    "_attn_implementation": "evil/kernels",
    "attn_implementation": {"": "evil/kernels"},
    "_attn_implementation_autoset": True,
    "_experts_implementation_internal": "evil/kernels",
    "experts_implementation": "evil/kernels",
    "use_kernels": True,
    "allow_all_kernels": True,
    "kernel_config": {"kernel_mapping": {"RMSNorm": "evil/kernels:RMSNorm"}},
    "fusion_config": {"patch_embeddings": True},
    "distributed_config": {"tp_plan": "auto"},
    "trust_remote_code": True,
    "code_revision": "main",
    "custom_generate": "evil/generate",
    "custom_pipelines": {"text-generation": {"impl": "evil.Pipeline"}},
}

ATTACKS: dict[str, Attack] = {
    "b1_only_pickles": Attack(only_pickles, "pickle"),
    "b1_pickles_beside": Attack(pickles_beside),
    "b2_config": Attack(name_code("config.json"), "auto_map"),
    "b2_tokenizer_config": Attack(name_code("tokenizer_config.json"), "auto_map"),
    "b2_generation_config": Attack(name_code("generation_config.json"), "auto_map"),
    "b2_special_tokens_map": Attack(name_code("special_tokens_map.json"), "auto_map"),
    "b2_video_preprocessor": Attack(name_code("video_preprocessor_config.json"), "auto_map"),
    "b2_any_json": Attack(name_code("whatever.json"), "auto_map"),
    "b3_code_beside": Attack(write_code),
    "b3_adapter_beside": Attack(adapter_beside),
    "b4_config": Attack(set_keys("config.json", **EVIL_KEYS)),
    "b4_tokenizer_config": Attack(set_keys("tokenizer_config.json", **EVIL_KEYS)),
    "b5_nested": Attack(set_keys("config.json", nested={**EVIL_KEYS, "more": [EVIL_KEYS]})),
    "b9_config_names_weights": Attack(weights_elsewhere),
    "b9_index_parent": Attack(index_leads_out("../outside.safetensors"), "plain names"),
    "b9_index_absolute": Attack(index_leads_out("/etc/passwd"), "plain names"),
    "b9_index_nul": Attack(index_leads_out("model.safetensors\0"), "plain names"),
    "b9_index_folder": Attack(index_leads_out(".."), "plain names"),
    "b9_link_weights": Attack(link_to_a_secret("model.safetensors"), "not a complete safetensors file"),
    "b9_link_config": Attack(link_to_a_secret("config.json"), "cannot be read as JSON"),
    "b9_link_tokenizer": Attack(link_to_a_secret("tokenizer.json"), "tokenizer"),
    "b11_targets": Attack(targets_everywhere),
    "b12_unknown_type": Attack(unknown_type, "configuration_evil"),
    "b12_unknown_architecture": Attack(unknown_architecture, "Evil_Model"),
    "b12_pickling_class": Attack(
        set_keys("config.json", architectures=["TransfoXLLMHeadModel"], model_type="transfo-xl"), "transfo-xl"
    ),
    "b12_no_architecture": Attack(set_keys("config.json", architectures=[]), "architecture"),
}
DECODERS = ("fast", "adapter")


def write_adapter_model(folder: Path, tokenizer_from: Path) -> Path:
    """A family that only transformers' own code can run."""
    vocab_size = json.loads((tokenizer_from / "config.json").read_text())["vocab_size"]
    config = transformers.Olmo2Config(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    transformers.Olmo2ForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_from / name, folder / name)
    return folder


@dataclass(frozen=True)
class Result:
    outcome: str
    events: list[str]
    left_a_mark: bool


Results = dict[tuple[str, str], Result]


@pytest.fixture(scope="module", params=[[], ["-O"]], ids=["python", "python -O"])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_llama_dir: Path) -> Results:
    """What became of each attack on each decoder."""
    root = tmp_path_factory.mktemp("untrusted")
    sound = {"fast": tiny_llama_dir, "adapter": write_adapter_model(root / "sound", tiny_llama_dir)}
    folders: dict[tuple[str, str], Path] = {}
    for decoder in DECODERS:
        for name, attack in ATTACKS.items():
            folder = root / decoder / name / "model"
            shutil.copytree(sound[decoder], folder)
            attack.spoil(folder, folder.parent / PROBE)
            folders[decoder, name] = folder
    command = [sys.executable, *request.param, str(HELPERS / "guarded_load.py"), *map(str, folders.values())]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)
    if done.returncode != 0:
        pytest.fail(done.stderr)
    report = json.loads(done.stdout.splitlines()[-1])
    if report["python"]["outcome"] != f"optimize={len(request.param)}":
        pytest.fail("the flag did not reach the process")
    return {
        key: Result(**report[str(folder.resolve())], left_a_mark=(folder.parent / PROBE).exists())
        for key, folder in folders.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("attack", ATTACKS)
def test_b6_what_a_model_plants_is_refused_or_does_nothing(results: Results, attack: str, decoder: str) -> None:
    result, refused = results[decoder, attack], ATTACKS[attack].refused
    assert result.events == []
    assert not result.left_a_mark
    assert "TOP-SECRET" not in result.outcome
    if refused is None:
        assert result.outcome == "loaded"
    else:
        assert result.outcome.startswith("ModelLoadError: ")
        assert refused in result.outcome
        assert "\n" not in result.outcome


@pytest.mark.parametrize(
    "action",
    [
        "import evil_module",
        "exec(compile(open(folder + '/evil_module.py').read(), folder + '/evil_module.py', 'exec'))",
        "exec(compile('1', folder + '/x.py', 'exec'))",
        "import socket; socket.create_connection(('127.0.0.1', 9))",
        "import os; os.system('true')",
        "import subprocess; subprocess.run(['true'])",
        "import pickle; pickle.loads(b'cos\\nsystem\\n.')",
    ],
)
def test_b3_the_guard_sees_what_it_is_there_for(tmp_path: Path, action: str) -> None:
    (tmp_path / "evil_module.py").write_text("x = 1")
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(HELPERS)!r}]\n"
        "import guarded_load, socket, subprocess, pickle, os\n"
        f"folder = {str(tmp_path)!r}\n"
        f"def load(folder): exec({action!r}, {{'folder': folder}})\n"
        "guarded_load.load = load\n"
        "print(len(guarded_load.attempt(guarded_load.Guard(), folder)['events']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) >= 1
