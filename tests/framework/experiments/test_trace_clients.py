"""`workload.clients`: clients for workloads that name none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tokenyard.errors import ConfigError
from tokenyard.experiments.clients import with_clients
from tokenyard.interfaces.workload import Workload, WorkloadRequest
from trace_workloads import preset, trace_requests, trace_workload, write_jsonl, write_steady


class Conversations(Workload):
    """Each request is followed by one of its own, which it knows by the object itself."""

    def __init__(self, *, sessions: bool) -> None:
        self.sent: list[WorkloadRequest] = []
        self._sessions = sessions

    def requests(self) -> Iterator[WorkloadRequest]:
        for number in range(50):
            request = WorkloadRequest(
                arrival=float(number),
                num_prompt_tokens=1,
                num_output_tokens=1,
                session=f"s{number % 5}" if self._sessions else None,
            )
            self.sent.append(request)
            yield request

    def follow_ups(self, request: WorkloadRequest, end: float) -> Sequence[WorkloadRequest]:
        assert any(request is one for one in self.sent)
        follow_up = WorkloadRequest(arrival=end, num_prompt_tokens=1, num_output_tokens=1, session=request.session)
        self.sent.append(follow_up)
        return [follow_up]


def clients(path: Path, *overrides: str) -> list[str | None]:
    return [one.client for one in trace_requests(path, *overrides)]


def test_without_it_requests_stay_without_clients(tmp_path: Path) -> None:
    assert set(clients(write_steady(tmp_path / "t", 5))) == {None}


def test_a_number_is_so_many_clients_each_as_often(tmp_path: Path) -> None:
    counts = Counter(clients(write_steady(tmp_path / "t", 4000), "workload.clients=4"))
    assert set(counts) == {"client-0", "client-1", "client-2", "client-3"}
    assert all(850 < count < 1150 for count in counts.values())


def test_a_zipf_exponent_gives_client_k_a_share_of_one_over_k(tmp_path: Path) -> None:
    counts = Counter(clients(write_steady(tmp_path / "t", 6000), "workload.clients={number: 3, zipf: 1.0}"))
    shares = [counts[f"client-{k}"] / 6000 for k in range(3)]
    assert shares == pytest.approx([6 / 11, 3 / 11, 2 / 11], abs=0.03)


def test_the_seed_is_the_workloads_unless_it_has_its_own(tmp_path: Path) -> None:
    path = write_steady(tmp_path / "t", 200)
    own = "workload.clients={number: 9, seed: 7}"
    assert clients(path, "workload.clients=9") == clients(path, "workload.clients={number: 9, seed: 0}")
    assert clients(path, own) != clients(path, "workload.clients=9")
    assert clients(path, own) == clients(path, own)
    assert clients(path, own, "seed=1", "workload.limit=50") == clients(path, own)[:50]


def test_a_client_that_a_trace_names_stays(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"arrival": n, "prompt": 1, "output": 1} for n in range(4)]
    rows[2]["client"] = "acme"
    found = clients(write_jsonl(tmp_path / "t", rows), "workload.clients=2")
    assert found[2] == "acme"
    assert {found[0], found[1], found[3]} <= {"client-0", "client-1"}


def test_requests_of_a_session_and_what_follows_them_have_one_client() -> None:
    workload = with_clients(Conversations(sessions=True), 3, 0)
    requests = list(workload.requests())
    follow_ups = [workload.follow_ups(one, 99.0)[0] for one in requests]
    of_session: dict[str | None, set[str | None]] = {}
    for one in (*requests, *follow_ups):
        of_session.setdefault(one.session, set()).add(one.client)
    assert all(len(found) == 1 for found in of_session.values())
    assert len({one.client for one in requests}) > 1


def test_a_follow_up_has_the_client_of_what_it_follows_and_the_workload_knows_its_own_object() -> None:
    workload = with_clients(Conversations(sessions=False), 5, 0)
    for request in workload.requests():
        (follow_up,) = workload.follow_ups(request, 1.0)
        (third,) = workload.follow_ups(follow_up, 2.0)
        assert request.client == follow_up.client == third.client


def test_the_description_says_who_was_assigned(tmp_path: Path) -> None:
    workload = trace_workload(write_steady(tmp_path / "t", 5), "workload.clients={number: 10, zipf: 1.5}", "seed=0")
    assert workload.description.endswith("10 clients assigned, Zipf exponent 1.5, seed 0")


def test_content_stays(tmp_path: Path) -> None:
    bare, assigned = (preset("mooncake_synthetic", "workload.limit=5", *more) for more in ((), ("workload.clients=2",)))
    assert assigned.has_content
    assert [one.content for one in assigned.requests()] == [one.content for one in bare.requests()]


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("0", "workload.clients must be a whole number from 1"),
        ("-3", "workload.clients must be a whole number from 1"),
        ("1000001", "to 1000000"),
        ("{zipf: 1}", "workload.clients.number must be a whole number"),
        ("{number: 2.5}", "workload.clients.number must be a whole number"),
        ("{number: 2, zipf: -1}", "workload.clients.zipf must be a number from 0"),
        ("{number: 2, zipf: nan}", "workload.clients.zipf must be a number from 0"),
        ("{number: 2, zipf: true}", "workload.clients.zipf must be a number from 0"),
        ("{number: 2, seed: -1}", "workload.clients.seed must be a whole number from 0"),
        ("{number: 2, zipff: 1}", "did you mean 'zipf'?"),
    ],
)
def test_what_it_cannot_be_is_refused(tmp_path: Path, value: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        trace_workload(write_steady(tmp_path / "t", 5), f"workload.clients={value}")
    assert why in str(caught.value)
