"""Damages GGUF files where it hurts: counts, lengths, sizes, types, offsets, names. As a script: in bounded memory.

The walk over a header is written from the format's description and knows nothing of the reader under test.
"""

from __future__ import annotations

import random
import resource
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

NASTY = (
    0, 1, 2, 3, 7, 31, 33, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**42 + 1, 2**53, 2**62, 2**63 - 1, 2**63,
    2**64 - 1,
)  # fmt: skip
SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
FIELDS = (
    "version",
    "count",
    "length",
    "value type",
    "value",
    "items",
    "dimensions",
    "size",
    "tensor type",
    "offset",
    "text",
)


@dataclass(frozen=True)
class Field:
    """Some bytes of a header, and what they say."""

    kind: str  # one of FIELDS
    at: int
    num_bytes: int


def fields_of(content: bytes) -> list[Field]:
    """Every field of a sound header."""
    return _Walk(content).fields


class _Walk:
    def __init__(self, content: bytes) -> None:
        self._content, self._at, self.fields = content, 4, list[Field]()
        self._number("version", 4)
        num_tensors, num_keys = self._number("count", 8), self._number("count", 8)
        for _ in range(num_keys):
            self._text()
            self._value(self._number("value type", 4))
        for _ in range(num_tensors):
            self._text()
            for _ in range(self._number("dimensions", 4)):
                self._number("size", 8)
            self._number("tensor type", 4)
            self._number("offset", 8)

    def _value(self, kind: int) -> None:
        if kind == 9:
            item, length = self._number("value type", 4), self._number("items", 8)
            for _ in range(length):
                self._value(item)
        elif kind == 8:
            self._text()
        else:
            self._number("value", SCALAR_BYTES[kind])

    def _text(self) -> None:
        length = self._number("length", 8)
        self.fields.append(Field("text", self._at, length))
        self._at += length

    def _number(self, kind: str, num_bytes: int) -> int:
        self.fields.append(Field(kind, self._at, num_bytes))
        self._at += num_bytes
        return int.from_bytes(self._content[self._at - num_bytes : self._at], "little")


def damage(content: bytes, fields: list[Field], rng: random.Random) -> bytes:
    """The file with one to three things changed."""
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 3))):
        kind = rng.choice((*FIELDS, "bytes", "cut", "twice", "more"))
        if kind == "bytes":
            at = rng.randrange(max(1, len(changed) - 8))
            changed[at : at + rng.randint(1, 8)] = rng.randbytes(rng.randint(1, 8))
        elif kind == "cut":
            del changed[rng.randrange(len(changed)) :]
        elif kind == "more":
            changed += rng.randbytes(rng.randint(1, 100))
        elif kind == "twice":
            _copy_a_field(changed, fields, rng)
        else:
            _change_a_field(changed, [field for field in fields if field.kind == kind], rng)
        if len(changed) < 32:
            break
    return bytes(changed)


def _copy_a_field(changed: bytearray, fields: list[Field], rng: random.Random) -> None:
    """One name or text over another of its length: keys, tensors and tokens that are there twice."""
    first = rng.choice(fields)
    same = [field for field in fields if field.kind == first.kind and field.num_bytes == first.num_bytes]
    second = rng.choice(same)
    changed[first.at : first.at + first.num_bytes] = changed[second.at : second.at + second.num_bytes]


def _change_a_field(changed: bytearray, fields: list[Field], rng: random.Random) -> None:
    field = rng.choice(fields)
    if field.kind == "text":
        if field.at < field.at + field.num_bytes <= len(changed):
            changed[field.at + rng.randrange(field.num_bytes)] = rng.randrange(256)
        return
    old = int.from_bytes(changed[field.at : field.at + field.num_bytes], "little")
    new = rng.choice((*NASTY, old + 1, old - 1, old * 2, old ^ 1 << rng.randrange(8 * field.num_bytes)))
    changed[field.at : field.at + field.num_bytes] = (new % 2 ** (8 * field.num_bytes)).to_bytes(
        field.num_bytes, "little"
    )


def load_everything(path: Path) -> bool:
    """Every step of loading a model; True if it loaded, False if it was refused as it should be."""
    import torch
    from tokenyard.errors import ModelLoadError
    from tokenyard.model.files import resolve_model
    from tokenyard.model.loader import load_model
    from tokenyard.model.tokenizer import load_tokenizer
    from tokenyard.model.weights import open_weights

    try:
        files = resolve_model(str(path))
        _ = files.max_model_len, files.eos_token_ids, files.torch_dtype
        tokenizer = load_tokenizer(files)
        tokenizer.decode(tokenizer.encode("hi the 12 <|end|> \u00e9 \U0001f642"))
        with open_weights(files) as weights:
            for name in sorted(weights.names()):
                weights.get(name, torch.bfloat16)
        load_model(files, dtype=torch.float32, device=torch.device("cpu"))
    except ModelLoadError as error:
        if "\n" in str(error) or len(str(error)) > 1000:
            raise AssertionError(f"not one clear line: {error}") from error
        return False
    return True


def main(paths: list[Path], num_seeds: int, limit_bytes: int) -> None:
    """Load damaged copies with at most `limit_bytes` more memory than a sound file leaves the process with."""
    for path in paths:
        load_everything(path)  # imports, and whatever is made once
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (pages, *_) = Path("/proc/self/statm").read_text().split()
    used = int(pages) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + limit_bytes, used + limit_bytes))
    loaded, slowest = 0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        for source in paths:
            content = source.read_bytes()
            fields = fields_of(content)
            for seed in range(num_seeds):
                damaged = Path(folder) / "damaged.gguf"
                damaged.write_bytes(damage(content, fields, random.Random(seed)))
                started = time.perf_counter()
                loaded += load_everything(damaged)
                slowest = max(slowest, time.perf_counter() - started)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - grown
    print(loaded, grown * 1024, f"{slowest:.3f}")


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[3:]], int(sys.argv[1]), int(sys.argv[2]))
