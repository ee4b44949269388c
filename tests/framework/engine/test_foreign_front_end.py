"""What a front end that is not ours sends to an engine's process concerns nobody but itself."""

from __future__ import annotations

import math
import pickle
import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from foreign_front_end import ForeignFrontEnd, launch_of
from own_process import probe_installed
from tokenyard.engine.process import EngineProcess
from tokenyard.errors import PluginError
from tokenyard.ipc.codec import Array
from tokenyard.ipc.failures import error_from_message
from tokenyard.ipc.handshake import own_identity
from tokenyard.ipc.messages import AddRequests, Answer, Call, Died, FinishRequests, Refused, Stop, to_engine_codec
from tokenyard.ipc.outputs import OutputsMessage
from tokenyard.ipc.params import SamplingMessage
from tokenyard.ipc.requests import RequestMessage
from tokenyard.request import FinishReason


@pytest.fixture(scope="module", autouse=True)
def probe() -> Iterator[None]:
    with probe_installed():
        yield


@pytest.fixture(scope="module")
def front(tiny_llama_dir: Path) -> Iterator[ForeignFrontEnd]:
    with ForeignFrontEnd() as made:
        made.start(launch_of(tiny_llama_dir))
        yield made
        made.send(Stop())
        assert made.child.wait(60) is not None
        assert made.child.end is not None
        assert made.child.end.exit_code == 0


def prompt(*token_ids: int) -> Array:
    return Array.of(np.array(token_ids, dtype=np.int32))


def request(**changes: object) -> RequestMessage:
    good = RequestMessage(
        request_id="r",
        prompt=prompt(1, 2, 3),
        params=SamplingMessage(max_tokens=2, temperature=0.0),
        age=0.0,
        metadata={"task": "run"},
    )
    return msgspec.structs.replace(good, **changes)


def params(**changes: object) -> SamplingMessage:
    return msgspec.structs.replace(SamplingMessage(max_tokens=2), **changes)


class Writes:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (open, (self.path, "w"))


def test_a1_2_3_21_frames_that_are_no_messages_are_dropped_and_counted_and_the_engine_lives(
    front: ForeignFrontEnd, tmp_path: Path
) -> None:
    before = front.num_dropped()
    frames = [b"", b"\xc1", pickle.dumps(Writes(str(tmp_path / "planted"))), b"\x81\xa4type\xa3add", b"\x91" * 10_000]
    for frame in frames:
        front.send_raw(frame)
    assert front.num_dropped() == before + len(frames)
    assert not (tmp_path / "planted").exists()
    front.send(AddRequests([request(request_id="after")]))
    outputs = front.next(OutputsMessage)
    assert isinstance(outputs, OutputsMessage)
    assert outputs.request_ids == ["after"]
    front.send(FinishRequests(["after"], FinishReason.ABORT))


def test_a1_bytes_at_random_never_end_the_engine(front: ForeignFrontEnd) -> None:
    rng, codec = random.Random(7), to_engine_codec()
    good = codec.encode(AddRequests([request(request_id="fuzz", params=params(logit_bias={3: 1.0}))], 4))
    for _ in range(300):
        frame = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            frame[rng.randrange(len(frame))] = rng.randrange(256)
        front.send_raw(bytes(frame[: rng.randrange(1, len(frame) + 1)]))
    front.send(Call(77, "settle"))
    while (answer := front.next(Answer)).call_id != 77:  # type: ignore[union-attr]
        pass
    assert isinstance(answer, Answer)
    assert answer.error is None


