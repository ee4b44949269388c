"""`logits_processors=[...]` and `model.max_logprobs`: as overrides, flags and arguments of LLM."""

from __future__ import annotations

import argparse
import dataclasses

import planted_logits as planted
import pytest
from tokenyard.cli.plugins import active_components
from tokenyard.config import EngineConfig, LogitsProcessorConfig, NoOptions
from tokenyard.errors import ConfigError, PluginError, UserError
from tokenyard.launch.compose import load_engine_config
from tokenyard.launch.flags import add_engine_flags, flags_to_overrides
from tokenyard.launch.llm_arguments import llm_overrides
from tokenyard.testing import catalogue_with

CATALOGUE = catalogue_with(planted.logits_processor(planted.ForbidsLast))


def load(*overrides: str) -> EngineConfig:
    return load_engine_config(list(overrides), catalogue=CATALOGUE)[0]


def by_flags(*arguments: str) -> EngineConfig:
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    return load(*(flagged.override for flagged in flags_to_overrides(parser.parse_args(arguments))))


def by_arguments(**arguments: object) -> EngineConfig:
    return load(*(flagged.override for flagged in llm_overrides(None, arguments)))


def told(config: EngineConfig) -> list[tuple[str, dict[str, object]]]:
    return [(row.name, dataclasses.asdict(row.options)) for row in config.logits_processors]  # type: ignore[call-overload]


def test_none_runs_unless_it_is_named() -> None:
    assert load().logits_processors == () == by_arguments(logits_processors=None).logits_processors
    assert load("logits_processors=[]").logits_processors == ()


def test_they_keep_their_order_and_have_typed_options() -> None:
    both = load("logits_processors=[{name: no_repeat_ngram, size: 3}, planted, no_repeat_ngram]")
    assert told(both) == [("no_repeat_ngram", {"size": 3}), ("planted", {}), ("no_repeat_ngram", {"size": 0})]
    assert both.logits_processors[1] == LogitsProcessorConfig(name="planted", options=NoOptions())
    assert (
        by_arguments(logits_processors=[{"name": "no_repeat_ngram", "size": 3}, "planted", "no_repeat_ngram"]) == both
    )
    assert told(by_flags("--logits-processors", "planted, no_repeat_ngram")) == [
        ("planted", {}),
        ("no_repeat_ngram", {"size": 0}),
    ]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("logits_processors=[nope]", "unknown logits_processor 'nope'; available: no_repeat_ngram, planted"),
        ("logits_processors=[no_repeat]", "did you mean 'no_repeat_ngram'"),
        ("logits_processors=[fcfs]", "unknown logits_processor 'fcfs'"),
        ("logits_processors=planted", "logits_processors must be a list of names"),
        ("logits_processors=[3]", r"logits_processors\[0\] must be a name, or a mapping with a name and options"),
        ("logits_processors=[{size: 3}]", r"logits_processors\[0\] must be a name, or a mapping"),
        (
            "logits_processors=[planted,{name: no_repeat_ngram, sise: 3}]",
            r"'logits_processors\[1\]\.sise'; did you mean",
        ),
        (
            "logits_processors=[{name: no_repeat_ngram, size: x}]",
            r"logits_processors\[0\]\.size must be a whole number",
        ),
        ("logits_processors=[{name: no_repeat_ngram, size: -1}]", "size=-1 is not valid"),
        ("logits_processor=[planted]", "did you mean 'logits_processors'"),
        ("model.max_logprobs=-2", "model.max_logprobs must be a whole number from 0 to .*, or -1 for no limit"),
        ("model.max_logprobs=1.5", "model.max_logprobs must be a whole number"),
        ("model.max_logprobs=99999999", "model.max_logprobs must be"),
    ],
)
def test_a_mistake_is_told_with_its_key_and_what_there_is(override: str, message: str) -> None:
    with pytest.raises((ConfigError, PluginError, UserError), match=message):
        load(override)


@pytest.mark.parametrize("given", ["a b", "", "a,,b", "module:Class", "[a]", "a=b"])
def test_the_flag_takes_names_alone(given: str) -> None:
    with pytest.raises(
        ConfigError, match="--logits-processors takes names of plugins with commas between, such as a,b"
    ):
        by_flags("--logits-processors", given)


def test_a_class_is_no_name() -> None:
    for given in ([planted.ForbidsLast], "planted", {"name": "planted"}, [3]):
        with pytest.raises(ConfigError, match=r"logits_processors=.*: give a list of plugins' names, or of dicts"):
            by_arguments(logits_processors=given)
    with pytest.raises(PluginError, match="unknown logits_processor 'module:Class'; available: no_repeat_ngram"):
        by_arguments(logits_processors=["module:Class"])


def test_max_logprobs_is_20_unless_told() -> None:
    assert load().model.max_logprobs == 20
    for found in (load("model.max_logprobs=-1"), by_flags("--max-logprobs", "-1"), by_arguments(max_logprobs=-1)):
        assert found.model.max_logprobs == -1
    assert by_arguments(max_logprobs=5).model.max_logprobs == 5


def test_the_listing_says_which_run() -> None:
    assert ("logits_processor", "planted") in active_components(load("logits_processors=[planted]"), CATALOGUE)
    assert ("logits_processor", "planted") not in active_components(load(), CATALOGUE)
