"""GET /debug/requests: what became of a request, by any of its names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from http_server import ThreadServer, running_server

SECRET = "a-canary-among-the-prompts"


@pytest.fixture(scope="module", params=["in", "own"])
def server(tiny_llama_dir: Path, request: pytest.FixtureRequest) -> Iterator[ThreadServer]:
    """With the engine in a thread and in a process: what it tells crosses over whole."""
    overrides = (
        f"engine.process={request.param}",
        "server.served_model_name=[tiny]",
        "kv_cache.block_size=4",
        "kv_cache.num_blocks=16",
        "scheduler.max_num_seqs=3",
        "scheduler.max_num_batched_tokens=8",
        "server.timeline_size=20",
    )
    with running_server(overrides, model=tiny_llama_dir, api_keys=("the-key",)) as running:
        yield running


def timeline(server: ThreadServer, name: str) -> list[dict[str, object]]:
    status, text = server.get(f"/debug/requests/{name}")
    assert status == 200, text
    found = json.loads(text)["requests"]
    assert isinstance(found, list)
    return found


def names(row: dict[str, object]) -> list[str]:
    events = row["events"]
    assert isinstance(events, list)
    return [event["event"] for event in events]


def test_a_timeline_is_found_by_the_answers_id_and_by_the_clients(server: ThreadServer) -> None:
    answer = server.client.completions.create(
        model="tiny", prompt=list(range(5, 25)), max_tokens=4, extra_headers={"X-Request-Id": "mine-1"}
    )
    (row,) = timeline(server, answer.id)
    assert timeline(server, "mine-1") == [row]
    assert timeline(server, answer.id.removeprefix("cmpl-")) == [row]
    assert names(row) == ["queued", "scheduled", "chunk", "chunk", "chunk", "first_token", "end"]
    events = row["events"]
    assert isinstance(events, list)
    assert [event["num_tokens"] for event in events if event["event"] == "chunk"] == [8, 8, 4]
    seconds = [event["seconds"] for event in events]
    assert seconds == sorted(seconds)
    assert row["usage"] == {"prompt_tokens": 20, "cached_tokens": 0, "completion_tokens": 4}
    assert (row["state"], row["finish_reasons"], row["client_label"]) == ("ended", ["length"], "mine-1")


def test_a_chats_timeline_is_found_too(server: ThreadServer) -> None:
    chat = server.client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": SECRET}], max_tokens=2
    )
    (row,) = timeline(server, chat.id)
    assert row["state"] == "ended"
    assert SECRET not in json.dumps(row)


def test_several_prompts_and_choices_are_told_apart(server: ThreadServer) -> None:
    answer = server.client.completions.create(model="tiny", prompt=[[5, 6], [7, 8, 9]], n=2, max_tokens=2, seed=1)
    rows = timeline(server, answer.id)
    assert [row["prompt"] for row in rows] == [0, 1]
    for row in rows:
        events = row["events"]
        assert isinstance(events, list)
        assert sorted(event["choice"] for event in events if event["event"] == "end") == [0, 1]


def test_a_request_that_is_preempted_says_so_and_why_and_what_it_waited_for(server: ThreadServer) -> None:
    """Blocks for about one and a half of them."""
    answers = []
    streams = [
        server.client.completions.create(
            model="tiny",
            prompt=[5, 6, number],
            max_tokens=40,
            stream=True,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        for number in range(3)
    ]
    for stream in streams:
        ids = [event.id for event in stream]
        answers.append(ids[0])
    rows = [row for name in answers for row in timeline(server, name)]
    preempted = [row for row in rows if row["num_preemptions"]]
    assert preempted
    for row in preempted:
        events = row["events"]
        assert isinstance(events, list)
        kinds = names(row)
        reasons = {event["reason"] for event in events if event["event"] == "preempted"}
        assert reasons == {"kv_blocks"}
        assert kinds.count("preempted") == kinds.count("resumed") == row["num_preemptions"]
        assert kinds.index("preempted") < kinds.index("resumed")
        waited = row["waited"]
        assert isinstance(waited, dict)
        assert set(waited) <= {"new", "kv_blocks", "preemption", "token_budget", "max_num_seqs", "blocks_in_flight"}
        assert sum(waited.values()) > 0


def test_an_aborted_request_ends_in_its_timeline(server: ThreadServer) -> None:
    with server.client.completions.create(
        model="tiny", prompt=[5, 6, 7], max_tokens=50, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        name = next(iter(stream)).id
    server.wait_until_idle()
    (row,) = timeline(server, name)
    assert row["finish_reasons"] == ["abort"]
    assert names(row)[-1] == "end"


def test_unknown_requests_are_404_and_the_key_is_needed(server: ThreadServer) -> None:
    """A9, E3."""
    status, text = server.get("/debug/requests/nobody")
    assert status == 404
    assert json.loads(text)["error"]["type"] == "NotFoundError"
    for path in ("/debug/requests", "/debug/requests/nobody", "/metrics"):
        assert server.get(path, {"Authorization": "Bearer wrong"})[0] == 401


def test_secrets_and_texts_are_in_no_answer(server: ThreadServer) -> None:
    """A9."""
    server.client.completions.create(model="tiny", prompt=SECRET, max_tokens=2, user="somebody")
    for path in ("/debug/requests", "/metrics"):
        status, text = server.get(path)
        assert status == 200
        assert SECRET not in text
        assert "the-key" not in text


def test_the_list_has_the_newest_first_and_no_more_than_the_ring_holds(server: ThreadServer) -> None:
    ids = [server.client.completions.create(model="tiny", prompt=[5], max_tokens=1).id for _ in range(24)]
    status, text = server.get("/debug/requests?limit=1000")
    assert status == 200
    rows = json.loads(text)["requests"]
    assert len(rows) == 20
    assert [row["id"] for row in rows[:3]] == ids[:-4:-1]
    assert server.get(f"/debug/requests/{ids[0]}")[0] == 404
    for limit in ("0", "-1", "x", "1e9"):
        assert server.get(f"/debug/requests?limit={limit}")[0] == 400
