"""Section 2 of the public engine behaviours: how requests end."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenyard.testing import EngineHarness

MakeHarness = Callable[..., EngineHarness]

LOOPS = pytest.mark.parametrize("loop", ["sync", "overlap"])


@LOOPS
def test_s9_eos_ends_a_request_and_stays_in_its_tokens(harness: MakeHarness, loop: str) -> None:
    engine = harness(f"engine={loop}")
    first, second = engine.add([1, 2, 3], max_tokens=9), engine.add([4, 5, 6], max_tokens=9)
    engine.step(tokens={first: [10], second: [20]})
    outputs = engine.step(tokens={first: [engine.eos_token_id], second: [21]})
    assert [(end.request_id, end.reason, end.stop_reason) for end in outputs.finished] == [(first, "stop", None)]
    assert engine.running == [second]
    assert engine.request(first).output_token_ids == [10, engine.eos_token_id]
    told = 0
    while engine.has_requests:
        engine.step()
        told += sum(len(output.finished) for output in engine.last_outputs)
    assert told == 1  # the worker learns of the first one's end, once; nothing runs after the second one's
    assert len(engine.request(second).output_token_ids) == 9


@LOOPS
def test_s10_a_stop_token_ends_the_output_and_is_its_reason(harness: MakeHarness, loop: str) -> None:
    engine = harness(f"engine={loop}")
    name = engine.add([1, 2, 3], max_tokens=9, stop_token_ids=[42])
    engine.step(tokens={name: [10, 42, 12]})
    request = engine.request(name)
    assert (request.output_token_ids, request.finish_reason, request.stop_reason) == ([10, 42], "stop", 42)
    engine.run()
    engine.check_idle()


@LOOPS
def test_s11_max_tokens_cuts_what_was_sampled(harness: MakeHarness, loop: str) -> None:
    engine = harness(f"engine={loop}")
    name = engine.add([1, 2, 3], max_tokens=2)
    engine.step(tokens={name: [10, 11, 12]})
    assert (engine.request(name).output_token_ids, engine.request(name).finish_reason) == ([10, 11], "length")
    engine.run()
    engine.check_idle()


@LOOPS
def test_s12_ignore_eos_goes_on(harness: MakeHarness, loop: str) -> None:
    engine = harness(f"engine={loop}")
    name = engine.add([1, 2, 3], max_tokens=9, ignore_eos=True)
    engine.step(tokens={name: [engine.eos_token_id, 10, 11]})
    assert engine.request(name).status != "finished"
    assert engine.request(name).output_token_ids == [engine.eos_token_id, 10, 11]
    engine.run()
    assert len(engine.request(name).output_token_ids) == 9


@pytest.mark.parametrize("stop", ["eos", "stop id"])
@pytest.mark.parametrize("at_once", [True, False])
def test_s13_no_stop_token_counts_before_min_tokens(harness: MakeHarness, stop: str, at_once: bool) -> None:
    engine = harness()
    name = engine.add([1, 2, 3], max_tokens=9, min_tokens=5, stop_token_ids=[42])
    token = engine.eos_token_id if stop == "eos" else 42
    sampled = [10, 11, token, 12, token, 13]
    for tokens in [sampled] if at_once else [[one] for one in sampled[:5]]:
        assert engine.request(name).status != "finished"
        engine.step(tokens={name: tokens})
    request = engine.request(name)
    assert request.output_token_ids == sampled[:5]
    assert (request.finish_reason, request.stop_reason) == ("stop", None if stop == "eos" else 42)


def test_s13_without_min_tokens_eos_ends_at_once(harness: MakeHarness) -> None:
    engine = harness()
    name = engine.add([1, 2, 3], min_tokens=0)
    engine.step(tokens={name: [engine.eos_token_id]})
    assert engine.request(name).finish_reason == "stop"


@pytest.mark.parametrize("tokens", [[10, 11, 42], [42]])
def test_s14_a_stop_as_the_last_permitted_token_is_a_stop(harness: MakeHarness, tokens: list[int]) -> None:
    engine = harness()
    name = engine.add([1, 2, 3], max_tokens=len(tokens), stop_token_ids=[42])
    engine.step(tokens={name: tokens})
    assert (engine.request(name).finish_reason, engine.request(name).stop_reason) == ("stop", 42)


def test_s14_eos_as_the_last_permitted_token_is_a_stop(harness: MakeHarness) -> None:
    engine = harness()
    name = engine.add([1, 2, 3], max_tokens=1)
    engine.step(tokens={name: [engine.eos_token_id]})
    assert (engine.request(name).finish_reason, engine.request(name).stop_reason) == ("stop", None)


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("repetition_detection", {"min_size": 2}),  # S15
        ("structured_outputs", {"regex": "a+"}),  # S27, S28
    ],
)
def test_parameters_of_features_that_are_not_there_are_refused_by_name(
    harness: MakeHarness, parameter: str, value: object
) -> None:
    """S15, S27, S28: their other halves come with these features."""
    engine = harness()
    with pytest.raises(ValueError, match=parameter):
        engine.add([1, 2, 3], **{parameter: value})
    assert not engine.has_requests
