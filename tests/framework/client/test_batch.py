"""run_batch: order, bounds and failures, with answers that the test decides; and the lines of OpenAI's batch format."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenyard.client.batch import BatchCounts, run_batch
from tokenyard.client.batch_file import BatchReader, BatchRequest, answer_row, error_row
from tokenyard.client.connection import Answer
from tokenyard.client.failures import RemoteError
from tokenyard.errors import EngineDeadError

ROUTE = "/v1/completions"


def ok(body: object = None, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
    return Answer(status, json.dumps(body).encode(), headers or {})


def requests(count: int) -> list[BatchRequest]:
    return [BatchRequest(number + 1, f"id-{number}", ROUTE, str(number).encode()) for number in range(count)]


def ids(rows: list[bytes]) -> list[str]:
    return [json.loads(row)["custom_id"] for row in rows]


# ---- Running --------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_rows_come_in_the_order_of_the_lines_and_never_more_run_than_allowed(pauses: list[int], most: int) -> None:
    running, peak, rows = 0, 0, list[bytes]()

    async def ask(route: str, body: bytes) -> Answer:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        for _ in range(pauses[int(body)]):
            await asyncio.sleep(0)
        running -= 1
        return ok({"number": int(body)})

    counts = asyncio.run(run_batch(requests(len(pauses)), ask, rows.append, most))
    assert ids(rows) == [f"id-{number}" for number in range(len(pauses))]
    assert [json.loads(row)["response"]["body"]["number"] for row in rows] == list(range(len(pauses)))
    assert peak <= most
    assert counts == BatchCounts(len(pauses), 0)


def test_no_more_is_read_than_the_window_while_an_answer_is_late() -> None:
    read = 0
    release = asyncio.Event()
    most_read = 0

    def lines() -> Iterator[BatchRequest]:
        nonlocal read
        for request in requests(1000):
            read += 1
            yield request

    async def ask(route: str, body: bytes) -> Answer:
        nonlocal most_read
        if body == b"0":
            for _ in range(500):  # meanwhile everything else could run
                await asyncio.sleep(0)
            most_read = read
            release.set()
        return ok()

    rows: list[bytes] = []
    asyncio.run(run_batch(lines(), ask, rows.append, 2))
    assert most_read <= 2 * 4
    assert len(rows) == 1000


def test_large_bodies_and_answers_are_not_held_in_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenyard.client.batch._MAX_BYTES", 100_000)
    held = most_held = num_written = 0

    def lines() -> Iterator[BatchRequest]:
        nonlocal held, most_held
        for number in range(200):
            held += 1
            most_held = max(most_held, held)
            yield BatchRequest(number + 1, f"id-{number}", ROUTE, b"x" * 15_000)

    async def ask(route: str, body: bytes) -> Answer:
        await asyncio.sleep(0)
        return ok("y" * 30_000)

    def write(row: bytes) -> None:
        nonlocal held, num_written
        held -= 1
        num_written += 1

    asyncio.run(run_batch(lines(), ask, write, 50))
    assert num_written == 200
    assert most_held <= 8


def test_a_line_that_is_wrong_is_not_sent_and_the_rest_goes_on() -> None:
    sent: list[bytes] = []

    async def ask(route: str, body: bytes) -> Answer:
        sent.append(body)
        return ok(None, 400) if body == b"2" else ok()

    lines = requests(4)
    lines[1] = BatchRequest(2, "bad", error="no good")
    rows: list[bytes] = []
    counts = asyncio.run(run_batch(lines, ask, rows.append, 3))
    assert sent == [b"0", b"2", b"3"]
    row = json.loads(rows[1])
    assert row["id"].startswith("batch_req_")
    assert (row["custom_id"], row["response"]) == ("bad", None)
    assert row["error"] == {"code": "invalid_line", "message": "line 2: no good"}
    refused = json.loads(rows[2])
    assert (refused["response"]["status_code"], refused["error"]) == (400, None)
    assert counts == BatchCounts(2, 2)


@pytest.mark.parametrize("busy", [ok(None, 503, {"retry-after": "7"}), ok(None, 429), RemoteError("away")])
def test_a_server_that_is_busy_or_away_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, busy: Answer | RemoteError
) -> None:
    paused: list[float] = []
    sleep = asyncio.sleep

    async def no_sleep(seconds: float) -> None:
        paused.append(seconds)
        await sleep(0)

    monkeypatch.setattr("tokenyard.client.batch.asyncio.sleep", no_sleep)
    answers = iter([busy, busy, ok()])

    async def ask(route: str, body: bytes) -> Answer:
        answer = next(answers)
        if isinstance(answer, RemoteError):
            raise answer
        return answer

    rows: list[bytes] = []
    assert asyncio.run(run_batch(requests(1), ask, rows.append, 1)) == BatchCounts(1, 0)
    assert paused == ([7.0, 7.0] if isinstance(busy, Answer) and busy.headers else [0.5, 1.0])


def test_a_server_that_stays_away_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenyard.client.batch._FIRST_PAUSE", 0.0)
    tries = 0

    async def ask(route: str, body: bytes) -> Answer:
        nonlocal tries
        tries += 1
        raise RemoteError("cannot connect")

    rows: list[bytes] = []
    assert asyncio.run(run_batch(requests(2), ask, rows.append, 1)) == BatchCounts(0, 2)
    assert json.loads(rows[1])["error"] == {"code": "no_answer", "message": "line 2: cannot connect"}
    assert tries == 12


def test_an_engine_that_dies_ends_the_batch_after_the_rows_before() -> None:
    async def ask(route: str, body: bytes) -> Answer:
        if body == b"3":
            raise EngineDeadError("gone")
        return ok()

    rows: list[bytes] = []
    with pytest.raises(EngineDeadError, match="gone"):
        asyncio.run(run_batch(requests(50), ask, rows.append, 2))
    assert ids(rows) == ["id-0", "id-1", "id-2"]


def test_cancelling_leaves_finished_rows_and_nothing_that_runs() -> None:
    running = 0

    async def main() -> list[bytes]:
        rows: list[bytes] = []

        async def ask(route: str, body: bytes) -> Answer:
            nonlocal running
            running += 1
            try:
                if int(body) >= 2:
                    task.cancel()
                    await asyncio.Event().wait()
                return ok()
            finally:
                running -= 1

        task = asyncio.create_task(run_batch(requests(50), ask, rows.append, 4))
        with pytest.raises(asyncio.CancelledError):
            await task
        return rows

    assert ids(asyncio.run(main())) == ["id-0", "id-1"]
    assert running == 0


def test_a_disk_that_is_full_ends_the_batch() -> None:
    def full(row: bytes) -> None:
        raise OSError(28, "No space left on device")

    async def ask(route: str, body: bytes) -> Answer:
        return ok()

    with pytest.raises(OSError, match="No space left"):
        asyncio.run(run_batch(requests(50), ask, full, 4))


# ---- Lines ----------------------------------------------------------------------------------------------------------


def read(*lines: bytes, max_body_bytes: int = 10_000) -> list[BatchRequest]:
    return list(BatchReader(io.BytesIO(b"\n".join(lines)), max_body_bytes))


def line(**changes: Any) -> bytes:
    whole = {"custom_id": "a", "method": "POST", "url": ROUTE, "body": {"model": "m"}, **changes}
    return json.dumps({name: value for name, value in whole.items() if value is not ...}).encode()


def test_a_body_is_handed_on_as_it_is() -> None:
    raw = b'{"custom_id":"a","method":"POST","url":"/v1/chat/completions","x":1,"body":{"n":1.50,"t":"\\u00e9","n":2}}'
    (found,) = read(b"\xef\xbb\xbf" + raw)
    assert found == BatchRequest(1, "a", "/v1/chat/completions", b'{"n":1.50,"t":"\\u00e9","n":2}')


def test_empty_lines_are_none_and_lines_are_counted_with_them() -> None:
    found = read(b"", line(custom_id="a"), b"  \r", line(custom_id="b", method=...), b"")
    assert [(one.number, one.custom_id, one.error) for one in found] == [(2, "a", None), (4, "b", None)]


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        (b"nonsense", None, "the line is no request"),
        (b"[1]", None, "the line is no request"),
        (b'{"custom_id": "a"}', "a", "missing required field `url`"),
        (line(custom_id=3), None, "the line is no request"),
        (line(custom_id=""), "", "custom_id must have 1 to 512 characters"),
        (line(custom_id="x" * 600), "x" * 512, "custom_id must have 1 to 512 characters"),
        (line(method="GET"), "a", "method must be POST, got 'GET'"),
        (line(url="http://169.254.169.254/v1/completions"), "a", "url must be one of /v1/chat/completions"),
        (line(url="/v1/embeddings"), "a", "url must be one of"),
        (line(body=...), "a", "missing required field `body`"),
        (line(body=[]), "a", "the line is no request"),
        (line(body={"stream": True}), "a", "stream must be false or absent"),
        (line(body={"stream": 1}), "a", "stream must be false or absent"),
        (b'{"custom_id": "a", "url": "\xff"}', "a", "the line is no request"),
        (b"[" * 100_000, None, "the line is"),
        (line(body={"x": "y" * 90_000}), None, "the line is longer than 75536 bytes"),
    ],
    ids=lambda value: value[:40].decode(errors="replace") if isinstance(value, bytes) else None,
)
def test_a_line_that_is_no_request_is_told_and_the_next_one_is_read(text: bytes, name: str | None, said: str) -> None:
    bad, good = read(text, line(custom_id="z"))
    assert bad.error is not None
    assert said in bad.error
    assert bad.custom_id == name
    assert (good.custom_id, good.number, good.error) == ("z", 2, None)


def test_a_name_is_used_once() -> None:
    first, second, third = read(line(), line(), line(custom_id="b"))
    assert (first.error, third.error) == (None, None)
    assert second.error is not None
    assert "an earlier line has the same custom_id" in second.error


@given(st.lists(st.binary(max_size=30).filter(lambda text: b"\n" not in text), max_size=10))
@settings(max_examples=200, deadline=None)
def test_no_bytes_break_the_reader_or_its_rows(lines: list[bytes]) -> None:
    for request in read(*lines):
        assert request.error is not None
        row = error_row(request, "invalid_line", request.error)
        assert row.endswith(b"\n")
        assert row.count(b"\n") == 1
        json.loads(row)


def test_a_row_is_one_line_whatever_the_answer_looks_like() -> None:
    request = BatchRequest(1, "a", ROUTE, b"{}")
    pretty = Answer(200, b'{\n  "id": "x"\n}', {"x-request-id": "r"})
    row = answer_row(request, pretty)
    assert row.count(b"\n") == 1
    assert json.loads(row)["response"] == {"status_code": 200, "request_id": "r", "body": {"id": "x"}}
    broken = json.loads(answer_row(request, Answer(502, b"<html>", {})))
    assert broken["error"] == {"code": "invalid_answer", "message": "line 1: the answer of status 502 is not JSON"}
