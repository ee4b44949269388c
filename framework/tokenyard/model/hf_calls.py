"""The only calls that make transformers load something: from local files, with no code of a model's author.

A test looks for others. What is loaded never depends on what a model's JSON says beyond the config it is given.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

LoadingInfo = Mapping[str, Collection[object]]


def model_from_tensors(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    tensors: Mapping[str, torch.Tensor],
    *,
    dtype: torch.dtype,
    attention: str,
) -> tuple[PreTrainedModel, LoadingInfo]:
    """A model on the CPU with these tensors, and what did not fit: `missing_keys`, `unexpected_keys` and the like.

    transformers opens no file for it: not the shards, of which it would take every tensor whatever the index says, and
    neither a LoRA adapter nor the custom generation code that may lie beside them. Parameters of the tensors' own dtype
    share their memory.
    """
    loaded: object = model_class.from_pretrained(
        None,
        config=config,
        state_dict=dict(tensors),
        dtype=dtype,
        attn_implementation=attention,
        trust_remote_code=False,
        local_files_only=True,
        use_safetensors=True,
        ignore_mismatched_sizes=True,  # reported like those that are missing, instead of an error without names
        output_loading_info=True,
    )
    return cast("tuple[PreTrainedModel, LoadingInfo]", loaded)


def tokenizer_from_folder(folder: Path) -> object:
    """transformers' tokenizer of a folder whose JSON files were checked (see `files.resolve_model`)."""
    from transformers import AutoTokenizer  # seconds, and models need it not

    return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
