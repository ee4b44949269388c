"""The client of OpenAI's API: events in any pieces, and every failure of a server in one line."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest
from fake_openai import DONE, FakeServer, Reply, Stream, chunk, event, fake_server, models, usage
from hypothesis import given
from hypothesis import strategies as st
from tokenyard.bench.server_facts import parse_counters
from tokenyard.client.chunks import Chunk
from tokenyard.client.connection import Connection
from tokenyard.client.endpoint import Endpoint, find_endpoint
from tokenyard.client.events import MAX_EVENT_BYTES, EventParser
from tokenyard.client.failures import RemoteError
from tokenyard.client.models import choose_model, list_models
from tokenyard.errors import UserError

ResultT = TypeVar("ResultT")
PATH = "/v1/completions"


def talk(
    server: FakeServer | str, what: Callable[[Connection], Awaitable[ResultT]], timeout: float | None = 30
) -> ResultT:
    async def run() -> ResultT:
        endpoint = Endpoint(server if isinstance(server, str) else server.url, "secret")
        async with Connection(endpoint, timeout=timeout) as connection:
            return await what(connection)

    return asyncio.run(run())


async def chunks_of(connection: Connection) -> list[Chunk]:
    return [chunk async for chunk in connection.stream(PATH, b"{}")]


def failure(server: FakeServer | str, timeout: float | None = 30) -> RemoteError:
    with pytest.raises(RemoteError) as caught:
        talk(server, chunks_of, timeout)
    assert len(str(caught.value).splitlines()) == 1
    return caught.value


# ---- Events ---------------------------------------------------------------------------------------------------------

LINES = st.lists(st.lists(st.text("ab :é", max_size=6), min_size=1, max_size=3), max_size=5)


@given(LINES, st.sampled_from(["\n", "\r\n"]), st.lists(st.integers(0, 200), max_size=20))
def test_events_are_the_same_in_whatever_pieces_they_come(events: list[list[str]], end: str, cuts: list[int]) -> None:
    text = "".join(
        ": comment" + end + "".join(f"data: {line}{end}" for line in one) + "id: 3" + end * 2 for one in events
    )
    data = text.encode()
    places = sorted({min(cut, len(data)) for cut in cuts})
    parser, found = EventParser(), []
    for begin, stop in zip([0, *places], [*places, len(data)], strict=True):
        found += parser.feed(data[begin:stop])
    assert found == ["\n".join(one).encode() for one in events]


@pytest.mark.parametrize("end", [b"", b"\n"], ids=["one line", "many lines"])
def test_an_event_without_end_is_refused_in_time(end: bytes) -> None:
    parser, piece = EventParser(), b"data: " + b"x" * 2**20 + end

    def feed_all() -> None:
        for _ in range(MAX_EVENT_BYTES // 2**20 + 1):
            parser.feed(piece)

    with pytest.raises(ValueError, match="an event of more than"):
        feed_all()


# ---- Endpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("http://h", "http://h"),
        ("http://h:8/v1", "http://h:8"),
        ("http://h:8/v1/", "http://h:8"),
        ("https://h/prefix/v1/", "https://h/prefix"),
        ("http://[::1]:8/", "http://[::1]:8"),
        ("http://h/v12", "http://h/v12"),
    ],
)
def test_a_url_is_taken_with_and_without_v1(url: str, root: str) -> None:
    assert find_endpoint(url, "--url", {}) == Endpoint(root)


@pytest.mark.parametrize("url", ["", "h:8000", "ftp://h", "http://", "http://h:x", "http://h:99999", "http://[", "//h"])
def test_what_is_no_url_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(UserError, match=r"--url takes the URL of a server, such as http://127\.0\.0\.1:8000"):
        find_endpoint(url, "--url", {})


@pytest.mark.parametrize("url", ["http://u:p@h", "http://h/?key=1", "http://h/#x"])
def test_a_key_has_no_place_in_a_url(url: str) -> None:
    with pytest.raises(UserError, match="set TOKENYARD_API_KEY or OPENAI_API_KEY for a key"):
        find_endpoint(url, "--url", {})


def test_the_key_comes_from_the_environment_alone() -> None:
    both = {"TOKENYARD_API_KEY": " mine ", "OPENAI_API_KEY": "theirs"}
    assert find_endpoint("http://h", "--url", both).api_key == "mine"
    assert find_endpoint("http://h", "--url", {"OPENAI_API_KEY": "theirs"}).headers == {
        "Authorization": "Bearer theirs"
    }
    assert find_endpoint("http://h", "--url", {"OPENAI_API_KEY": ""}).headers == {}
    with pytest.raises(UserError, match="TOKENYARD_API_KEY has characters"):
        find_endpoint("http://h", "--url", {"TOKENYARD_API_KEY": "a\nb"})


@pytest.mark.parametrize(
    ("root", "is_local"),
    [("http://127.0.0.1:1", True), ("http://[::1]", True), ("http://localhost:1", True), ("http://10.0.0.1", False)],
)
def test_no_proxy_comes_between_processes_of_one_machine(root: str, is_local: bool) -> None:
    assert Endpoint(root).is_local is is_local


# ---- Answers --------------------------------------------------------------------------------------------------------


def test_a_stream_gives_its_chunks_and_its_usage() -> None:
    parts = [chunk("a"), ": ping\n\n" + chunk("b", ids=[3, 4])[:10], chunk("b", ids=[3, 4])[10:], usage(5, 3), DONE]
    with fake_server(completions=lambda asked: Stream(parts)) as server:
        first, second, last = talk(server, chunks_of)
    assert (first.choices[0].added, second.choices[0].token_ids) == ("a", [3, 4])
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (5, 3)
    assert server.asked[0].headers["Authorization"] == "Bearer secret"


def test_connections_are_used_again() -> None:
    async def several(connection: Connection) -> set[object]:
        for _ in range(5):
            await chunks_of(connection)
        return set(connection._session.connector._acquired | set(connection._session.connector._conns))  # type: ignore

    with fake_server(completions=lambda asked: Stream([chunk("a", finish="stop"), DONE])) as server:
        assert len(talk(server, several)) == 1


SLOW: list[Any] = [0.01, chunk("b")] * 3000


def test_leaving_a_stream_ends_the_request() -> None:
    async def leave(connection: Connection) -> None:
        async with contextlib.aclosing(connection.stream(PATH, b"{}")) as chunks:
            async for _ in chunks:
                break

    with fake_server(completions=lambda asked: Stream([chunk("a"), *SLOW])) as server:
        talk(server, leave)
    assert server.num_aborted == 1


def test_a_refused_connection_names_the_server() -> None:
    assert str(failure("http://127.0.0.1:9")) == (
        "cannot connect to http://127.0.0.1:9: Connection refused; does the server run there?"
    )


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"error": {"message": "too\nlong", "code": 400}}, "too long"),
        ({"error": "plain"}, "plain"),
        ({"detail": "missing"}, "missing"),
        ({"message": "bad"}, "bad"),
        ({}, "no message"),
        ("<html>\x1b[31m gateway", "<html> [31m gateway"),
        ("", "no message"),
        ("[" * 100_000, "[" * 497 + "..."),
        ({"error": {"message": "x" * 9000}}, "x" * 497 + "..."),
    ],
)
def test_an_error_of_the_server_is_told_in_a_line(body: object, said: str) -> None:
    with fake_server(completions=lambda asked: Reply(body, 400)) as server:
        error = failure(server)
    assert str(error) == f"{server.url} answered 400: {said}"
    assert (error.status, error.exit_code) == (400, 2)


def test_a_refused_key_says_where_keys_come_from() -> None:
    with fake_server(completions=lambda asked: Reply({"error": {"message": "who are you?"}}, 401)) as server:
        error = failure(server)
    assert str(error) == (
        f"{server.url} refused the API key (401: who are you?); "
        "set TOKENYARD_API_KEY or OPENAI_API_KEY to a key of this server"
    )


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([chunk("a"), event({"error": {"message": "engine died"}}), DONE], "middle of an answer: engine died"),
        ([chunk("a"), None], "broke off in the middle of an answer"),
        ([chunk("a")], "broke off in the middle of an answer"),
        ([chunk("a"), "data: {nonsense\n\n"], "no answer of"),
        ([chunk("a"), event({"choices": 3})], "no answer of"),
    ],
    ids=["error event", "hangs up", "ends early", "no JSON", "other JSON"],
)
def test_a_stream_that_fails_is_an_error(parts: list[str | None], said: str) -> None:
    with fake_server(completions=lambda asked: Stream(parts)) as server:
        error = failure(server)
    assert said in str(error)
    assert error.exit_code == 1


def test_a_stream_that_ends_after_its_finish_reason_is_whole() -> None:
    with fake_server(completions=lambda asked: Stream([chunk("a", finish="stop")])) as server:
        assert len(talk(server, chunks_of)) == 1


def test_a_server_that_never_answers_is_left_in_time() -> None:
    with fake_server(completions=lambda asked: Stream([60.0])) as server:
        assert "did not answer in time" in str(failure(server, timeout=0.2))


def test_redirects_are_not_followed() -> None:
    with fake_server(completions=lambda asked: Reply("", 307, {"Location": "/other"})) as server:
        assert failure(server).status == 307
    assert [asked.path for asked in server.asked] == [PATH]


# ---- Models and counters --------------------------------------------------------------------------------------------


def test_models_are_asked_for_until_the_server_has_started() -> None:
    answers = iter([Reply({"error": {"message": "loading"}}, 503)] * 2 + [models("m", "n")(None)])  # type: ignore
    with fake_server(models=lambda asked: next(answers)) as server:
        with pytest.raises(RemoteError, match="503: loading"):
            talk(server, list_models)
        assert talk(server, lambda connection: list_models(connection, 30)) == ["m", "n"]


def test_the_first_model_is_the_default_and_an_unknown_one_is_refused() -> None:
    assert choose_model(["a", "b"], None, "S") == "a"
    assert choose_model(["a", "b"], "b", "S") == "b"
    assert choose_model([], "b", "S") == "b"  # a server that does not tell
    with pytest.raises(UserError, match="S has no model 'c'; there is: a, b"):
        choose_model(["a", "b"], "c", "S")
    with pytest.raises(UserError, match="S tells no model in /v1/models; give --model"):
        choose_model([], None, "S")


def test_counters_are_added_up_over_their_labels() -> None:
    text = (
        "# TYPE vllm:prompt_tokens counter\n"
        'vllm:prompt_tokens_total{model_name="a"} 10.0\nvllm:prompt_tokens_total{model_name="b"} 5.0\n'
        'vllm:prompt_tokens_created{model_name="a"} 1e9\n'
        "# TYPE vllm:generation_tokens counter\nvllm:generation_tokens_total 7.0\n"
        '# TYPE vllm:request_success counter\nvllm:request_success_total{finished_reason="length"} 2.0\n'
        'vllm:request_success_total{finished_reason="stop"} 1.0\n'
    )
    assert parse_counters(text) == {"prompt_tokens": 15, "generation_tokens": 7, "requests": 3}
    assert parse_counters("up 1\n") is None
    assert parse_counters("<html>") is None
