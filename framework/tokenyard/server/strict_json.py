"""JSON that all parsers read alike, and that costs little to read: bounded before it is parsed.

What costs time and memory is not a body's length but what it has many of: a container or a text is some hundred bytes
and a call, and while a parser runs, in whatever thread, nothing else of the process does.
"""

from __future__ import annotations

import json
from collections import Counter

import msgspec
import numpy as np
from starlette.exceptions import HTTPException

MAX_PARTS = 2**15
"""Lists, objects and texts in one body, keys among them: 2048 messages of several parts and their tools have fewer."""

MAX_ITEMS = 2**20
"""Items of lists and objects: as many token ids, of which a body may have many, and which cost little."""

_CONTAINER, _ITEM = 1, 2
_KINDS = bytes(_CONTAINER if chr(i) in "[{" else _ITEM if chr(i) == "," else 0 for i in range(256))


def parse_json(content: bytes) -> object:
    """The value; HTTPException 400 for what is not strict JSON, or has more parts than the limits above.

    NaN and Infinity are not strict; nor are numbers beyond a float's range or of thousands of digits, text that is not
    UTF-8 or has half a surrogate pair, a key that comes twice, and about a thousand levels.
    """
    if not content.strip():
        raise HTTPException(400, "the body is empty; it must be a JSON object")
    _check_size(content)
    try:
        msgspec.json.decode(content)  # the stricter one, which lets a key come twice
        return json.loads(content, object_pairs_hook=_once)
    except msgspec.DecodeError as error:
        raise HTTPException(400, f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise HTTPException(400, "the body is nested too deeply") from None
    except ValueError:
        raise HTTPException(400, "the body is not valid JSON") from None


def _check_size(content: bytes) -> None:
    if len(content) <= MAX_PARTS:
        return
    num_parts, num_items = _count(content)
    if num_parts > MAX_PARTS:
        raise HTTPException(400, f"the body has {num_parts} lists, objects and texts; at most {MAX_PARTS} are allowed")
    if num_items > MAX_ITEMS:
        raise HTTPException(400, f"the body has {num_items} items in lists; at most {MAX_ITEMS} are allowed")


def _count(content: bytes) -> tuple[int, int]:
    """Containers and texts, and items beyond the first of each container; what texts hold is not looked at."""
    if b"\\" in content:
        content = content.replace(b"\\\\", b"__").replace(b'\\"', b"__")  # quotes that are left begin or end a text
    is_quote = np.frombuffer(content, np.uint8) == ord('"')
    kinds = np.frombuffer(content.translate(_KINDS), np.uint8) * ~np.logical_xor.accumulate(is_quote)
    num_containers, num_items = (int(np.count_nonzero(kinds == kind)) for kind in (_CONTAINER, _ITEM))
    return num_containers + int(np.count_nonzero(is_quote)) // 2, num_items


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise HTTPException(400, f"the key {twice[:100]!r} comes twice in one object of the body")
    return found
