"""What tokenizer_config.json says beyond tokenizer.json: special tokens, added tokens, BOS and EOS."""

from __future__ import annotations

from collections.abc import Mapping

import tokenizers
from tokenizers import AddedToken, processors

from tokenyard.errors import ModelLoadError

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def special_token_names(config: Mapping[str, object]) -> dict[str, str]:
    """bos_token, eos_token, ... -> their text, as templates read them."""
    contents = {name: _content(config.get(name)) for name in _NAMES}
    return {name: content for name, content in contents.items() if content}


def apply_config(backend: tokenizers.Tokenizer, config: Mapping[str, object]) -> None:
    """Bring a tokenizer.json in line with tokenizer_config.json, as transformers does when it loads both."""
    _add_missing(backend, config)
    names = special_token_names(config)
    extra = config.get("additional_special_tokens")
    listed = [_content(item) for item in extra] if isinstance(extra, list) else []
    known = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    wanted = [text for text in (*names.values(), *listed) if text and text not in known]
    present = [text for text in wanted if backend.token_to_id(text) is not None]
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in present])
    flags = (config.get("add_bos_token"), config.get("add_eos_token"))
    if any(isinstance(flag, bool) for flag in flags):
        _set_ends(backend, names, adds_bos=flags[0] is True, adds_eos=flags[1] is True)


def _add_missing(backend: tokenizers.Tokenizer, config: Mapping[str, object]) -> None:
    """Tokens that only tokenizer_config's `added_tokens_decoder` has; their ids must come out as it says."""
    listed = config.get("added_tokens_decoder")
    if not isinstance(listed, Mapping):
        return
    entries = {int(key): value for key, value in listed.items() if str(key).isdigit() and isinstance(value, Mapping)}
    for index in sorted(entries):
        entry = entries[index]
        content = _content(entry)
        if not content or backend.token_to_id(content) is not None:
            continue
        is_special = entry.get("special") is True
        flags = {name: entry.get(name) is True for name in ("single_word", "lstrip", "rstrip")}
        token = AddedToken(content, special=is_special, normalized=entry.get("normalized") is True, **flags)
        (backend.add_special_tokens if is_special else backend.add_tokens)([token])
        if backend.token_to_id(content) != index:
            raise ModelLoadError(
                f"tokenizer_config.json gives token {content!r} the id {index}, which tokenizer.json has no place for; "
                "fetch both again"
            )


def _set_ends(backend: tokenizers.Tokenizer, names: Mapping[str, str], *, adds_bos: bool, adds_eos: bool) -> None:
    """Make the post-processor add what the flags say, where it does not already."""
    bos, eos = (names.get(name) for name in ("bos_token", "eos_token"))
    ends = [(bos, backend.token_to_id(bos)) if adds_bos and bos else None]
    ends.append((eos, backend.token_to_id(eos)) if adds_eos and eos else None)
    expected = [end[1] for end in ends if end is not None]
    if backend.encode("", add_special_tokens=True).ids == expected or None in expected:
        return
    before, after = ([end[0]] if end else [] for end in ends)
    backend.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        special_tokens=[(text, index) for text, index in dict(end for end in ends if end).items() if index is not None],
    )


def _content(value: object) -> str:
    """The text of a special token, which is written plainly or as an object with `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else ""
