"""A tokenizer from a GGUF file's metadata: byte-level BPE, with the pre-tokenizers that are known exactly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tokenyard.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tokenyard.model.gguf_reader import GGUFHeader, GGUFValue

_CONTROL, _USER_DEFINED = 3, 4  # token types that are never cut into pieces
_NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_SPLIT_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_SPLIT_QWEN2 = _SPLIT_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True, slots=True)
class _Style:
    """How one value of `tokenizer.ggml.pre` cuts text before BPE."""

    split: str | None = None  # None: GPT-2's own pattern
    single_digits: bool = False
    whole_words: bool = False  # a piece that is in the vocabulary is taken without merging
    nfc: bool = False
    adds_bos: bool = False  # where the file does not say


_LLAMA3 = _Style(split=_SPLIT_LLAMA3, whole_words=True, adds_bos=True)
_STYLES = {
    "gpt-2": _Style(),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _Style(split=_SPLIT_QWEN2, nfc=True),
    "smollm": _Style(single_digits=True),
    "starcoder": _Style(single_digits=True),
}


def tokenizer_from_gguf(header: GGUFHeader) -> tuple[Tokenizer, dict[str, object]]:
    """(tokenizer, content of tokenizer_config.json); ModelLoadError for a kind that cannot be rebuilt exactly."""
    metadata = header.metadata
    style = _style(header)
    tokens, merges = _strings(header, "tokens"), _strings(header, "merges")
    embedding = header.tensors.get("token_embd.weight")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens) or (embedding is not None and len(tokens) > embedding.shape[0]):
        raise ModelLoadError(f"{header.path}: the vocabulary has a token twice, or more tokens than embeddings")
    config = _tokenizer_config(header, tokens, style)
    try:
        pairs = [_pair(merge) for merge in merges]
        tokenizer = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=style.whole_words))
    except Exception as error:  # the library raises bare Exception
        raise ModelLoadError(f"{header.path}: the tokenizer's merges do not hold ({error})") from error
    _add_pipeline(tokenizer, style, config)
    _add_whole_tokens(tokenizer, header, tokens)
    if isinstance(template := metadata.get("tokenizer.chat_template"), str):
        config["chat_template"] = template
    return tokenizer, config


def _style(header: GGUFHeader) -> _Style:
    kind, pre = header.metadata.get("tokenizer.ggml.model"), header.metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2":
        raise ModelLoadError(
            f"{header.path}: tokenizer model {kind!r} is not available for GGUF files; allowed: 'gpt2' (byte-level BPE)"
        )
    if not isinstance(pre, str) or pre not in _STYLES:
        raise ModelLoadError(
            f"{header.path}: pre-tokenizer {pre!r} is not available for GGUF files; allowed: "
            f"{', '.join(sorted(_STYLES))}. Give the model's safetensors folder instead"
        )
    return _STYLES[pre]


def _add_pipeline(tokenizer: Tokenizer, style: _Style, config: Mapping[str, object]) -> None:
    steps: list[pre_tokenizers.PreTokenizer] = []
    if style.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if style.split is not None:
        steps.append(pre_tokenizers.Split(Regex(style.split), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=style.split is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    if style.nfc:
        tokenizer.normalizer = normalizers.NFC()
    first = [config["bos_token"]] if config["add_bos_token"] else []
    last = [config["eos_token"]] if config["add_eos_token"] else []
    names = [str(name) for name in first + last]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*map(str, first), "$A", *map(str, last)],
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in dict.fromkeys(names)],
    )


def _add_whole_tokens(tokenizer: Tokenizer, header: GGUFHeader, tokens: list[str]) -> None:
    """Control tokens become special tokens, user-defined ones plain added tokens; ids stay as they are."""
    types = header.metadata.get("tokenizer.ggml.token_type", [])
    if not isinstance(types, list) or len(types) not in (0, len(tokens)):
        raise ModelLoadError(f"{header.path}: 'tokenizer.ggml.token_type' does not have one entry per token")
    for wanted, is_special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [
            AddedToken(token, special=is_special, normalized=False)
            for token, kind in zip(tokens, types, strict=False)
            if kind == wanted and token
        ]
        add = tokenizer.add_special_tokens if is_special else tokenizer.add_tokens
        add(added)


def _tokenizer_config(header: GGUFHeader, tokens: list[str], style: _Style) -> dict[str, object]:
    metadata = header.metadata
    config: dict[str, object] = {"clean_up_tokenization_spaces": False}
    for name, key in _NAMED.items():
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if index is None:
            continue
        if not isinstance(index, int) or not 0 <= index < len(tokens):
            raise ModelLoadError(f"{header.path}: the {name} token's id {index} is not in the vocabulary")
        config[f"{name}_token"] = tokens[index]
    for name, default in (("bos", style.adds_bos), ("eos", False)):
        adds = _flag(metadata.get(f"tokenizer.ggml.add_{name}_token"), default)
        config[f"add_{name}_token"] = adds and f"{name}_token" in config
    return config


def _flag(value: GGUFValue | None, default: bool) -> bool:
    return value if isinstance(value, bool) else default


def _strings(header: GGUFHeader, key: str) -> list[str]:
    values = header.metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(values, list):
        raise ModelLoadError(f"{header.path}: no tokenizer in this file (key 'tokenizer.ggml.{key}')")
    strings = [value for value in values if isinstance(value, str)]
    if len(strings) != len(values):
        raise ModelLoadError(f"{header.path}: 'tokenizer.ggml.{key}' does not hold text")
    return strings


def _pair(merge: str) -> tuple[str, str]:
    # llama.cpp too looks for the separator only after the first character.
    left, _, right = merge[1:].partition(" ")
    return merge[:1] + left, right
