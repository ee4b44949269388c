"""Lines of a trace as bytes, and back."""

from __future__ import annotations

import json

import msgspec

from tokenyard.trace.records import AnyLine

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[AnyLine] = msgspec.json.Decoder(AnyLine)


def encode_line(line: AnyLine) -> bytes:
    """One line, its end included. Raises TypeError and the like for what JSON cannot hold."""
    try:
        return _encoder.encode(line) + b"\n"
    except UnicodeEncodeError:  # half of a surrogate pair, in a name that somebody gave a request
        return json.dumps(msgspec.to_builtins(line)).encode() + b"\n"


def decode_line(line: bytes) -> AnyLine:
    """Raises ValueError, msgspec's errors among them, for what is no line of a trace."""
    try:
        return _decoder.decode(line)
    except msgspec.DecodeError:
        decoded: AnyLine = msgspec.convert(json.loads(line), AnyLine, str_keys=True)
        return decoded
