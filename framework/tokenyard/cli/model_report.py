"""What `tokenyard doctor` says of a model: which decoder would run it and why, and what its files say. No weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokenyard.errors import UserError

if TYPE_CHECKING:
    from tokenyard.config import EngineConfig
    from tokenyard.model.decoder_config import DecoderConfig
    from tokenyard.model.files import ModelFiles
    from tokenyard.model.rope_config import RopeConfig

_CHECK = "when it is loaded, its logits in a packed batch are compared with transformers' own for each sequence alone"


def model_report(config: EngineConfig, *, fetch: bool) -> dict[str, object]:
    """Facts by name; "problem" is among them when the model could not be run. `fetch` allows a download."""
    from tokenyard.model.default_model import DEFAULT_MODEL, is_cached
    from tokenyard.model.files import resolve_model

    name = config.model.name
    if name == DEFAULT_MODEL and not fetch and not is_cached():
        return {"name": name, "status": "not fetched yet: the first `tokenyard generate` does"}
    found: dict[str, object] = {"name": name}
    try:
        files = resolve_model(name, revision=config.model.revision, weights=False)
        found |= {"architecture": files.architecture, "format": files.format}
        found |= _decoder(files)
        if "problem" not in found:
            found |= _facts(files)
    except UserError as error:
        found["problem"] = str(error)
    return found


def _decoder(files: ModelFiles) -> dict[str, object]:
    from tokenyard.model.loader import adapter_reasons, decoder_choice

    description, reasons = decoder_choice(files)
    if not reasons:
        return {"decoder": description}
    why = f"not the fast decoder: {'; '.join(reasons)}"
    if refused := adapter_reasons(files):
        return {"decoder": "none", "why": why, "problem": f"{files.architecture} cannot be run: {'; '.join(refused)}"}
    return {"decoder": description, "why": why, "check": _CHECK}


def _facts(files: ModelFiles) -> dict[str, object]:
    from tokenyard.model.decoder_config import fast_decoder_reasons, parse_decoder_config
    from tokenyard.model.eos import eos_token_ids
    from tokenyard.model.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(files)
    ids = eos_token_ids(files, tokenizer)
    found: dict[str, object] = {"dtype": files.torch_dtype, "max_model_len": files.max_model_len}
    if not fast_decoder_reasons(files.config):
        found |= _decoder_facts(parse_decoder_config(files.config))
    ends = [f"{token_id} {tokenizer.id_to_token(token_id)}" for token_id in ids]
    return {
        **found,
        "eos": ends or "none: requests end by max_tokens or stop alone",
        "chat template": "yes" if tokenizer.has_chat_template else "no: `chat` needs one",
    }


def _decoder_facts(config: DecoderConfig) -> dict[str, object]:
    heads = f"{config.num_heads} query and {config.num_kv_heads} KV heads of {config.head_dim}"
    return {
        "parameters": f"{config.num_parameters / 1e6:,.1f} million",
        "layers": f"{config.num_layers}, {heads}",
        "rope": _rope(config.rope, config.rotates),
        "window": _window(config.windows),
    }


def _rope(rope: RopeConfig, rotates: Sequence[bool]) -> str:
    scaling = "" if rope.type == "default" else f" x {rope.number('factor'):g}"
    text = f"{rope.type}{scaling}, theta {rope.theta:g}"
    if rope.type == "dynamic":
        text += f"; prompts of at most {rope.max_position_embeddings} tokens"
    return text if all(rotates) else f"{text}; none in {rotates.count(False)} of {len(rotates)} layers"


def _window(windows: Sequence[int | None]) -> str:
    sliding = [window for window in windows if window is not None]
    return f"{sliding[0]} tokens in {len(sliding)} of {len(windows)} layers" if sliding else "none"
