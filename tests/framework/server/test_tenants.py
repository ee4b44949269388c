"""Clients with different keys: what the scheduler is told of them, and that they share no prefix cache."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from http_server import ThreadServer, running_server
from http_streams import COMPLETIONS, ask, eventually, paused, run
from tokenyard.config import NoOptions
from tokenyard.descriptors import PolicyDescriptor
from tokenyard.interfaces import RequestView, SchedulerView, SchedulingPolicy
from tokenyard.kv_cache import PagedKVCacheManager
from tokenyard.testing import catalogue_with

CHAT = "/v1/chat/completions"
KEYS = ("first", "second")
TOKENS = [5, 6, 7, 8] * 16
BODY: dict[str, object] = {"prompt": TOKENS, "max_tokens": 4, "ignore_eos": True, "temperature": 0}


def as_key(number: int, **headers: str) -> dict[str, str]:
    return {
        "Authorization": f"Bearer {KEYS[number]}",
        **{f"X-Tokenyard-{name}": value for name, value in headers.items()},
    }


def cached(answer: tuple[int, dict[str, Any], dict[str, str]]) -> int:
    status, body, _ = answer
    assert status == 200, body
    tokens: int = body["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


@pytest.fixture(scope="module")
def salted(tiny_llama_dir: Path) -> Iterator[ThreadServer]:
    overrides = ("server.salt_by_api_key=true", "kv_cache.block_size=4", "kv_cache.num_blocks=64")
    with running_server(overrides, model=tiny_llama_dir, api_keys=KEYS) as running:
        yield running


def test_g2_two_keys_share_no_prefix_and_one_key_shares_its_own(salted: ThreadServer) -> None:
    async def main() -> None:
        assert cached(await ask(salted.url, BODY, headers=as_key(0))) == 0
        assert cached(await ask(salted.url, BODY, headers=as_key(0))) > 0
        assert cached(await ask(salted.url, BODY, headers=as_key(1))) == 0
        assert cached(await ask(salted.url, BODY, headers=as_key(1))) > 0
        assert cached(await ask(salted.url, {**BODY, "cache_salt": "own"}, headers=as_key(0))) == 0

    run(main())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {**BODY, "prompt": "the hi the he " * 6}),
        (COMPLETIONS, {**BODY, "prompt": ["the he hi " * 8, "he the hi " * 8]}),
        (COMPLETIONS, {**BODY, "prompt": [9, 8, 7] * 20, "n": 3, "temperature": 1}),
        (CHAT, {"messages": [{"role": "user", "content": "hi the he " * 8}], "max_tokens": 4}),
        (CHAT, {"messages": [{"role": "user", "content": "he hi the " * 8}], "max_tokens": 4, "n": 2}),
    ],
    ids=["text", "a batch", "n", "chat", "chat with n"],
)
def test_g3_every_endpoint_keeps_the_salt(salted: ThreadServer, path: str, body: dict[str, object]) -> None:
    async def main() -> None:
        assert await salted.llm.reset_prefix_cache()
        for number in (0, 1):
            assert cached(await ask(salted.url, body, path, as_key(number))) == 0
            assert cached(await ask(salted.url, body, path, as_key(number))) > 0

    run(main())


def test_g3_requests_that_are_resumed_after_a_preemption_look_up_with_their_salt(
    salted: ThreadServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    salts = []
    lookup = PagedKVCacheManager.lookup

    def record(self: PagedKVCacheManager, request: Any) -> Any:
        salts.append(request.cache_salt)
        return lookup(self, request)

    async def main() -> None:
        before = salted.llm._link.stats().num_preemptions
        body = {**BODY, "max_tokens": 100}
        with monkeypatch.context() as patched:
            patched.setattr(PagedKVCacheManager, "lookup", record)
            await asyncio.gather(*(ask(salted.url, body, headers=as_key(number)) for number in (0, 1, 0, 1)))
        assert salted.llm._link.stats().num_preemptions > before

    run(main())
    assert len(set(salts)) == 2
    assert None not in salts


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_salt_of_the_bodys_own_separates_without_keys(server: ThreadServer, path: str) -> None:
    what = {"prompt": TOKENS} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "hi the " * 20}]}
    body = {**what, "max_tokens": 2}

    async def main() -> None:
        assert cached(await ask(server.url, {**body, "cache_salt": "a"}, path)) == 0
        assert cached(await ask(server.url, {**body, "cache_salt": "a"}, path)) > 0
        assert cached(await ask(server.url, {**body, "cache_salt": "b"}, path)) == 0

    run(main())


# ---- What a policy sees ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ticket:
    """What the recording policy may be told."""

    weight: float = 1.0
    job_class: str = "none"


@dataclass(frozen=True)
class Seen:
    priority: int
    client_id: str | None
    session_id: str | None
    seconds: float | None  # from arrival to deadline
    ttft: float | None
    metadata: dict[str, object]


class Recording(SchedulingPolicy):
    """The greatest weight first; keeps what it sees of each request."""

    seen: list[Seen]

    def __init__(self) -> None:
        self.seen = []

    def waiting_key(self, request: RequestView, view: SchedulerView) -> object:
        level, deadline = request.service_level, request.deadline
        self.seen.append(
            Seen(
                request.priority,
                request.client_id,
                request.session_id,
                None if deadline is None else deadline - request.arrival_time,
                None if level is None else level.ttft,
                dict(request.metadata),
            )
        )
        weight = request.metadata["weight"]
        assert isinstance(weight, float)
        return -weight


@pytest.fixture(scope="module")
def policy() -> Recording:
    return Recording()


@pytest.fixture(scope="module")
def recording(tiny_llama_dir: Path, policy: Recording) -> Iterator[ThreadServer]:
    descriptor: PolicyDescriptor[NoOptions] = PolicyDescriptor(
        name="recording", api_version=(1, 3), factory=lambda options, context: policy, metadata_type=Ticket
    )
    overrides = ("scheduler=recording", "scheduler.max_num_seqs=1")
    with running_server(
        overrides, model=tiny_llama_dir, api_keys=KEYS, catalogue=catalogue_with(descriptor)
    ) as running:
        yield running


def test_the_policy_sees_what_headers_and_body_say(recording: ThreadServer, policy: Recording) -> None:
    headers = as_key(
        0,
        Priority="5",
        Session="talk",
        Deadline="50",
        Client="me",
        **{"Slo-Ttft": "0.5", "Weight": "2", "Job-Class": "a"},
    )
    assert run(ask(recording.url, BODY, headers=headers))[0] == 200
    seen = policy.seen[-1]
    assert (seen.priority, seen.client_id, seen.session_id, seen.ttft) == (5, "me", "talk", 0.5)
    assert seen.seconds == pytest.approx(50, abs=5)
    assert seen.metadata == {"weight": 2.0, "job_class": "a"}
    body = {
        **BODY,
        "priority": 6,
        "user": "you",
        "session_id": "other",
        "scheduling": {"weight": 3, "slo": {"ttft": 1}},
    }
    assert run(ask(recording.url, body, headers=headers))[0] == 200
    seen = policy.seen[-1]
    assert (seen.priority, seen.client_id, seen.session_id, seen.ttft) == (6, "you", "other", 1)
    assert seen.metadata == {"weight": 3.0, "job_class": "a"}


def test_the_key_names_the_client_where_nothing_else_does(recording: ThreadServer, policy: Recording) -> None:
    clients = []
    for number in (0, 1, 0):
        assert run(ask(recording.url, BODY, headers=as_key(number)))[0] == 200
        clients.append(policy.seen[-1].client_id)
    assert clients[0] == clients[2] != clients[1]
    assert not {"first", "second", None} & set(clients)


def test_the_policy_orders_what_waits_by_it(recording: ThreadServer) -> None:
    order: list[int] = []

    async def one(weight: int) -> None:
        body = {**BODY, "scheduling": {"weight": weight}}
        assert (await ask(recording.url, body, headers=as_key(0)))[0] == 200
        order.append(weight)

    async def main() -> None:
        with paused(recording):
            asked = [asyncio.create_task(one(weight)) for weight in (2, 5, 1, 4, 3)]
            await eventually(lambda: recording.llm.load.num_unfinished == 5, "never queued")
        await asyncio.gather(*asked)

    run(main())
    assert order == [5, 4, 3, 2, 1]


def test_hints_that_the_policy_does_not_have_are_refused_by_name(recording: ThreadServer) -> None:
    status, body, _ = run(ask(recording.url, {**BODY, "scheduling": {"wieght": 1}}, headers=as_key(0)))
    assert (status, body["error"]["param"]) == (400, "scheduling")
    assert "did you mean 'weight'" in body["error"]["message"]
