"""Which ids end a generation."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenyard.model.files import ModelFiles
    from tokenyard.model.tokenizer import Tokenizer


def eos_token_ids(files: ModelFiles, tokenizer: Tokenizer) -> tuple[int, ...]:
    """What the model's configs say; where neither names an id, the tokenizer's EOS; may be empty."""
    if (ids := files.eos_token_ids) or files.eos_token is None:
        return ids
    token_id = tokenizer.token_to_id(files.eos_token)
    return () if token_id is None else (token_id,)
