"""Where a model comes from, on the command line and in `LLM(...)`."""

from __future__ import annotations

import argparse
import inspect

import pytest
from tokenyard import LLM
from tokenyard.errors import ConfigError
from tokenyard.launch.compose import load_engine_config
from tokenyard.launch.flags import add_engine_flags, flags_to_overrides, refuse_unknown_flags
from tokenyard.launch.llm_arguments import llm_overrides

SECRET = "hf_canaryCANARYcanary"


def revision_of(*overrides: str) -> str | None:
    return load_engine_config(list(overrides))[0].model.revision


@pytest.mark.parametrize("revision", ["main", "refs/pr/1", "0123456789", "1e5", "null", "v1.0"])
def test_a_revision_is_text_whatever_it_looks_like(revision: str) -> None:
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    flags = flags_to_overrides(parser.parse_args(["--revision", revision]))
    assert revision_of(*(flagged.override for flagged in flags)) == revision
    arguments = llm_overrides("a/b", {"revision": revision})
    assert revision_of(*(flagged.override for flagged in arguments)) == revision


def test_without_one_there_is_none() -> None:
    assert revision_of() is None
    assert revision_of(*(flagged.override for flagged in llm_overrides("a/b", {"revision": None}))) is None


@pytest.mark.parametrize("way", [["--hf-token", SECRET], [f"--hf-token={SECRET}"]])
def test_a_token_on_the_command_line_is_refused_without_showing_it(way: list[str]) -> None:
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    with pytest.raises(ConfigError, match="set HF_TOKEN") as caught:
        parser.parse_args(way)
    assert SECRET not in str(caught.value)
    with pytest.raises(ConfigError, match="set HF_TOKEN") as caught:
        refuse_unknown_flags(way, parser)
    assert SECRET not in str(caught.value)


def test_llm_names_both_so_that_editors_show_them() -> None:
    parameters = inspect.signature(LLM).parameters
    assert parameters["revision"].kind == parameters["hf_token"].kind == inspect.Parameter.KEYWORD_ONLY


def test_a_token_is_no_override() -> None:
    with pytest.raises(ConfigError, match="no argument 'hf_token'") as caught:
        llm_overrides("a/b", {"hf_token": SECRET})
    assert SECRET not in str(caught.value)
