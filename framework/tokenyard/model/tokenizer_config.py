"""What tokenizer_config.json says beyond tokenizer.json: special tokens, added tokens, BOS and EOS."""

from __future__ import annotations

from collections.abc import Mapping

import tokenizers
from tokenizers import AddedToken, processors

from tokenyard.errors import ModelLoadError

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip")


def special_token_names(config: Mapping[str, object]) -> dict[str, str]:
    """bos_token, eos_token, ... -> their text, as templates read them."""
    contents = {name: _content(config.get(name)) for name in _NAMES}
    return {name: content for name, content in contents.items() if content}


def apply_config(backend: tokenizers.Tokenizer, config: Mapping[str, object]) -> None:
    """Bring a tokenizer.json in line with tokenizer_config.json.

    Added tokens get the ids and flags that the config gives them, tokens that it names special become special when
    the vocabulary has them, and `add_bos_token` and `add_eos_token` rule over the file's own post-processor.
    """
    _add_listed(backend, config)
    names = special_token_names(config)
    known = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    wanted = [text for text in (*names.values(), *_more_special(config)) if text and text not in known]
    present = [text for text in wanted if backend.token_to_id(text) is not None]
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in present])
    _set_ends(backend, names, config)


def with_added_tokens(
    config: Mapping[str, object], added: Mapping[str, object], backend: tokenizers.Tokenizer
) -> dict[str, object]:
    """The config, with those tokens of an added_tokens.json (text -> id) that neither it nor the tokenizer knows."""
    if "added_tokens_decoder" in config:
        return dict(config)
    special = {*special_token_names(config).values(), *_more_special(config)}
    unknown = {text: index for text, index in added.items() if backend.token_to_id(text) != index}
    listed = {str(index): {"content": text, "special": text in special} for text, index in unknown.items()}
    return {**config, "added_tokens_decoder": listed}


def _more_special(config: Mapping[str, object]) -> list[str]:
    """Special tokens without a name of their own, listed or by a name that only this model knows."""
    listed: list[object] = []
    for key in _LISTS:
        value = config.get(key)
        listed.extend(value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ())
    return [_content(item) for item in listed]


def _add_listed(backend: tokenizers.Tokenizer, config: Mapping[str, object]) -> None:
    """Tokens of the config's `added_tokens_decoder`, whose ids must come out as it says."""
    listed = config.get("added_tokens_decoder")
    if not isinstance(listed, Mapping):
        return
    entries = {int(key): value for key, value in listed.items() if _is_id(key) and isinstance(value, Mapping)}
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    for index in sorted(entries):
        token = _added_token(entries[index])
        if not token.content or _same_token(known.get(token.content), token):
            continue
        (backend.add_special_tokens if token.special else backend.add_tokens)([token])
        if backend.token_to_id(token.content) != index:
            raise ModelLoadError(
                f"the model's settings give token {token.content!r} the id {index}, which tokenizer.json has no "
                "place for; fetch both again"
            )


def _added_token(entry: Mapping[str, object]) -> AddedToken:
    is_special = entry.get("special") is True
    normalized = entry.get("normalized", not is_special) is True
    flags = {name: entry.get(name) is True for name in _FLAGS}
    return AddedToken(_content(entry), special=is_special, normalized=normalized, **flags)


def _same_token(known: AddedToken | None, wanted: AddedToken) -> bool:
    return known is not None and known.__getstate__() == wanted.__getstate__()


def _is_id(key: object) -> bool:
    return isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 10


def _set_ends(backend: tokenizers.Tokenizer, names: Mapping[str, str], config: Mapping[str, object]) -> None:
    """Make the post-processor add what the flags say, when it does not; an end without a flag stays as it is."""
    bos, eos = (names.get(name, "") for name in ("bos_token", "eos_token"))
    frame = backend.encode("", add_special_tokens=True).ids
    has_bos = frame[:1] == [backend.token_to_id(bos)]
    has_eos = frame[1 if has_bos else 0 :][-1:] == [backend.token_to_id(eos)]
    adds_bos = _flag(config, "add_bos_token", has_bos) and backend.token_to_id(bos) is not None
    adds_eos = _flag(config, "add_eos_token", has_eos) and backend.token_to_id(eos) is not None
    if (adds_bos, adds_eos) == (has_bos, has_eos):
        return
    before, after = [bos] * adds_bos, [eos] * adds_eos
    ids = {text: backend.token_to_id(text) for text in before + after}
    backend.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        special_tokens=[(text, index) for text, index in ids.items() if index is not None],
    )


def _flag(config: Mapping[str, object], key: str, default: bool) -> bool:
    value = config.get(key)
    return value if isinstance(value, bool) else default


def _content(value: object) -> str:
    """The text of a special token, which is written plainly or as an object with `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else ""
