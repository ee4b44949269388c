"""The process of an engine that is not ours: it says what is no message, and then that it is of another version."""

from __future__ import annotations

import threading

import msgspec
import zmq
from tokenyard.ipc.child import begin_child
from tokenyard.ipc.handshake import own_identity
from tokenyard.ipc.messages import Hello, from_engine_codec
from tokenyard.ipc.sockets import Channel


def main() -> None:
    """Until its parent ends it."""
    asked = threading.Event()
    told = begin_child(asked.set)
    results = Channel(zmq.Context(), told.arguments[1], binds=False)
    results.send(b"\xc1")
    results.send(msgspec.msgpack.encode({"type": "nothing"}))
    identity = msgspec.structs.replace(own_identity(), wire_version=999)
    results.send(from_engine_codec().encode(Hello(identity)))
    asked.wait()
    results.close(1000)
