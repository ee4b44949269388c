"""A GGUF file -> a Hugging Face folder with bfloat16 safetensors."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from tokenyard.model.files import SINGLE_FILE, resolve_model
from tokenyard.model.gguf_reader import read_gguf
from tokenyard.model.gguf_tokenizer import tokenizer_from_gguf
from tokenyard.model.progress import progress_bar
from tokenyard.model.weights import open_weights


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write config, tokenizer, chat template and weights of a GGUF file into a new folder."""
    folder.mkdir()
    files = resolve_model(str(gguf))
    tokenizer, tokenizer_config = tokenizer_from_gguf(read_gguf(gguf))
    template = tokenizer_config.pop("chat_template", None)
    tokenizer_config["tokenizer_class"] = "PreTrainedTokenizerFast"
    _write_json(folder / "config.json", {**files.config, "dtype": "bfloat16"})
    _write_json(folder / "generation_config.json", files.generation_config)
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    if isinstance(template, str):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    with open_weights(files) as weights:
        names = sorted(weights.names())
        tensors = {}
        with progress_bar("converting", len(names)) as advance:
            for name in names:
                tensors[name] = weights.get(name, torch.bfloat16)
                advance(1)
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
    (folder / SINGLE_FILE).chmod(0o644)  # like its neighbours: a cache may be shared
    _flush(folder / SINGLE_FILE)


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _flush(path: Path) -> None:
    """To the disk, so that a crash right after the rename cannot leave a file of the right size without its content."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
