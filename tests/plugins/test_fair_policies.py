"""vtc, weighted-vtc, wfq and dlpm: who gets how much, in figures."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from backlogs import INPUT_WEIGHT, OUTPUT_WEIGHT, Client, Served, fixed, mixed, serve
from hypothesis import given
from hypothesis import strategies as st
from tokenyard.errors import ConfigError
from tokenyard.interfaces import client_counters
from tokenyard.testing import EngineHarness, PolicyContract
from tokenyard_plugins import wfq

BLOCK_SIZE = 4


class TestVTC(PolicyContract):
    overrides = ("scheduler=vtc",)
    max_examples = 3


class TestWeightedVTC(PolicyContract):
    overrides = ("scheduler=weighted-vtc", "scheduler.policy.weights={c0: 3}", "scheduler.preempt_mode=swap")
    max_examples = 3


class TestWFQ(PolicyContract):
    overrides = ("scheduler=wfq", "scheduler.policy.weights={c0: 3}")
    max_examples = 3


class TestDLPM(PolicyContract):
    overrides = ("scheduler=dlpm", "scheduler.policy.quantum=20")
    max_examples = 3


def crowded(
    policy: str, *overrides: str, budget: int = 64, num_blocks: int = 60, max_num_seqs: int = 8
) -> EngineHarness:
    return EngineHarness(
        [
            f"scheduler={policy}",
            f"scheduler.max_num_seqs={max_num_seqs}",
            f"scheduler.max_num_batched_tokens={budget}",
            f"kv_cache.num_blocks={num_blocks}",
            f"kv_cache.block_size={BLOCK_SIZE}",
            *overrides,
        ],
        checks=False,
    )


def served_by(
    policy: str, *overrides: str, clients: dict[str, Client], num_steps: int = 700, budget: int = 64
) -> Served:
    with crowded(policy, *overrides, budget=budget) as engine:
        return serve(engine, clients, num_steps)


def admitted(engine: EngineHarness, requests: Sequence[tuple[str, str, int, int]]) -> list[str]:
    """Ids in the order in which they start, of (id, client, prompt, output)s that come at once."""
    for request_id, client, num_prompt, num_output in requests:
        engine.add(range(num_prompt), request_id, client=client, max_tokens=num_output, ignore_eos=True)
    order: list[str] = []
    while engine.has_requests:
        order += [one.request_id for one in engine.step().admitted]
    return order


# Virtual token counters

LOADS = {
    "other lengths": {"f": fixed(30, 20), "g": fixed(50, 8)},
    "long prompts, long outputs": {"f": fixed(150, 4), "g": fixed(4, 60)},
    "random lengths": {"f": mixed(range(4, 90), range(1, 40)), "g": mixed(range(1, 30), range(10, 60))},
    "a flood": {"f": fixed(30, 20, depth=400), "g": fixed(30, 20, depth=12)},
}
LONGEST = {"other lengths": 50, "long prompts, long outputs": 150, "random lengths": 89, "a flood": 30}


@pytest.mark.parametrize(
    ("load", "budget"), [*((load, 64) for load in LOADS), ("long prompts, long outputs", 20), ("random lengths", 20)]
)
def test_vtc_two_backlogged_clients_share_evenly_and_the_difference_stays_below_two_u(load: str, budget: int) -> None:
    num_blocks = 60
    with crowded("vtc", budget=budget, num_blocks=num_blocks) as engine:
        served = serve(engine, LOADS[load], 2000 if budget == 20 else 800)
    # M is what the running batch can hold at most: the cache.
    u = max(INPUT_WEIGHT * LONGEST[load], OUTPUT_WEIGHT * num_blocks * BLOCK_SIZE)
    assert 0.49 <= served.share("f") <= 0.51
    assert served.widest < 2 * u


def test_vtc_without_it_the_flood_takes_nearly_everything() -> None:
    assert served_by("fcfs", clients=LOADS["a flood"]).share("f") > 0.9


@pytest.mark.parametrize("policy", ["weighted-vtc", "wfq"])
def test_weights_of_one_and_two_give_two(policy: str) -> None:
    served = served_by(policy, "scheduler.policy.weights={g: 2}", clients=LOADS["other lengths"], num_steps=1500)
    assert served.total["g"] / served.total["f"] == pytest.approx(2.0, rel=0.03)


def test_weighted_vtc_clients_that_are_not_named_have_the_default_weight() -> None:
    overrides = ("scheduler.policy.weights={g: 1}", "scheduler.policy.default_weight=2")
    served = served_by("weighted-vtc", *overrides, clients=LOADS["other lengths"], num_steps=1500)
    assert served.total["f"] / served.total["g"] == pytest.approx(2.0, rel=0.03)


def test_vtc_an_idle_client_is_lifted_to_the_active_minimum_and_gets_no_burst() -> None:
    with crowded("vtc", max_num_seqs=1) as engine:
        # Each request is 8 of service: 4 prompt tokens and twice 2 output tokens.
        early = [(f"f{number}", "f", 4, 2) for number in range(10)]
        for request_id, client, num_prompt, num_output in early:
            engine.add(range(num_prompt), request_id, client=client, max_tokens=num_output, ignore_eos=True)
        order: list[str] = []
        while len(order) < 5:
            order += [one.request_id for one in engine.step().admitted]
        # f has had 4 requests and the prompt of a fifth: 36, and the smallest in line. So g has 36 too, and not 0.
        order += admitted(engine, [(f"g{number}", "g", 4, 2) for number in range(5)])
    assert order == ["f0", "f1", "f2", "f3", "f4", *("g0", "f5", "g1", "f6", "g2", "f7", "g3", "f8", "g4", "f9")]


def test_vtc_a_client_that_was_served_much_is_not_lowered_when_it_comes_back() -> None:
    with crowded("vtc", max_num_seqs=1) as engine:
        engine.add(range(40), "f0", client="f", max_tokens=20, ignore_eos=True)
        for number in range(12):
            engine.add(range(4), f"g{number:02}", client="g", max_tokens=2, ignore_eos=True)
        order: list[str] = []
        while len(order) < 4:
            order += [one.request_id for one in engine.step().admitted]
        # f has had 80, and each of g's is 8: so ten of them before f's next, which ties with the eleventh.
        order += admitted(engine, [("f1", "f", 4, 2)])
    assert order == ["f0", *(f"g{number:02}" for number in range(10)), "f1", "g10", "g11"]


def test_vtc_a_client_is_lifted_to_the_one_that_left_last_when_nobody_waits() -> None:
    with crowded("vtc", max_num_seqs=1) as engine:
        assert admitted(engine, [("f0", "f", 40, 20)]) == ["f0"]
        later = [("f1", "f", 4, 2), ("g0", "g", 4, 2), ("g1", "g", 4, 2), ("f2", "f", 4, 2)]
        assert admitted(engine, later) == ["f1", "g0", "f2", "g1"]


def test_vtc_what_enters_together_is_counted_before_it_is_in() -> None:
    with crowded("vtc", max_num_seqs=4) as engine:
        for client in "xy":
            for number in range(4):
                engine.add(range(8), f"{client}{number}", client=client, max_tokens=4)
        engine.step()
        assert engine.running == ["x0", "y0", "x1", "y1"]
        engine.run()


def test_vtc_ties_go_by_arrival_and_id_whatever_the_order_of_clients() -> None:
    requests = [("b", "x", 4, 2), ("a", "y", 4, 2), ("d", "x", 4, 2), ("c", "y", 4, 2)]
    for ordering in (requests, requests[::-1]):
        with crowded("vtc", max_num_seqs=1) as engine:
            assert admitted(engine, ordering) == ["a", "b", "c", "d"]


def test_vtc_requests_without_a_client_are_one_client() -> None:
    with crowded("vtc", max_num_seqs=1) as engine:
        for number in range(4):
            engine.add(range(4), f"nobody's {number}", max_tokens=2, ignore_eos=True)
        order = admitted(engine, [("x0", "x", 4, 2), ("x1", "x", 4, 2)])
    assert order == ["nobody's 0", "x0", "nobody's 1", "x1", "nobody's 2", "nobody's 3"]


def test_vtc_a_preempted_request_is_charged_for_its_prompt_once() -> None:
    with crowded("vtc", num_blocks=24, max_num_seqs=4) as engine:
        served = serve(engine, {"f": fixed(20, 40), "g": fixed(40, 8)}, 1500)
        assert engine.stats.num_preemptions > 50
    assert 0.49 <= served.share("f") <= 0.51


@pytest.mark.parametrize(("policy", "module"), [("vtc", client_counters), ("wfq", wfq), ("dlpm", client_counters)])
def test_what_is_remembered_of_clients_is_bounded(policy: str, module: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_CLIENTS", 5)
    with crowded(policy) as engine:
        for number in range(60):
            engine.add(range(4), client=f"client {number}", max_tokens=1)
            engine.step()
        engine.run()
        remembered = [value for value in vars(engine.policy).values() if isinstance(value, dict)]
        assert remembered
        assert all(len(value) <= 10 for value in remembered)


# More clients than a window


def many_clients(policy: str, *overrides: str, num_each: int = 6) -> EngineHarness:
    """300 clients have requests of 8 of service in line; four run at once."""
    engine = crowded(policy, "kv_cache.enable_prefix_caching=false", *overrides, max_num_seqs=4)
    for number in range(num_each):
        for client in range(300):
            engine.add(range(4), f"c{client}-{number}", client=f"c{client}", max_tokens=2, ignore_eos=True)
    return engine


def num_before_late(engine: EngineHarness) -> int:
    """How many requests start before the first of a client that comes when 400 have started."""
    order: list[str] = []
    while "late" not in order:
        if len(order) >= 400 and "late" not in engine.requests:
            engine.add(range(4), "late", client="late", max_tokens=2, ignore_eos=True)
            order.clear()
        order += [one.request_id for one in engine.step().admitted]
    return order.index("late")


def test_vtc_of_300_clients_a_late_one_waits_for_those_that_were_served_as_little_as_it() -> None:
    # 400 have had theirs when it comes: it is lifted to those who had one, of which 200 came earlier.
    assert num_before_late(many_clients("vtc")) <= 200
    assert num_before_late(many_clients("vtc", "scheduler.policy.window=128")) > 200


def test_dlpm_of_300_clients_a_late_one_is_in_the_next_round() -> None:
    # A quantum of 8 is a request each: what is left of this round, and the next one.
    assert num_before_late(many_clients("dlpm", "scheduler.policy.quantum=8")) <= 200 + 300
    assert num_before_late(many_clients("dlpm", "scheduler.policy.quantum=8", "scheduler.policy.window=128")) > 600


@pytest.mark.parametrize(("policy", "options"), [("vtc", ()), ("dlpm", ("scheduler.policy.quantum=8",))])
def test_300_clients_have_as_many_requests_each_to_within_one_of_the_batch(policy: str, options: Sequence[str]) -> None:
    engine = many_clients(policy, *options)
    counts = dict.fromkeys((f"c{client}" for client in range(300)), 0)
    for _ in range(600):
        for one in engine.step().admitted:
            counts[one.request_id.partition("-")[0]] += 1
        assert max(counts.values()) - min(counts.values()) <= 2


def test_who_is_in_line_keeps_its_counter_when_those_are_forgotten_that_would_be_lifted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_counters, "_MOST_CLIENTS", 2)
    counters = client_counters.ClientCounters()
    counters |= {"in line": 5.0, "gone": 5.0, "much": 20.0}
    counters.floor = 10.0
    counters.join(["new"], {"in line"})
    counters.floor = 15.0
    assert dict(counters) == {"in line": 5.0, "new": 10.0, "much": 20.0}
    assert [counters[one] for one in ("in line", "new", "gone")] == [5.0, 10.0, 15.0]


def test_vtc_a_client_that_is_preempted_is_in_line_again() -> None:
    with crowded("vtc", num_blocks=24, max_num_seqs=4) as engine:
        for number in range(12):
            client = f"c{number % 6}"
            prompt = range(100 * number, 100 * number + 20)
            engine.add(prompt, f"{client}-{number}", client=client, max_tokens=40, ignore_eos=True)
        while engine.has_requests:
            engine.step()
            waiting = {one.partition("-")[0] for one in engine.waiting}
            counters = counters_of(engine.policy)
            if waiting:
                assert counters.smallest(waiting, None) == min(counters[one] for one in waiting)
        assert engine.stats.num_preemptions > 5


@given(st.lists(st.tuples(st.sampled_from("joke"), st.sampled_from([None, "a", "b", "c", "d"])), max_size=60))
def test_the_smallest_counter_in_line_is_that_of_a_look_at_all(acts: list[tuple[str, str | None]]) -> None:
    counters = client_counters.ClientCounters()
    waiting: set[str | None] = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client_counters, "_MOST_CLIENTS", 2)
        for act, client in acts:
            if act == "j" and client not in waiting:
                counters.floor = counters.smallest(waiting, "a")
                counters.join([client], waiting)
                counters.queue([client])
                waiting.add(client)
            elif act == "o":
                waiting.discard(client)
            elif act == "k":
                counters[client] += 3.0
            smallest = min((counters[one] for one in waiting), default=counters["a"])
            assert counters.smallest(waiting, "a") == smallest


@pytest.mark.parametrize(("policy", "module"), [("vtc", client_counters), ("dlpm", client_counters), ("wfq", wfq)])
def test_counters_that_cannot_be_forgotten_are_looked_at_each_time_there_are_twice_as_many(
    policy: str, module: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_CLIENTS", 4)
    with crowded(policy, max_num_seqs=1) as engine:
        limits = set()
        for number in range(60):
            engine.add(range(4), client=f"client {number}", max_tokens=1)
            engine.step()
            limits.add(limit_of(engine.policy))
        engine.run()
    assert len(limits) <= 5


def limit_of(policy: object) -> int:
    return policy._most if isinstance(policy, wfq.WFQPolicy) else counters_of(policy)._limit


def counters_of(policy: object) -> client_counters.ClientCounters:
    return next(value for value in vars(policy).values() if isinstance(value, client_counters.ClientCounters))


# Weighted fair queueing


def test_wfq_two_backlogged_clients_share_evenly() -> None:
    served = served_by("wfq", clients=LOADS["random lengths"], num_steps=1200)
    assert 0.49 <= served.share("f") <= 0.51


def test_wfq_finish_times_grow_by_service_over_weight() -> None:
    with crowded("wfq", "scheduler.policy.weights={a: 2}", max_num_seqs=1) as engine:
        # 8 of service each: a finishes at 4, 8, 12, 16, and b at 8, 16, 24. Ties by id: they came at once.
        requests = [
            *((f"a{number}", "a", 4, 2) for number in range(4)),
            *((f"b{number}", "b", 4, 2) for number in range(3)),
        ]
        assert admitted(engine, requests) == ["a0", "a1", "b0", "a2", "a3", "b1", "b2"]


def test_wfq_a_client_that_comes_late_starts_at_the_virtual_time_of_now() -> None:
    with crowded("wfq", max_num_seqs=1) as engine:
        assert admitted(engine, [(f"f{number}", "f", 4, 2) for number in range(4)]) == ["f0", "f1", "f2", "f3"]
        later = [("f4", "f", 4, 2), ("f5", "f", 4, 2), ("g0", "g", 4, 2), ("g1", "g", 4, 2)]
        assert admitted(engine, later) == ["f4", "g0", "f5", "g1"]


def test_wfq_what_was_predicted_and_not_used_is_given_back() -> None:
    # f's limit is ten times what its outputs take. By the limits alone it would get a fifth of the service.
    careless = Client(prompt=fixed(20, 6).prompt, output=lambda draw: (60, 6), depth=4)
    served = served_by("wfq", clients={"f": careless, "g": fixed(20, 6, depth=4)}, num_steps=1500)
    assert 0.47 <= served.share("f") <= 0.53


def test_wfq_a_request_that_left_the_line_costs_its_client_nothing() -> None:
    with crowded("wfq", max_num_seqs=1) as engine:
        engine.add(range(4), "x0", client="x", max_tokens=2, ignore_eos=True)
        engine.step()
        engine.add(range(100), "f0", client="f", max_tokens=2, ignore_eos=True)
        engine.finish("f0")
        order = admitted(engine, [("f1", "f", 4, 2), ("g0", "g", 4, 2), ("g1", "g", 4, 2), ("f2", "f", 4, 2)])
    assert order == ["f1", "g0", "f2", "g1"]


# Deficits


@pytest.mark.parametrize("load", LOADS)
def test_dlpm_the_difference_of_service_stays_below_two_u_and_two_quanta(load: str) -> None:
    quantum = 200
    served = served_by("dlpm", f"scheduler.policy.quantum={quantum}", clients=LOADS[load], num_steps=800)
    u = max(INPUT_WEIGHT * LONGEST[load], OUTPUT_WEIGHT * 60 * BLOCK_SIZE)
    assert 0.49 <= served.share("f") <= 0.51
    assert served.widest < 2 * (u + quantum)


def test_dlpm_a_round_ends_when_nobody_in_line_has_anything_left() -> None:
    with crowded("dlpm", "scheduler.policy.quantum=16", max_num_seqs=1) as engine:
        # 8 of service each, so two of a client in a round. b is alone from its third on.
        a, b = [[(f"{name}{number}", name, 4, 2) for number in range(count)] for name, count in (("a", 4), ("b", 6))]
        assert admitted(engine, a + b) == ["a0", "a1", "b0", "b1", "a2", "a3", "b2", "b3", "b4", "b5"]


# Options


@pytest.mark.parametrize(
    ("policy", "option", "message"),
    [
        ("vtc", "input_weight=0", "input_weight=0.0 is not valid: it must be a number above 0"),
        ("weighted-vtc", "weights={a: -1}", r"weights\.a=-1.0 is not valid: it must be a number above 0"),
        ("wfq", "default_weight=inf", "default_weight=inf is not valid: it must be a number above 0"),
        ("vtc", "window=0", "window=0 is not valid: it must be a number above 0"),
        ("dlpm", "window=-1", "window=-1 is not valid: it must be a number above 0"),
        ("dlpm", "quantum=nan", "quantum=nan is not valid: it must be a number above 0"),
    ],
)
def test_options_that_mean_nothing_are_refused_at_launch(policy: str, option: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineHarness([f"scheduler={policy}", f"scheduler.policy.{option}"])
