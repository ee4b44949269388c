"""attention=NAME and attention=auto: who is taken, who is skipped, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from plugin_makers import CPUOnly
from tokenyard import AttentionBackendDescriptor
from tokenyard.catalogue import Blocked, Catalogue, Entry, Provider
from tokenyard.config import AttentionConfig, NoOptions
from tokenyard.errors import CapacityError, PluginConflictError, PluginError
from tokenyard.interfaces import (
    AttentionBackend,
    AttentionBackendContext,
    AttentionBatch,
    AttentionLayer,
    AttentionSpec,
    KVCacheLayout,
)
from tokenyard.model.causal_lm import ModelShape
from tokenyard.worker.attention_choice import (
    AttentionChoice,
    attention_spec,
    check_attention,
    choose_attention,
)

SPEC = AttentionSpec(
    device_type="cpu", dtype="float32", num_heads=4, num_kv_heads=2, head_dim=16, v_head_dim=16, block_size=16
)
CONTEXT = AttentionBackendContext(spec=SPEC, device=torch.device("cpu"), num_threads=1)
NO_GPU = "no GPU here"


class Nothing(AttentionBackend):
    """A backend that keeps what its factory was given."""

    def __init__(self, options: object = None, description: str = "") -> None:
        self.options = options
        self.description = description

    @classmethod
    def supports(cls, spec: AttentionSpec) -> list[str]:
        return []

    def kv_cache_layout(self, spec: AttentionSpec, num_blocks: int) -> KVCacheLayout:
        raise NotImplementedError

    def plan(self, batch: AttentionBatch) -> object:
        raise NotImplementedError

    def forward(self, *arguments: object) -> None:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Options:
    """Of a backend that has some."""

    splits: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Needy:
    """An option without a default."""

    path: str


def entry(
    name: str,
    *,
    rank: int | None = 10,
    supports: Sequence[str] | Exception = (),
    requires: Sequence[str] | Exception = (),
    fails: BaseException | None = None,
    made: object = None,
    description: str = "",
    options_type: type = NoOptions,
    distribution: str = "one",
    tested_on: frozenset[str] = frozenset({"cpu"}),
) -> Entry:
    def answer(reasons: Sequence[str] | Exception) -> Sequence[str]:
        if isinstance(reasons, Exception):
            raise reasons
        return reasons

    def build(options: object, context: object) -> AttentionBackend:
        if fails is not None:
            raise fails
        return Nothing(options, description) if made is None else made  # type: ignore[return-value]

    descriptor: AttentionBackendDescriptor[object] = AttentionBackendDescriptor(
        name=name,
        api_version=(1, 1),
        factory=build,
        supports=lambda spec: answer(supports),
        requires=lambda platform: answer(requires),
        auto_rank=rank,
        options_type=options_type,
        tested_on=tested_on,
    )
    return Entry(descriptor=descriptor, provider=Provider(distribution=distribution, version="1", entry_point=name))


def choice_of(name: str, *entries: Entry, options: object = None) -> AttentionChoice:
    config = AttentionConfig(name=name) if options is None else AttentionConfig(name=name, options=options)
    return choose_attention(Catalogue(entries), config, CONTEXT, CPUOnly())


def choose(name: str, *entries: Entry) -> tuple[str, list[str]]:
    choice = choice_of(name, *entries)
    return choice.name, [skipped.name for skipped in choice.skipped]


def test_auto_takes_the_lowest_rank_that_runs_and_remembers_who_did_not() -> None:
    rows = [
        entry("slow", rank=100),
        entry("fast", rank=1, requires=[NO_GPU]),
        entry("picky", rank=2, supports=["head size 16"]),
        entry("shy", rank=None),
    ]
    assert choose("auto", *rows) == ("slow", ["fast", "picky"])


def test_a_backend_that_auto_never_takes_can_be_named() -> None:
    assert choose("shy", entry("shy", rank=None), entry("slow")) == ("shy", [])


def test_a_named_backend_that_cannot_run_says_why_and_what_would_run_instead() -> None:
    rows = [
        entry("fast", requires=[NO_GPU, "no compiler"]),
        entry("slow", rank=100),
        entry("picky", rank=2, supports=["head size 16"]),
    ]
    expected = "attention 'fast' cannot run here: no GPU here; no compiler; here would run: "
    with pytest.raises(PluginError) as caught:
        choose("fast", *rows)
    assert str(caught.value) == expected + "slow"
    with pytest.raises(PluginError) as caught:  # before there is a model
        check_attention(Catalogue(rows), "fast", CPUOnly())
    assert str(caught.value) == expected + "picky, slow"


def test_what_the_machine_lacks_is_found_without_asking_supports() -> None:
    rows = [entry("fast", requires=[NO_GPU], supports=ValueError("asked")), entry("good", supports=ValueError("asked"))]
    check_attention(Catalogue(rows), "good", CPUOnly())
    check_attention(Catalogue(rows), "auto", CPUOnly())
    with pytest.raises(PluginError, match="not fast: no GPU here"):
        check_attention(Catalogue(rows[:1]), "auto", CPUOnly())
    with pytest.raises(PluginError, match="unknown attention 'none'"):
        check_attention(Catalogue(rows), "none", CPUOnly())


@pytest.mark.parametrize(
    "ask", [lambda catalogue: check_attention(catalogue, "auto", CPUOnly()), lambda catalogue: auto(catalogue)]
)
def test_nothing_that_runs_is_an_error_with_every_reason(ask: Callable[[Catalogue], object]) -> None:
    rows = [entry("a", requires=[NO_GPU, "no compiler"]), entry("b", requires=["no disk"])]
    with pytest.raises(PluginError, match=r"found no backend.*; not a: no GPU here, no compiler; not b: no disk"):
        ask(Catalogue(rows))
    with pytest.raises(PluginError, match="none is installed"):
        ask(Catalogue())
    provider = Provider(distribution="one", version="1", entry_point="a")
    with pytest.raises(PluginError, match=r"none is loaded .*plugins\.disabled"):
        ask(Catalogue(blocked=[Blocked(provider=provider, reason="plugins.disabled")]))


def auto(catalogue: Catalogue) -> AttentionChoice:
    return choose_attention(catalogue, AttentionConfig(), CONTEXT, CPUOnly())


def test_a_backend_that_raises_when_asked_is_skipped_with_its_error() -> None:
    rows = [entry("bad", rank=1, supports=ValueError("bug")), entry("worse", rank=2, requires=OSError("disk"))]
    assert choose("auto", *rows, entry("good", rank=3)) == ("good", ["bad", "worse"])
    with pytest.raises(PluginError, match="ValueError: bug"):
        choose("bad", *rows)


def test_one_reason_as_a_text_of_its_own_is_one_reason() -> None:
    with pytest.raises(PluginError, match=r"cannot run here: head size 16$"):
        choose("bad", entry("bad", supports="head size 16"))


def test_auto_leaves_a_disputed_name_alone() -> None:
    rows = [entry("twice", rank=1), entry("twice", rank=1, distribution="other"), entry("good", rank=9)]
    assert choose("auto", *rows) == ("good", [])
    with pytest.raises(PluginConflictError):
        choose("twice", *rows)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError("no memory"), "failed to start: RuntimeError: no memory"),
        (SystemExit(3), "failed to start: SystemExit: 3"),
        (CapacityError("a work space of 3 GiB does not fit"), "a work space of 3 GiB does not fit"),
    ],
)
def test_auto_goes_on_when_a_factory_fails_and_a_named_backend_does_not(
    error: BaseException, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [entry("bad", rank=1, fails=error), entry("good", rank=2)]
    choice = choice_of("auto", *rows)
    assert choice.name == "good"
    assert [(one.name, one.reasons) for one in choice.skipped] == [("bad", (told,))]
    assert caplog.messages == [f"attention=auto goes on without bad: {told}"]
    with pytest.raises((PluginError, CapacityError), match=told):
        choose("bad", *rows)
    with pytest.raises(PluginError, match=f"found no backend.*not bad: {told}"):
        choose("auto", rows[0])


def test_a_factory_that_makes_something_else_is_named() -> None:
    made = entry("bad", rank=1, made=7)
    with pytest.raises(PluginError, match="attention 'bad' is broken: its factory made a int"):
        choose("bad", made)
    assert choose("auto", made, entry("good")) == ("good", ["bad"])


def test_auto_gives_a_backend_the_defaults_of_its_options_and_a_name_what_the_config_says() -> None:
    row = entry("tunable", options_type=Options)
    taken, named = choice_of("auto", row).backend, choice_of("tunable", row, options=Options(splits=2)).backend
    assert isinstance(taken, Nothing)
    assert isinstance(named, Nothing)
    assert (taken.options, named.options) == (Options(splits=4), Options(splits=2))


def test_auto_passes_over_a_backend_whose_options_have_no_defaults() -> None:
    choice = choice_of("auto", entry("needy", rank=1, options_type=Needy), entry("good"))
    assert choice.name == "good"
    assert "path" in choice.skipped[0].reasons[0]


# ---- The line for people ---------------------------------------------------------------------------------------------


def test_the_line_of_auto_tells_the_backend_what_it_is_and_one_reason_for_each_other() -> None:
    rows = [
        entry("a", rank=1, requires=[NO_GPU, "not installed"]),
        entry("b", rank=2, requires=["not installed; `pip install b` brings it"]),
        entry("c", rank=3, requires=[NO_GPU]),
        entry("good", rank=4, description="AVX-512, 2 threads"),
    ]
    line = str(choice_of("auto", *rows))
    assert line == "attention=auto takes good (AVX-512, 2 threads); not a, c: no GPU here; not b: not installed"
    assert str(choice_of("auto", entry("good"))) == "attention=auto takes good"


def test_the_line_of_a_name_has_its_description_alone() -> None:
    assert str(choice_of("good", entry("good", description="fast"), entry("bad", requires=["x"]))) == (
        "attention=good (fast)"
    )


def test_a_backend_that_never_ran_on_such_a_device_is_told_as_such() -> None:
    rows = [entry("new", tested_on=frozenset())]
    assert str(choice_of("auto", *rows)) == (
        "attention=auto takes new, whose code never ran on a device of this type before"
    )


def test_what_a_model_asks_is_gathered_over_its_layers() -> None:
    layers = (
        AttentionLayer(index=0, sliding_window=8, sinks=torch.zeros(4)),
        AttentionLayer(index=1, soft_cap=30.0),
        AttentionLayer(index=2, sliding_window=16),
    )
    shape = ModelShape(vocab_size=9, num_heads=4, num_kv_heads=2, head_dim=24, v_head_dim=16, layers=layers)
    spec = attention_spec(shape, dtype=torch.bfloat16, device=torch.device("cpu"), block_size=32)
    assert (spec.dtype, spec.device_type, spec.head_dim, spec.v_head_dim) == ("bfloat16", "cpu", 24, 16)
    assert (spec.sliding_windows, spec.soft_caps, spec.has_sinks) == (frozenset({8, 16}), frozenset({30.0}), True)
    assert spec.block_size == 32
    plain = attention_spec(replace(shape, layers=layers[2:]), dtype=torch.float32, device=CONTEXT.device, block_size=1)
    assert (plain.sliding_windows, plain.soft_caps, plain.has_sinks) == (frozenset({16}), frozenset(), False)
