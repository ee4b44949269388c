"""Which decoders of a tokenizer write each token on its own, and how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

_AFTER_REPLACING: tuple[list[str], ...] = (
    ["ByteFallback", "Fuse", "Strip"],
    ["ByteFallback", "Fuse"],
    ["ByteFallback"],
    ["Fuse", "Strip"],
    ["Fuse"],
    [],
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spelling:
    """How a decoder writes a token: by itself alone, but for spaces that it drops where a text starts."""

    is_byte_level: bool = False  # each character of a token stands for a byte
    has_byte_tokens: bool = False  # a token like <0x0A> is that byte
    replacements: tuple[tuple[str, str], ...] = ()
    num_dropped_spaces: int = 0  # at most so many at the start of a text
    dropped_from_first: str | None = None  # dropped wherever it occurs in the first token


def spelling_of(state: object) -> Spelling | None:
    """The spelling of a decoder, given as in tokenizer.json; None when it is of no kind that is known exactly."""
    if not _is_object(state):
        return None
    steps = state.get("decoders") if state.get("type") == "Sequence" else [state]
    if not isinstance(steps, list) or not all(_is_object(step) for step in steps):
        return None
    kinds = [step.get("type") for step in steps]
    if kinds in (["ByteLevel"], ["ByteLevel", "Fuse"]):
        return Spelling(is_byte_level=True)
    if kinds == ["Metaspace"]:
        return _metaspace(steps[0])
    return _replacing(steps, kinds)


def _metaspace(step: Mapping[str, object]) -> Spelling | None:
    mark = step.get("replacement")
    if not isinstance(mark, str) or not mark:
        return None
    is_kept = step.get("prepend_scheme") == "never"
    return Spelling(replacements=((mark, " "),), dropped_from_first=None if is_kept else mark)


def _replacing(steps: Sequence[Mapping[str, object]], kinds: Sequence[object]) -> Spelling | None:
    """Replacements, then perhaps byte tokens, then one text that perhaps loses a space: what Llama 2 and Gemma have."""
    num_replacing = next((place for place, kind in enumerate(kinds) if kind != "Replace"), len(kinds))
    replacements = [pair for step in steps[:num_replacing] if (pair := _replacement(step)) is not None]
    rest = list(kinds[num_replacing:])
    num_dropped = _num_dropped(steps[-1]) if "Strip" in rest else 0
    if len(replacements) < num_replacing or rest not in _AFTER_REPLACING or num_dropped is None:
        return None
    return Spelling(
        has_byte_tokens="ByteFallback" in rest, replacements=tuple(replacements), num_dropped_spaces=num_dropped
    )


def _replacement(step: Mapping[str, object]) -> tuple[str, str] | None:
    pattern, content = step.get("pattern"), step.get("content")
    text = pattern.get("String") if _is_object(pattern) else None
    return (text, content) if isinstance(text, str) and text and isinstance(content, str) else None


def _num_dropped(step: Mapping[str, object]) -> int | None:
    start = step.get("start")
    return start if step.get("content") == " " and step.get("stop") == 0 and isinstance(start, int) else None


def _is_object(value: object) -> TypeGuard[Mapping[str, object]]:
    return isinstance(value, dict)
