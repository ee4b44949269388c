"""Keys whose value chooses a component (scheduler.predictor and .shadow, kv_cache.eviction), and the group latency."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest
from tokenyard.cli.plugins import active_components
from tokenyard.config import NO_OPTIONS, EngineConfig
from tokenyard.descriptors import ComponentDescriptor, PolicyDescriptor, SchedulerDescriptor
from tokenyard.errors import ConfigError, PluginConflictError, PluginError, UserError
from tokenyard.interfaces import (
    LatencyModel,
    LatencyModelContext,
    PolicyContext,
    PreemptMode,
    SchedulingPolicy,
    StepLoad,
)
from tokenyard.ipc.config_values import config_to_values, worker_values
from tokenyard.launch.build import build_engine_config
from tokenyard.launch.compose import compose_config, engine_config_from, load_engine_config
from tokenyard.launch.llm_arguments import llm_overrides
from tokenyard.launch.steering import make_steering
from tokenyard.testing import catalogue_with

CATALOGUE_KEYS = ("scheduler.predictor", "scheduler.shadow", "kv_cache.eviction")
KINDS = ("predictor", "policy", "eviction")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Of each planted component."""

    share: float = 0.25
    labels: tuple[str, ...] = ("a",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Needy:
    per_step: float


def _unused(*arguments: object) -> NoReturn:
    raise NotImplementedError


def _component(kind: str, name: str, options_type: type = Options) -> ComponentDescriptor[object]:
    return ComponentDescriptor(
        component_kind=kind, name=name, api_version=(1, 7), options_type=options_type, factory=_unused
    )


CATALOGUE = catalogue_with(
    _component("predictor", "planted"),
    _component("eviction", "planted"),
    PolicyDescriptor(name="planted", api_version=(1, 7), options_type=Options, factory=_unused),
    _component("latency", "needy", Needy),
)


def load(*overrides: str) -> EngineConfig:
    return load_engine_config(overrides, catalogue=CATALOGUE)[0]


def choices_of(config: EngineConfig, key: str) -> tuple[str | None, object]:
    return {
        "scheduler.predictor": (config.scheduler.predictor, config.scheduler.predictor_options),
        "scheduler.shadow": (config.scheduler.shadow, config.scheduler.shadow_options),
        "kv_cache.eviction": (config.kv_cache.eviction, config.kv_cache.eviction_options),
    }[key]


@pytest.mark.parametrize("key", CATALOGUE_KEYS)
def test_a_name_chooses_a_component_with_the_defaults_of_its_options(key: str) -> None:
    assert choices_of(load(f"{key}=planted"), key) == ("planted", Options())


@pytest.mark.parametrize("key", CATALOGUE_KEYS)
def test_a_mapping_chooses_a_component_with_options(key: str) -> None:
    expected = ("planted", Options(share=0.5, labels=("x", "y")))
    assert choices_of(load(f"{key}={{name: planted, share: 0.5, labels: [x, y]}}"), key) == expected


@pytest.mark.parametrize("key", CATALOGUE_KEYS)
def test_a_config_file_may_nest_the_options(key: str, tmp_path: Path) -> None:
    group, _, leaf = key.partition(".")
    file = tmp_path / "my.yaml"
    file.write_text(f"{group}:\n  {leaf}:\n    name: planted\n    share: 0.5\n    labels: [x]\n")
    config, _ = load_engine_config([], config_file=file, catalogue=CATALOGUE)
    assert choices_of(config, key) == ("planted", Options(share=0.5, labels=("x",)))


@pytest.mark.parametrize("key", CATALOGUE_KEYS)
def test_of_two_choices_the_later_one_holds_with_nothing_left_of_the_earlier_one(key: str) -> None:
    first, second = f"{key}={{name: planted, share: 0.5}}", f"{key}={{name: planted, labels: [z]}}"
    assert choices_of(load(first, second), key) == ("planted", Options(labels=("z",)))
    assert choices_of(load(second, f"{key}=planted"), key) == ("planted", Options())


@pytest.mark.parametrize("key", CATALOGUE_KEYS)
def test_a_script_of_ones_own_may_give_it_as_a_mapping(key: str) -> None:
    group, _, leaf = key.partition(".")
    config = engine_config_from({group: {leaf: {"name": "planted", "share": 1.0}}}, CATALOGUE)
    assert choices_of(config, key) == ("planted", Options(share=1.0))


@pytest.mark.parametrize(("key", "kind"), list(zip(CATALOGUE_KEYS, KINDS, strict=True)))
@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("plantd", ("{key}: unknown {kind} 'plantd'", "did you mean 'planted'?")),
        ("{name: planted, shore: 1}", ("unknown key '{key}.shore'", "did you mean '{key}.share'?")),
        ("{name: planted, share: much}", ("{key}.share must be a number, got 'much'",)),
        ("{share: 1}", ("{key} must be a name, or a mapping with a name and options",)),
        ("7", ("{key} must be a name, or a mapping with a name and options", "got 7")),
        ("[planted]", ("{key} must be a name",)),
        ("{name: 7}", ("{key} must be a name",)),
    ],
)
def test_a_mistake_is_one_clear_line(key: str, kind: str, value: str, words: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as caught:
        load(f"{key}={value}")
    message = str(caught.value)
    assert all(word.format(key=key, kind=kind) in message for word in words), message
    assert "\n" not in message


@pytest.mark.parametrize("key", CATALOGUE_KEYS)
def test_an_option_on_its_own_is_told_where_options_stand(key: str) -> None:
    with pytest.raises(ConfigError, match=f"options stand beside the name; write {key}={{name: NAME, share: ...}}"):
        load(f"{key}=planted", f"{key}.share=1")


@pytest.mark.parametrize("key", ["scheduler.predictor", "kv_cache.eviction"])
def test_there_is_always_a_predictor_and_an_eviction_rule(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} must be a name, .* got null"):
        load(f"{key}=null")


@pytest.mark.parametrize("key", [f"{key}_options" for key in CATALOGUE_KEYS])
def test_options_have_no_key_of_their_own(key: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown key '{key}'"):
        load(f"{key}=1")


def test_a_component_in_conflict_keeps_its_error() -> None:
    twice = catalogue_with(_component("predictor", "own"), _component("predictor", "own"))
    with pytest.raises(PluginConflictError, match=r"scheduler\.predictor: predictor 'own' is provided by"):
        load_engine_config(["scheduler.predictor=own"], catalogue=twice)


def test_a_scheduler_without_policies_has_no_shadow() -> None:
    whole = catalogue_with(SchedulerDescriptor(name="whole", api_version=(1, 7), factory=_unused))
    with pytest.raises(ConfigError, match=r"scheduler\.shadow=fcfs: scheduler 'whole' takes no policy"):
        load_engine_config(["scheduler=whole", "scheduler.shadow=fcfs"], catalogue=whole)


def test_each_value_says_where_it_comes_from() -> None:
    override = "scheduler.predictor={name: planted, share: 0.5}"
    origins = compose_config([override], catalogue=CATALOGUE).origins
    assert origins["scheduler.predictor.name"] == origins["scheduler.predictor.share"] == f"override {override}"
    assert origins["kv_cache.eviction"] == origins["scheduler.shadow"] == "default"


def test_what_is_active_is_listed_as_such() -> None:
    choices = [*(f"{key}=planted" for key in CATALOGUE_KEYS), "latency=needy", "latency.per_step=1"]
    active = active_components(load(*choices), CATALOGUE)
    assert {*((kind, "planted") for kind in KINDS), ("policy", "fcfs"), ("latency", "needy")} <= active


def test_an_engines_process_is_told_all_of_it_and_a_worker_nothing() -> None:
    choices = [f"{key}={{name: planted, share: 0.5}}" for key in CATALOGUE_KEYS]
    config = load(*choices, "latency=needy", "latency.per_step=0.5", "trace.path=x.jsonl")
    assert build_engine_config(config_to_values(config), CATALOGUE) == config
    values = worker_values(config)
    assert "latency" not in values
    for key in CATALOGUE_KEYS:
        group, _, leaf = key.partition(".")
        assert not [name for name in values[group] if name.startswith(leaf)]  # type: ignore[attr-defined]


def test_a_default_that_is_not_installed_is_missed_by_nobody_who_does_not_ask_for_it() -> None:
    fewer = load_engine_config(["plugins.disabled=[predictor_max_tokens]"])
    assert fewer[0].scheduler.predictor == "max_tokens"
    assert make_steering(*fewer).make_predictor is None


# The group latency


def test_latency_has_no_model_unless_one_is_chosen() -> None:
    config, catalogue = load_engine_config([])
    assert (config.latency.name, config.latency.options) == ("none", NO_OPTIONS)
    assert make_steering(config, catalogue).latency is None
    assert load("latency=none") == load()


def test_a_latency_model_is_chosen_as_a_group() -> None:
    config = load("latency=needy", "latency.per_step=0.5")
    assert (config.latency.name, config.latency.options) == ("needy", Needy(per_step=0.5))


def test_a_latency_model_may_be_chosen_by_an_argument_of_llm() -> None:
    overrides = llm_overrides(None, {"latency": "needy"})
    assert [one.override for one in overrides] == ["latency=needy"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["latency=neddy"], ("unknown latency 'neddy'", "did you mean 'needy'?", "'none' says nothing")),
        (["latency=null"], ("a component's name is needed, such as latency=none",)),
        (["latency.name=needy"], ("write latency=needy",)),
        (["latency=needy"], ("latency.per_step has no value; give it a number: latency.per_step=...",)),
        (["latency=none", "latency.per_step=1"], ("unknown key 'latency.per_step'",)),
    ],
)
def test_a_mistake_about_latency_is_one_clear_line(overrides: list[str], words: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as caught:
        load(*overrides)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "default" not in str(caught.value)


# What is made of it


class Steady(LatencyModel):
    def step_seconds(self, load: StepLoad) -> float:
        return 1.0


def test_parts_are_made_with_what_their_contexts_promise() -> None:
    contexts: list[object] = []

    def make_policy(options: object, context: PolicyContext) -> SchedulingPolicy:
        contexts.append((options, context))
        return SchedulingPolicy()

    def make_latency(options: object, context: LatencyModelContext) -> LatencyModel:
        contexts.append((options, context))
        return Steady()

    policy = PolicyDescriptor(name="own", api_version=(1, 7), options_type=Options, factory=make_policy)
    model = ComponentDescriptor(component_kind="latency", name="own", api_version=(1, 7), factory=make_latency)
    choices = [
        "scheduler=own",
        "scheduler.shadow={name: own, share: 0.75}",
        "scheduler.preempt_mode=pause",
        "scheduler.max_num_seqs=3",
        "scheduler.max_num_batched_tokens=77",
        "latency=own",
        "seed=5",
    ]
    config, catalogue = load_engine_config(choices, catalogue=catalogue_with(policy, model))
    steering = make_steering(config, catalogue)
    context = PolicyContext(
        seed=5,
        max_num_seqs=3,
        max_num_batched_tokens=77,
        max_chunk_tokens=77,
        preempt_mode=PreemptMode.PAUSE,
        has_latency=True,
    )
    assert contexts == [
        (Options(), context),
        (Options(share=0.75), context),
        (NO_OPTIONS, LatencyModelContext(max_num_batched_tokens=77, config=config)),
    ]
    assert isinstance(steering.latency, Steady)
    assert steering.policy is not steering.shadow


def test_what_makes_no_latency_model_is_refused_by_name() -> None:
    broken = ComponentDescriptor(
        component_kind="latency", name="broken", api_version=(1, 7), factory=lambda options, context: 7
    )
    config = load_engine_config(["latency=broken"], catalogue=catalogue_with(broken))
    with pytest.raises(PluginError, match="latency 'broken' is broken: its factory made a int, not a LatencyModel"):
        make_steering(*config)
