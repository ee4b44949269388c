"""Block hashes: a chain of sha256 digests, so that one digest stands for a block and everything before it."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenyard.arrays import IntArray


def root_hash(cache_salt: str | None, lora_name: str | None) -> bytes:
    """The parent of a request's first block; requests with different roots never share a block.

    It depends on nothing else, so hashes are the same in every process and run.
    """
    digest = hashlib.sha256(b"tokenyard.block.v1")
    for part in (cache_salt, lora_name):
        text = b"" if part is None else part.encode()
        # None and "" differ, and no two pairs of parts spell the same bytes
        digest.update(b"\0" if part is None else b"\1" + len(text).to_bytes(8, "little"))
        digest.update(text)
    return digest.digest()


def block_hash(parent: bytes, token_ids: IntArray) -> bytes:
    """Digest of a full block: its parent's digest and its tokens."""
    return hashlib.sha256(parent + token_ids.tobytes()).digest()
