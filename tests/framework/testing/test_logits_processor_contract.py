"""The suite for logits processors finds one planted fault each, and passes what is right."""

from __future__ import annotations

from collections.abc import Sequence

import planted_logits as planted
import pytest
from tokenyard.config import NoOptions
from tokenyard.descriptors import Descriptor
from tokenyard.testing import ContractViolation, LogitsProcessorContract


@pytest.mark.parametrize(
    ("make", "test", "rule"),
    [
        (planted.ReturnsNew, "test_it_changes_logits_in_place", "logits.never_raises"),
        (planted.Resizes, "test_it_changes_logits_in_place", "logits.in_place"),
        (planted.MakesNaN, "test_it_changes_logits_in_place", "logits.in_place"),
        (planted.WritesTokens, "test_it_changes_logits_in_place", "logits.never_raises"),
        (planted.NeedsAToken, "test_it_changes_logits_in_place", "logits.never_raises"),
        (planted.DoesNothing, "test_it_changes_something", "logits.works"),
        (planted.NeverStarts, "test_it_changes_something", "logits.works"),
        (planted.WantsAll, "test_a_request_that_asks_for_nothing_costs_nothing", "logits.costs_nothing"),
        (planted.CountsCalls, "test_it_goes_on_after_a_preemption", "logits.restart"),
        (planted.SharesState, "test_requests_do_not_touch_each_other", "logits.own_request"),
        (planted.LooksAtTheId, "test_requests_do_not_touch_each_other", "logits.own_request"),
    ],
)
def test_a_broken_logits_processor_is_found(make: type, test: str, rule: str) -> None:
    class Suite(LogitsProcessorContract):
        overrides = ("logits_processors=[planted]",)
        simplifies = False
        extra_args = ({"planted": True},)

        def descriptors(self) -> Sequence[Descriptor[NoOptions]]:
            return [planted.logits_processor(make)]

    with pytest.raises(ContractViolation) as caught:
        getattr(Suite(), test)()
    assert caught.value.rule == rule


class TestRightOne(LogitsProcessorContract):
    """A suite without overrides tests the one descriptor that it has."""

    extra_args = ({"planted": True},)

    def descriptors(self) -> Sequence[Descriptor[NoOptions]]:
        return [planted.logits_processor(planted.ForbidsLast)]


class TestOneForEveryRequest(LogitsProcessorContract):
    wants_every_request = True

    def descriptors(self) -> Sequence[Descriptor[NoOptions]]:
        return [planted.logits_processor(planted.WantsAll)]


class TestNoRepeatNgram(LogitsProcessorContract):
    overrides = ("logits_processors=[no_repeat_ngram]",)
    extra_args = tuple({"no_repeat_ngram_size": size} for size in (1, 2, 3))


class TestNoRepeatNgramForAll(LogitsProcessorContract):
    overrides = ("logits_processors=[{name: no_repeat_ngram, size: 2}]",)
    wants_every_request = True
