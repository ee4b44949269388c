"""The official `openai` package against this server, with its strict parsing: calls, errors, transports."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from chat_calls import EOS, HI, SCRIPTED, installed, say
from http_server import ThreadServer, running_server
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk
from openai.types.chat.chat_completion_message_param import ChatCompletionMessageParam

KEY = "secret-key"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "extra_body": {"ignore_eos": True}}
HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
Call = Callable[[openai.OpenAI], object]


@pytest.fixture(scope="module")
def server(tiny_llama_dir: Path) -> Iterator[ThreadServer]:
    overrides = ["server.served_model_name=[tiny]", "server.max_body_bytes=20000", SCRIPTED]
    with installed("script"), running_server(overrides, model=tiny_llama_dir, api_keys=[KEY]) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: ThreadServer) -> Iterator[openai.OpenAI]:
    with strict(server.url) as made:
        yield made


def strict(url: str, *, api_key: str = KEY, http_client: httpx2.Client | None = None) -> openai.OpenAI:
    """A client that refuses answers which are not what OpenAI's types say."""
    return openai.OpenAI(
        base_url=f"{url}/v1",
        api_key=api_key,
        max_retries=0,
        timeout=60,
        http_client=http_client,
        _strict_response_validation=True,
    )


def complete_chat(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": "tiny", "messages": HELLO, **GREEDY, **fields})


def text_of(chunks: list[ChatCompletionChunk], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


# Calls


def test_a_chat(client: openai.OpenAI) -> None:
    answer = complete_chat(client, n=2, logprobs=True, top_logprobs=3, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.finish_reason == "length"
        assert choice.message.role == "assistant"
        assert len(choice.logprobs.content) == 8
        assert all(len(entry.top_logprobs) == 3 for entry in choice.logprobs.content)
    assert answer.usage.completion_tokens == 16
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0
    assert (answer.model, answer.object) == ("tiny", "chat.completion")


def test_a_streamed_chat(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"n": 2, "logprobs": True, "top_logprobs": 2}
    whole = complete_chat(client, **fields)
    with complete_chat(client, stream=True, stream_options={"include_usage": True}, **fields) as stream:
        chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    for choice in whole.choices:
        assert text_of(chunks, choice.index) == choice.message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_the_clients_own_accumulator_of_a_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="tiny", messages=HELLO, stream_options={"include_usage": True}, extra_body=say(HI, HI, EOS)
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert kinds.count("content.delta") >= 2
    assert kinds.count("content.done") == 1
    assert final.choices[0].message.content == "hihi"
    assert final.usage is not None
    assert final.usage.completion_tokens == 3


def test_completions_of_several_prompts(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=["hi", "the"], n=2, logprobs=2, **GREEDY)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 32
    assert all(choice.logprobs and len(choice.logprobs.tokens or []) == 8 for choice in answer.choices)


def test_a_streamed_completion(server: ThreadServer, client: openai.OpenAI) -> None:
    """OpenAI's type has no null finish reason, which its own API sends before the end: all else is parsed strictly."""
    whole = client.completions.create(model="tiny", prompt="hi", **GREEDY)
    with server.client.completions.create(model="tiny", prompt="hi", stream=True, **GREEDY) as stream:
        chunks = [chunk.model_dump() for chunk in stream]
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]
    for chunk in chunks:
        for choice in chunk["choices"]:
            Completion.model_validate({**chunk, "choices": [{**choice, "finish_reason": "length"}]}, strict=True)
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == whole.choices[0].text


def test_completions_of_token_ids_and_with_an_echo(client: openai.OpenAI) -> None:
    """With logprobs too, the first token has null, which OpenAI's type does not have and lm-eval needs."""
    answer = client.completions.create(model="tiny", prompt=[HI, HI], echo=True, **GREEDY)
    assert answer.choices[0].text.startswith("hihi")


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "tokenyard"


def test_fields_beyond_openais_go_into_extra_body(client: openai.OpenAI) -> None:
    body = {**say(HI, HI, EOS), "top_k": 5, "min_p": 0.1, "return_token_ids": True, "priority": 1}
    answer = client.chat.completions.create(model="tiny", messages=HELLO, extra_body=body)
    assert answer.choices[0].message.content == "hihi"
    assert answer.choices[0].model_extra is not None
    assert answer.choices[0].model_extra["token_ids"] == [HI, HI, EOS]


def test_the_raw_response_has_the_requests_id(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="tiny", messages=HELLO, extra_headers={"X-Request-Id": "mine-1"}, **GREEDY
    )
    assert raw.headers["x-request-id"] == raw.request_id == "mine-1"
    assert raw.headers["content-type"] == "application/json"
    assert raw.parse().choices[0].finish_reason == "length"
    other = client.chat.completions.with_raw_response.create(model="tiny", messages=HELLO, **GREEDY)
    assert other.request_id
    assert other.request_id != "mine-1"


def test_a_streaming_response_is_read_as_it_comes(client: openai.OpenAI) -> None:
    with client.chat.completions.with_streaming_response.create(
        model="tiny", messages=HELLO, stream=True, **GREEDY
    ) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert all(line.startswith("data: ") for line in lines)


def test_parameters_as_the_client_sends_them_when_they_are_left_out(client: openai.OpenAI) -> None:
    """`None` goes over the wire as null where OpenAI allows that, and `omit` not at all."""
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi"}],
        max_completion_tokens=2,
        frequency_penalty=None,
        logit_bias=None,
        logprobs=None,
        n=None,
        presence_penalty=None,
        seed=None,
        stop=None,
        stream=None,
        temperature=None,
        top_p=None,
        tools=openai.omit,
        user="me",
        response_format={"type": "text"},
        metadata={"a": "b"},
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 2


# Errors


@pytest.mark.parametrize(
    ("call", "kind", "status", "param"),
    [
        (lambda client: complete_chat(client, temperature=9), openai.BadRequestError, 400, "temperature"),
        (lambda client: complete_chat(client, n=0, stream=True), openai.BadRequestError, 400, "n"),
        (lambda client: complete_chat(client, tools=[{}]), openai.BadRequestError, 400, "tools"),
        (lambda client: client.completions.create(model="tiny", prompt=""), openai.BadRequestError, 400, "prompt"),
        (lambda client: complete_chat(client, model="x"), openai.NotFoundError, 404, "model"),
        (lambda client: client.models.retrieve("x"), openai.NotFoundError, 404, "model"),
        (lambda client: complete_chat(client, user="u" * 30000), openai.APIStatusError, 413, None),
        (
            lambda client: complete_chat(client, extra_headers={"Content-Type": "text/plain"}),
            openai.APIStatusError,
            415,
            None,
        ),
        (
            lambda client: complete_chat(client, extra_body={"extra_args": {"fail_after": 2}}),
            openai.InternalServerError,
            500,
            None,
        ),
    ],
    ids=["400", "stream", "tools", "prompt", "model", "card", "413", "415", "500"],
)
def test_errors_have_the_clients_own_type(
    client: openai.OpenAI, call: Call, kind: type[openai.APIStatusError], status: int, param: str | None
) -> None:
    with pytest.raises(kind) as caught:
        call(client)
    assert caught.value.status_code == status
    assert caught.value.param == param
    assert caught.value.request_id
    assert isinstance(caught.value.body, dict)
    assert set(caught.value.body) == {"message", "type", "param", "code"}
    assert complete_chat(client).choices  # the server is none the worse for it


@pytest.mark.parametrize("key", ["wrong", "", "secret-ke", "secret-key2"])
def test_a_wrong_key_is_an_authentication_error(server: ThreadServer, key: str) -> None:
    with strict(server.url, api_key=key or "-") as other, pytest.raises(openai.AuthenticationError):
        other.models.list()


def test_an_overloaded_server_is_an_internal_server_error_with_a_time_to_wait(tiny_llama_dir: Path) -> None:
    """503, which the client retries by itself unless told not to."""
    overrides = ["server.max_num_queued_reqs=1"]
    with running_server(overrides, model=tiny_llama_dir) as running, strict(running.url) as client:
        name = running.service.model_names[0]
        endless: dict[str, Any] = {"extra_body": {"ignore_eos": True}, "stream": True}
        with client.chat.completions.create(model=name, messages=HELLO, **endless) as stream:
            next(iter(stream))
            with pytest.raises(openai.InternalServerError) as caught:
                client.chat.completions.create(model=name, messages=HELLO)
        assert caught.value.status_code == 503
        assert int(caught.value.response.headers["retry-after"]) >= 1
        running.wait_until_idle()
        assert client.chat.completions.create(model=name, messages=HELLO, max_tokens=1).choices


def test_a_client_that_waits_no_longer_gets_its_timeout_and_its_request_ends(
    server: ThreadServer, client: openai.OpenAI
) -> None:
    with pytest.raises(openai.APITimeoutError):
        complete_chat(client.with_options(timeout=0.001), max_tokens=200)
    server.wait_until_idle()


def test_a_stream_that_breaks_raises_in_the_middle(server: ThreadServer, client: openai.OpenAI) -> None:
    """API-13: what came before is delivered."""
    found: list[ChatCompletionChunk] = []
    stream = complete_chat(client, stream=True, extra_body={"extra_args": {"say": [HI] * 9, "fail_after": 3}})
    with stream, pytest.raises(openai.APIError) as caught:
        found.extend(stream)
    assert text_of(found) == "hi" * 3
    assert not isinstance(caught.value, openai.APIStatusError)
    assert caught.value.type == "InternalServerError"
    server.wait_until_idle()


OTHER_ENDPOINTS: dict[str, Call] = {
    "responses": lambda client: client.responses.create(model="tiny", input="hi"),
    "embeddings": lambda client: client.embeddings.create(model="tiny", input="hi"),
    "speech": lambda client: client.audio.speech.create(model="tiny", input="hi", voice="alloy"),
    "transcriptions": lambda client: client.audio.transcriptions.create(model="tiny", file=("a.wav", b"x")),
    "files": lambda client: client.files.list(),
    "upload": lambda client: client.files.create(file=("a", b"x"), purpose="batch"),
    "batches": lambda client: client.batches.list(),
    "moderations": lambda client: client.moderations.create(input="hi"),
    "images": lambda client: client.images.generate(prompt="hi"),
    "fine-tuning": lambda client: client.fine_tuning.jobs.list(),
    "vector stores": lambda client: client.vector_stores.list(),
    "stored chats": lambda client: client.chat.completions.list(),
    "stored chat": lambda client: client.chat.completions.retrieve("chatcmpl-1"),
}


@pytest.mark.parametrize("name", sorted(OTHER_ENDPOINTS))
def test_endpoints_that_are_not_there_are_not_found(client: openai.OpenAI, name: str) -> None:
    """404 with an error object; 405 where another method of the path is there, 415 for an upload, of a form."""
    with pytest.raises(openai.APIStatusError) as caught:
        OTHER_ENDPOINTS[name](client)
    expected = {"stored chats": 405}.get(name, 404)
    assert caught.value.status_code == expected
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["code"] == expected


# Transports


def test_the_client_over_a_unix_socket(tiny_llama_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "s"
    overrides = ["server.served_model_name=[tiny]", f"server.uds={path}"]
    transport = httpx2.HTTPTransport(uds=str(path))
    with (
        running_server(overrides, model=tiny_llama_dir),
        strict("http://anything", http_client=openai.DefaultHttpx2Client(transport=transport)) as client,
    ):
        whole = complete_chat(client).choices[0].message.content
        with complete_chat(client, stream=True) as stream:
            assert text_of(list(stream)) == whole
    assert not path.exists()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(certificate, key) for 127.0.0.1, signed by itself."""
    if shutil.which("openssl") is None:
        pytest.skip("makes a certificate with the command openssl")
    folder = tmp_path_factory.mktemp("tls")
    files = folder / "cert.pem", folder / "key.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=test -addext subjectAltName=IP:127.0.0.1"
    subprocess.run([*command.split(), "-out", files[0], "-keyout", files[1]], check=True, capture_output=True)
    return files


@pytest.mark.parametrize("asks_for_certificate", [False, True])
def test_the_client_over_tls(tiny_llama_dir: Path, certificate: tuple[Path, Path], asks_for_certificate: bool) -> None:
    """With server.ssl_ca_certs a client without a certificate is not let in."""
    cert, key = certificate
    overrides = ["server.served_model_name=[tiny]", f"server.ssl_certfile={cert}", f"server.ssl_keyfile={key}"]
    overrides += [f"server.ssl_ca_certs={cert}"] if asks_for_certificate else []
    bare, known = (ssl.create_default_context(cafile=str(cert)) for _ in range(2))
    known.load_cert_chain(cert, key)
    with running_server(overrides, model=tiny_llama_dir) as running:
        assert running.url.startswith("https://127.0.0.1:")
        with strict(running.url, http_client=openai.DefaultHttpx2Client(verify=known)) as client:
            whole = complete_chat(client).choices[0].message.content
            with complete_chat(client, stream=True) as stream:
                assert text_of(list(stream)) == whole
        with strict(running.url, http_client=openai.DefaultHttpx2Client(verify=bare)) as client:
            if not asks_for_certificate:
                assert complete_chat(client).choices
                return
            with pytest.raises(openai.APIConnectionError):
                complete_chat(client)
        with strict(running.url) as client, pytest.raises(openai.APIConnectionError):
            complete_chat(client)  # whose certificates do not have this one
