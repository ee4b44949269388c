"""attention=NAME and attention=auto: who is taken, who is skipped, and why."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tokenyard import AttentionBackendDescriptor
from tokenyard.catalogue import Catalogue, Entry, Provider
from tokenyard.errors import PluginError
from tokenyard.interfaces import AttentionSpec
from tokenyard.platform import Platform
from tokenyard.worker.attention_choice import choose_attention

SPEC = AttentionSpec(
    device_type="cpu", dtype="float32", num_heads=4, num_kv_heads=2, head_dim=16, v_head_dim=16, block_size=16
)


def entry(
    name: str,
    *,
    rank: int | None = 10,
    supports: Sequence[str] | Exception = (),
    requires: Sequence[str] | Exception = (),
    distribution: str = "one",
) -> Entry:
    def answer(reasons: Sequence[str] | Exception) -> Sequence[str]:
        if isinstance(reasons, Exception):
            raise reasons
        return reasons

    descriptor: AttentionBackendDescriptor[object] = AttentionBackendDescriptor(
        name=name,
        api_version=(1, 1),
        factory=lambda options, context: pytest.fail("nothing is built here"),
        supports=lambda spec: answer(supports),
        requires=lambda platform: answer(requires),
        auto_rank=rank,
    )
    return Entry(descriptor=descriptor, provider=Provider(distribution=distribution, version="1", entry_point=name))


def choose(name: str, *entries: Entry) -> tuple[str, list[str]]:
    choice = choose_attention(Catalogue(entries), name, SPEC, Platform())
    return choice.descriptor.name, [skipped for skipped, _ in choice.skipped]


def test_auto_takes_the_lowest_rank_that_runs_and_remembers_who_did_not() -> None:
    rows = [
        entry("slow", rank=100),
        entry("fast", rank=1, requires=["no GPU"]),
        entry("picky", rank=2, supports=["head size 16"]),
        entry("shy", rank=None),
    ]
    assert choose("auto", *rows) == ("slow", ["fast", "picky"])


def test_a_backend_that_auto_never_takes_can_be_named() -> None:
    assert choose("shy", entry("shy", rank=None), entry("slow")) == ("shy", [])


def test_a_named_backend_that_cannot_run_says_why_and_what_would_run_instead() -> None:
    rows = [entry("fast", requires=["no GPU", "no compiler"]), entry("slow", rank=100)]
    with pytest.raises(PluginError, match="'fast' cannot run here: no GPU; no compiler; here would run: slow"):
        choose("fast", *rows)


def test_nothing_that_runs_is_an_error_with_every_reason() -> None:
    with pytest.raises(PluginError, match="not a: no GPU; not b: head size 16"):
        choose("auto", entry("a", requires=["no GPU"]), entry("b", supports=["head size 16"]))
    with pytest.raises(PluginError, match="none is installed"):
        choose("auto")


def test_a_backend_that_raises_when_asked_is_skipped_with_its_error() -> None:
    rows = [entry("bad", rank=1, supports=ValueError("bug")), entry("worse", rank=2, requires=OSError("disk"))]
    assert choose("auto", *rows, entry("good", rank=3)) == ("good", ["bad", "worse"])
    with pytest.raises(PluginError, match="ValueError: bug"):
        choose("bad", *rows)


def test_auto_leaves_a_disputed_name_alone() -> None:
    rows = [entry("twice", rank=1), entry("twice", rank=1, distribution="other"), entry("good", rank=9)]
    assert choose("auto", *rows) == ("good", [])
