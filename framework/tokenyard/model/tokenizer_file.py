"""tokenizer.json, read with a size cap and checked; and what holds of every vocabulary, wherever it came from."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
import tokenizers

from tokenyard.errors import ModelLoadError, TokenyardError

MAX_TOKENIZER_BYTES = 256 * 2**20
MAX_TOKENS = 2**22  # ids below it are believed; the largest vocabularies have some 2**18 tokens


class _AddedEntry(msgspec.Struct):
    id: int
    content: str


class _ModelEntry(msgspec.Struct):
    vocab: msgspec.Raw


class _TokenizerEntry(msgspec.Struct):
    model: _ModelEntry
    added_tokens: list[_AddedEntry] | None = None


def read_tokenizer_file(path: Path) -> tokenizers.Tokenizer:
    """The tokenizer in a tokenizer.json; ModelLoadError when it is too large, malformed, or contradicts itself."""
    try:
        size = path.stat().st_size
        if size > MAX_TOKENIZER_BYTES:
            raise ModelLoadError(f"{path}: more than {MAX_TOKENIZER_BYTES} bytes, which no tokenizer needs")
        content = path.read_bytes()
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read ({error.strerror}); fetch the file again") from error
    with library_errors(lambda reason: ModelLoadError(f"{path}: not a tokenizer ({reason}); fetch the file again")):
        content.decode()
        entry = msgspec.json.decode(content, type=_TokenizerEntry)
        backend = tokenizers.Tokenizer.from_buffer(content)
    misplaced = _misplaced(backend, entry.added_tokens or [])
    if misplaced is not None or has_holes(backend):  # both may come of a token that is listed twice
        _check_spelled_once(bytes(entry.model.vocab), path)
    if misplaced is not None:
        raise ModelLoadError(f"{path}: {misplaced}; fetch the file again")
    return backend


def vocabulary_size(backend: tokenizers.Tokenizer, origin: str) -> int:
    """The highest id of the tokenizer and 1; ModelLoadError when ids are not unique, too high, or none are there.

    Ids need not be dense: a hole is an id without text. `origin` begins the error's message.
    """
    vocabulary = backend.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise ModelLoadError(f"{origin}: the vocabulary is empty; fetch the tokenizer again")
    size = max(vocabulary.values()) + 1
    if size > MAX_TOKENS:
        raise ModelLoadError(f"{origin}: token id {size - 1} is too high, at most {MAX_TOKENS - 1} is believed")
    if len(set(vocabulary.values())) != len(vocabulary):
        first, second, index = _same_id(vocabulary)
        raise ModelLoadError(f"{origin}: tokens {first!r} and {second!r} both have the id {index}")
    _check_frame(backend, size, origin)
    return size


def has_holes(backend: tokenizers.Tokenizer) -> bool:
    """Whether an id below the highest belongs to no token."""
    ids = backend.get_vocab(with_added_tokens=True).values()
    return len(ids) <= max(ids, default=-1)


@contextmanager
def library_errors(make_error: Callable[[str], TokenyardError]) -> Iterator[None]:
    """Whatever the tokenizers library raises, panics of its native code included, becomes `make_error(reason)`."""
    try:
        yield
    except TokenyardError:
        raise
    except BaseException as error:  # a panic is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise make_error(reason[:300]) from error


def _check_frame(backend: tokenizers.Tokenizer, size: int, origin: str) -> None:
    """What the tokenizer puts around every text must work and be of its vocabulary."""
    with library_errors(lambda reason: ModelLoadError(f"{origin}: cannot encode an empty text ({reason})")):
        frame = backend.encode("", add_special_tokens=True).ids
    if any(index >= size for index in frame):
        raise ModelLoadError(f"{origin}: adds token id {max(frame)} to texts, which its vocabulary does not have")


def _misplaced(backend: tokenizers.Tokenizer, added: list[_AddedEntry]) -> str | None:
    """What is wrong with an added token, which the library numbers anew without a word; None when nothing is."""
    for token in added:
        real = backend.token_to_id(token.content)
        if token.content and real != token.id:
            return f"added token {token.content!r} has the id {token.id}, but the vocabulary puts it at {real}"
    return None


def _check_spelled_once(vocabulary: bytes, path: Path) -> None:
    """Refuse a token that is listed twice: the later entry wins in silence, and the first one's id has no token."""
    content = json.loads(vocabulary, object_pairs_hook=lambda pairs: [list(pair) for pair in pairs])
    seen: set[object] = set()
    for entry in content:
        token = entry[0] if isinstance(entry, list) else entry
        if token in seen:
            raise ModelLoadError(f"{path}: token {token!r} is in the vocabulary twice; fetch the file again")
        seen.add(token)


def _same_id(vocabulary: Mapping[str, int]) -> tuple[str, str, int]:
    first_with: dict[int, str] = {}
    for token, index in sorted(vocabulary.items()):
        if index in first_with:
            return first_with[index], token, index
        first_with[index] = token
    raise ValueError("every id is of one token")