@pytest.mark.parametrize(
    ("changes", "kind", "told"),
    [
        ({"prompt": prompt(10**6)}, "ValidationError", "outside the vocabulary"),
        ({"prompt": prompt(-1)}, "ValidationError", "outside the vocabulary"),
        ({"prompt": prompt()}, "ValidationError", "0 tokens"),
        ({"prompt": prompt(*[1] * 500)}, "ValidationError", "500 tokens"),
        ({"prompt": Array("int64", (1,), b"\0" * 8)}, "ValueError", "int64"),
        ({"prompt": Array("int32", (2**40,), b"\0" * 8)}, "ValueError", "bytes"),
        ({"stop_token_ids": (10**6,)}, "ValidationError", "stop_token_ids"),
        ({"stop_token_ids": tuple(range(300))}, "ValidationError", "at most 256"),
        ({"bad_words_token_ids": ((1, -5),)}, "ValidationError", "bad_words"),
        ({"params": params(allowed_token_ids=(10**6,))}, "ValidationError", "allowed_token_ids"),
        ({"params": params(logit_bias={10**6: 1.0})}, "ValidationError", "logit_bias"),
        ({"params": params(temperature=math.nan)}, "ValidationError", "temperature"),
        ({"params": params(top_p=0.0)}, "ValidationError", "top_p"),
        ({"params": params(n=4)}, "ValidationError", "n=4"),
        ({"params": params(max_tokens=0)}, "ValidationError", "max_tokens"),
        ({"params": params(extra_args="{")}, "ValidationError", "extra_args"),
        ({"params": params(extra_args="[1]")}, "ValidationError", "extra_args"),
        ({"params": params(logprobs=10**6)}, "ValidationError", "logprobs"),
        ({"priority": 2**60}, "ValidationError", "priority"),
        ({"age": math.nan}, "ValidationError", "age"),
        ({"seconds_left": math.inf}, "ValidationError", "deadline"),
        ({"service_level": (math.nan, None, None)}, "ValidationError", "slo"),
        ({"client_id": "x" * 1000}, "ValidationError", "client"),
        ({"cache_salt": "x" * 10**6}, "ValidationError", "cache_salt"),
        ({"extra_keys": (("k", 5, 1),)}, "ValidationError", "extra_keys"),
        ({"metadata": {"task": "nothing"}}, "ValidationError", "task"),
        ({"metadata": {"unknown": 1}}, "ValidationError", "unknown"),
        ({"metadata": {"seat": {"row": "x"}}}, "ValidationError", "seat.row"),
    ],
)
def test_r3_a_request_that_could_not_run_is_refused_and_reaches_no_step(
    front: ForeignFrontEnd, changes: dict[str, object], kind: str, told: str
) -> None:
    front.send(AddRequests([request(request_id="good"), request(request_id="bad", **changes)]))
    refused = front.next(Refused)
    assert isinstance(refused, Refused)
    assert refused.request_ids == ["good", "bad"]
    assert refused.error.kind == kind
    assert told in str(error_from_message(refused.error))


def test_an_answer_is_given_to_who_asks_for_one(front: ForeignFrontEnd) -> None:
    front.send(AddRequests([request(request_id="asked")], 21))
    front.send(AddRequests([request(request_id="asked", prompt=prompt())], 22))
    answers = [front.next(Answer), front.next(Answer)]
    assert [(answer.call_id, answer.error is None) for answer in answers] == [(21, True), (22, False)]  # type: ignore[union-attr]
    front.send(FinishRequests(["asked"], FinishReason.ABORT))


@pytest.mark.parametrize("change", [{"wire_version": 999}, {"tokenyard_version": "0"}, {"plugin_api": (9, 9)}])
def test_2_3_21_a_front_end_of_another_version_is_refused(tiny_llama_dir: Path, change: dict[str, object]) -> None:
    launch = launch_of(tiny_llama_dir)
    with ForeignFrontEnd() as other:
        other.send(msgspec.structs.replace(launch, identity=msgspec.structs.replace(own_identity(), **change)))
        died = other.next(Died)
        assert isinstance(died, Died)
        assert died.error.kind == "PluginError"
        assert "the front end is of another version than this process" in died.error.message
        assert other.child.wait(60) is not None


def test_2_3_21_an_engine_of_another_version_is_refused_and_ended() -> None:
    process = EngineProcess("foreign_engine")
    with pytest.raises(PluginError, match="the engine's process is of another version than this process"):
        process.wait_until_ready()
    process.stop(0)
    process.close()
    assert process.num_dropped_frames == 2
