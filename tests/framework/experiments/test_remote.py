"""Workloads on a server of OpenAI's API whose answers the test decides."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from fake_openai import (
    DONE,
    Asked,
    FakeServer,
    Reply,
    Stream,
    chat_chunk,
    chunk,
    fake_server,
    models,
    usage,
)
from http_server import running_server
from planted_workloads import FollowUps, PlantedWorkload, planted
from tokenyard.client.failures import RemoteError
from tokenyard.errors import PluginError, TokenyardError, UserError
from tokenyard.experiments.records import RequestStatus, RunRecord
from tokenyard.experiments.run import run_workload
from tokenyard.interfaces import WorkloadRequest
from tokenyard.interfaces.workload import OUTPUT, Segment

NUM_BEFORE = 3  # requests that find out how the server is spoken to, and warm it up


def completion(asked: Asked) -> Stream:
    """As many chunks as tokens are asked for, and a count of one token for each id or word of the prompt."""
    count, prompt = asked.body["max_tokens"], asked.body["prompt"]
    parts = [chunk(" x", ids=[40 + at]) for at in range(count - 1)]
    size = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
    return Stream([*parts, chunk(" x", finish="length", ids=[40 + count - 1]), usage(size, count), DONE])


def ours(asked: Asked) -> Reply:
    return Reply({"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "tokenyard"}]})


def run(
    server: FakeServer | str,
    requests: Sequence[WorkloadRequest],
    *overrides: str,
    follow_ups: FollowUps | None = None,
    has_content: bool = False,
) -> RunRecord:
    url = server if isinstance(server, str) else server.url
    workload = PlantedWorkload(requests, follow_ups, has_content=has_content)
    return run_workload(*planted(workload, [f"experiment.target={url}", *overrides]))


def some(count: int, **more: object) -> list[WorkloadRequest]:
    return [
        WorkloadRequest(arrival=0.001 * number, num_prompt_tokens=4 + number, num_output_tokens=3, **more)  # type: ignore[arg-type]
        for number in range(count)
    ]


def sent(server: FakeServer, path: str = "/v1/completions") -> list[dict[str, object]]:
    return [asked.body for asked in server.of(path)]


def test_prompts_are_token_ids_of_the_length_that_the_workload_says_and_each_is_another() -> None:
    with fake_server(models=models("m"), completions=completion) as server:
        record = run(server, some(5))
        bodies = sent(server)[NUM_BEFORE:]
    prompts = [tuple(body["prompt"]) for body in bodies]  # type: ignore[arg-type]
    assert sorted(map(len, prompts)) == [4, 5, 6, 7, 8]
    assert len({prompt[:4] for prompt in prompts}) == 5
    assert all(body["ignore_eos"] is True and body["max_tokens"] == 3 for body in bodies)
    assert not {"priority", "scheduling", "session_id", "user", "return_token_ids"} & set(bodies[0])
    assert record.facts["prompts"] == "token_ids"
    assert record.facts["model"] == "m"


def test_the_record_is_what_the_client_saw() -> None:
    with fake_server(models=models("m"), completions=completion) as server:
        record = run(server, some(4, client="a"))
    table = record.requests
    assert table.status.tolist() == [RequestStatus.FINISHED] * 4
    assert (table.prompt.tolist(), table.output.tolist()) == ([4, 5, 6, 7], [3, 3, 3, 3])
    assert table.clients == ("a",)
    assert np.isnan(table.first_scheduled).all()
    assert (table.arrival <= table.first_token).all()
    assert (table.first_token <= table.finish).all()
    assert record.gaps.counts.sum() == 4 * 2
    assert record.totals.num_steps is None
    assert record.steps is None


def test_only_a_server_of_ours_is_told_what_only_it_understands() -> None:
    requests = some(2, client="a", session="s", priority=3, deadline=30.0)
    with fake_server(models=ours, completions=completion) as server:
        record = run(server, requests)
        body = sent(server)[-1]
    assert (body["user"], body["session_id"], body["priority"]) == ("a", "s", 3)
    hints = body["scheduling"]
    assert isinstance(hints, dict)
    assert 0 < hints["deadline"] <= 30
    assert record.facts["scheduling_hints"] is True
    with fake_server(models=models("m"), completions=completion) as server:
        run(server, requests)
        body = sent(server)[-1]
    assert body["user"] == "a"
    assert not {"session_id", "priority", "scheduling"} & set(body)


def refusing(refuses: Callable[[Asked], bool], answer: Callable[[Asked], Stream]) -> Callable[[Asked], Reply | Stream]:
    return lambda asked: Reply({"error": {"message": "no"}}, 400) if refuses(asked) else answer(asked)


def test_a_server_that_takes_no_ids_gets_text_of_about_as_many_tokens(caplog: pytest.LogCaptureFixture) -> None:
    def takes_ids(asked: Asked) -> bool:
        return not isinstance(asked.body["prompt"], str) or "ignore_eos" in asked.body

    with (
        caplog.at_level(logging.WARNING),
        fake_server(models=models("m"), completions=refusing(takes_ids, completion)) as server,
    ):
        record = run(server, some(3))
    assert record.requests.prompt.tolist() == [4, 5, 6]  # by the server's count, which is one a word
    assert (record.facts["prompts"], record.facts["ignore_eos"]) == ("text", False)
    assert "takes no token ids" in caplog.text
    assert "answers may be shorter" in caplog.text


def test_a_server_with_nothing_but_chats_gets_chats() -> None:
    def chat(asked: Asked) -> Stream:
        count = asked.body["max_completion_tokens"]
        return Stream([chat_chunk(""), *[chat_chunk(" x")] * count, chat_chunk(finish="length"), usage(9, count), DONE])

    with fake_server(models=models("m"), chat=chat, completions=lambda asked: Reply({}, 404)) as server:
        record = run(server, some(2))
        body = sent(server, "/v1/chat/completions")[-1]
    assert record.facts["route"] == "/v1/chat/completions"
    assert record.requests.output.tolist() == [3, 3]
    (message,) = body["messages"]  # type: ignore[misc]
    assert len(str(message["content"]).split()) == 5


def test_a_request_that_fails_is_rejected_and_the_reason_is_kept() -> None:
    def fails(asked: Asked) -> bool:
        return len(asked.body["prompt"]) == 5

    with fake_server(models=models("m"), completions=refusing(fails, completion)) as server:
        record = run(server, some(3))
    assert record.requests.status.tolist() == [0, RequestStatus.REJECTED, 0]
    assert np.isnan(record.requests.first_token[1])
    (reason,) = record.facts["errors"].items()  # type: ignore[attr-defined]
    assert reason[0].endswith("answered 400: no")
    assert reason[1] == 1


def test_a_stream_that_breaks_off_is_a_failure() -> None:
    def broken(asked: Asked) -> Stream:
        return Stream([chunk(" x"), None]) if len(asked.body["prompt"]) == 5 else completion(asked)

    with fake_server(models=models("m"), completions=broken) as server:
        record = run(server, some(2))
    assert record.requests.status.tolist() == [0, RequestStatus.REJECTED]


def test_a_count_that_is_none_is_a_failure() -> None:
    def miscounted(asked: Asked) -> Stream:
        if len(asked.body["prompt"]) != 5:
            return completion(asked)
        return Stream([chunk(" x", finish="length"), usage(5, -3), DONE])

    with fake_server(models=models("m"), completions=miscounted) as server:
        record = run(server, some(2))
    assert record.requests.status.tolist() == [0, RequestStatus.REJECTED]


def test_what_a_workload_does_wrong_when_a_request_has_ended_is_told_as_it_is() -> None:
    with (
        fake_server(models=models("m"), completions=completion) as server,
        pytest.raises(PluginError, match="a follow-up of request 0 is a str"),
    ):
        run(server, some(1), follow_ups=lambda request, end: ["more"])  # type: ignore[list-item]


def test_when_every_request_fails_there_is_no_result() -> None:
    def fails(asked: Asked) -> bool:
        return len(asked.body["prompt"]) in (4, 5) and asked.body["max_tokens"] == 3

    with (
        fake_server(models=models("m"), completions=refusing(fails, completion)) as server,
        pytest.raises(TokenyardError, match=r"none of 2 requests succeeded; 2 of them: .*400: no"),
    ):
        run(server, some(2))


def test_a_request_past_its_deadline_is_left_and_counted_as_aborted() -> None:
    def slow(asked: Asked) -> Stream:
        if asked.body["max_tokens"] == 3 and len(asked.body["prompt"]) == 4:
            return Stream([chunk(" x"), 60.0, DONE])
        return completion(asked)

    late = WorkloadRequest(arrival=0.0, num_prompt_tokens=4, num_output_tokens=3, deadline=0.2)
    with fake_server(models=models("m"), completions=slow) as server:
        record = run(server, [late, *some(2)[1:]])
    assert record.requests.status.tolist() == [RequestStatus.ABORTED, RequestStatus.FINISHED]
    assert record.requests.finish[0] >= 0.2
    assert record.facts["errors"] == {}


def test_a_closed_loop_has_as_many_requests_open_as_it_is_told() -> None:
    with fake_server(models=models("m"), completions=completion) as server:
        table = run(server, some(6), "workload.arrivals=closed_loop", "workload.concurrency=2").requests
    assert table.status.tolist() == [0] * 6
    assert table.arrival[:2].tolist() == [0.0, 0.0]
    begun = [(table.arrival <= moment).sum() for moment in table.arrival]
    ended = [(table.finish <= moment).sum() for moment in table.arrival]
    assert all(one - other <= 2 for one, other in zip(begun, ended, strict=True))


def next_turn(request: WorkloadRequest, end: float) -> Sequence[WorkloadRequest]:
    content = [*(request.content or ()), Segment(OUTPUT, 3), Segment(5, 2)]
    turn = WorkloadRequest(
        arrival=end, num_prompt_tokens=9, num_output_tokens=3, session=request.session, content=content
    )
    return [turn] if len(content) == 3 else ()


FIRST_TURN = WorkloadRequest(
    arrival=0.0, num_prompt_tokens=4, num_output_tokens=3, session="s", content=[Segment(1, 4)]
)


def test_the_next_turn_has_the_answer_in_its_prompt_as_ids() -> None:
    with fake_server(models=models("m"), completions=completion) as server:
        record = run(server, [FIRST_TURN], follow_ups=next_turn, has_content=True)
        first, second = (body["prompt"] for body in sent(server)[NUM_BEFORE:])
    assert isinstance(first, list)
    assert isinstance(second, list)
    assert second[:7] == [*first, 40, 41, 42]
    assert record.requests.arrival[1] >= record.requests.finish[0]


def test_the_next_turn_has_the_answer_in_its_prompt_as_text() -> None:
    def takes_ids(asked: Asked) -> bool:
        return not isinstance(asked.body["prompt"], str)

    with fake_server(models=models("m"), completions=refusing(takes_ids, completion)) as server:
        run(server, [FIRST_TURN], follow_ups=next_turn, has_content=True)
        first, second = (str(body["prompt"]) for body in sent(server)[-2:])
    assert second.startswith(f"{first} x x x ")


def test_a_server_that_cannot_be_used_is_one_error() -> None:
    with fake_server(models=models("m"), completions=lambda asked: Reply({"error": {"message": "who"}}, 401)) as server:
        with pytest.raises(RemoteError, match="refused the API key"):
            run(server, some(1))
        url = server.url
    with pytest.raises(RemoteError, match="cannot connect"):
        run(url, some(1))
    with pytest.raises(UserError, match=r"experiment\.target takes the URL of a server"):
        run("nowhere", some(1))


def test_our_own_server_serves_a_workload_with_its_hints(tiny_llama_dir: Path) -> None:
    requests = some(4, client="a", session="s", priority=1, deadline=60.0)
    with running_server(model=tiny_llama_dir) as server:
        record = run(server.url, requests)
    assert record.requests.status.tolist() == [0] * 4
    assert record.requests.output.tolist() == [3] * 4


def test_a_server_that_falls_silent_in_an_answer_is_left_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenyard.experiments.remote._SILENCE_SECONDS", 0.2)
    asked_before = [0]

    def answer(asked: Asked) -> Stream:
        asked_before[0] += 1
        return completion(asked) if asked_before[0] <= NUM_BEFORE + 1 else Stream([chunk(" x", ids=[40]), 60.0, DONE])

    with fake_server(models=models("m"), completions=answer) as server:
        record = run(server, some(2))
    assert sorted(record.requests.status.tolist()) == [RequestStatus.FINISHED, RequestStatus.REJECTED]


@pytest.mark.parametrize("url", ["127.0.0.1:80", "ftp://127.0.0.1", "''", "http://"])
def test_a_target_that_is_no_server_s_url_is_refused_before_anything_runs(url: str) -> None:
    with pytest.raises(UserError, match=r"experiment\.target takes the URL of a server"):
        planted(PlantedWorkload(some(1), None, has_content=False), [f"experiment.target={url}"])
