"""Text to ids by the tokenizers library, so that other threads go on meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tokenizers

_SHORT = 2000  # characters: encoded within a millisecond or two


def encode(backend: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool) -> tokenizers.Encoding:
    """What `backend.encode` returns, which holds the interpreter's lock for as long as it takes: seconds for megabytes.

    A batch does not hold it; of one short text it costs some 20 us more.
    """
    if len(text) <= _SHORT:
        return backend.encode(text, add_special_tokens=add_special_tokens)
    (encoding,) = backend.encode_batch([text], add_special_tokens=add_special_tokens)
    return encoding
