"""Flags that people know, and quoting."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenyard.errors import ConfigError
from tokenyard.launch.compose import compose_config
from tokenyard.launch.flags import (
    _UNAVAILABLE,
    add_engine_flags,
    flags_to_overrides,
    parse_length,
    quote_override,
    refuse_unknown_flags,
    visible_options,
)
from tokenyard.launch.nodes import generated_nodes
from tokenyard.launch.session import HydraSession, hydra_session

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tokenyard.catalogue import Catalogue


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    return parser


def _overrides(arguments: Sequence[str]) -> list[str]:
    return [flagged.override for flagged in flags_to_overrides(_parser().parse_args(arguments))]


@pytest.fixture(scope="module")
def session(catalogue: Catalogue) -> Iterator[HydraSession]:
    with hydra_session(generated_nodes(catalogue, lambda path: True), []) as opened:
        yield opened


AWKWARD = [
    "/ckpt/epoch=3.gguf",
    "C:\\models\\new folder\\x.gguf",
    "a b, c: d@e*f#g$h",
    "${x}",
    "\\${x}",
    "\\\\${x}",
    "$${x}}{",
    "{a: [b]}",
    'say "hi"',
    "it's",
    "'\"'",
    '\\"',
    "\\",
    "\\\\",
    'ends with \\"\\',
    "line\nbreak\ttab",
    " blanks ",
    "",
    "null",
    "true",
    "123",
    "1e3",
    "~/x",
    "=",
    "naïve 模型 🙂",
    "(paren",
    "%d|?",
]


@pytest.mark.parametrize("text", AWKWARD)
def test_hyd_01_any_text_comes_back_as_it_was_given(text: str, session: HydraSession) -> None:
    config = session.compose([quote_override("model.name", text)])
    assert config.model.name == text
    assert type(config.model.name) is str


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.one_of(st.text(max_size=20), st.text(alphabet="\\\"'${}x= ,:", max_size=12)))
@example("\\\\\\${x}\\")
def test_hyd_01_quoting_is_lossless_for_every_text(session: HydraSession, text: str) -> None:
    if text != "???":
        assert session.compose([quote_override("model.name", text)]).model.name == text


def test_the_one_text_that_means_no_value_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"\?\?\?"):
        quote_override("model.name", "???")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--model", "/a=b"], ['model.name="/a=b"']),
        (["--dtype", "bfloat16"], ['model.dtype="bfloat16"']),
        (["--max-model-len", "2k"], ["model.max_model_len=2000"]),
        (["--max-model-len", "2K"], ["model.max_model_len=2048"]),
        (["--max-model-len=1.5k"], ["model.max_model_len=1500"]),
        (["--max-model-len", "1m"], ["model.max_model_len=1000000"]),
        (["--max-model-len", "auto"], ["model.max_model_len=-1"]),
        (["--max-model-len", "-1"], ["model.max_model_len=-1"]),
        (["--max-model-len=-1"], ["model.max_model_len=-1"]),
        (["--seed", "3"], ["seed=3"]),
        (["--max-num-seqs", "8"], ["scheduler.max_num_seqs=8"]),
        (["--max-num-batched-tokens", "4K"], ["scheduler.max_num_batched_tokens=4096"]),
        (["--enable-chunked-prefill"], ["scheduler.enable_chunked_prefill=true"]),
        (["--no-enable-chunked-prefill"], ["scheduler.enable_chunked_prefill=false"]),
        (["--long-prefill-token-threshold", "5"], ["scheduler.long_prefill_token_threshold=5"]),
        (["--scheduling-policy", "wspt"], ['scheduler="wspt"']),
        (["--block-size", "8"], ["kv_cache.block_size=8"]),
        (["--num-gpu-blocks-override", "99"], ["kv_cache.num_blocks=99"]),
        (["--gpu-memory-utilization", "0.5"], ["kv_cache.gpu_memory_utilization=0.5"]),
        (["--enforce-eager"], ["executor.enforce_eager=true"]),
        (["--no-enforce-eager"], ["executor.enforce_eager=false"]),
        (["--cudagraph-capture-sizes", "1,2, 0.05k"], ["executor.cudagraph_capture_sizes=[1,2,50]"]),
        (["--kv-cache-memory-bytes", "1024"], ["kv_cache.memory=1024"]),
        (["--kv-cache-memory-bytes", "1GiB"], ['kv_cache.memory="1GiB"']),
        (["--no-enable-prefix-caching"], ["kv_cache.enable_prefix_caching=false"]),
        (["--attention-backend", "torch_native"], ['attention="torch_native"']),
        (["--distributed-executor-backend", "inproc"], ['executor="inproc"']),
        (["-tp", "1", "--pipeline-parallel-size=1"], ["executor.tensor_parallel_size=1"]),
        (
            ["--distributed-executor-backend=multiproc", "--tensor-parallel-size=2"],
            ['executor="multiproc"', "executor.tensor_parallel_size=2"],
        ),
        (["--kv-cache-dtype", "auto", "--load-format=auto", "--chat-template-content-format", "auto"], []),
        (["-pp", "1", "-asc", "1", "--runner=auto", "--convert", "auto", "--tokenizer-mode", "auto"], []),
        (["--config-format", "auto", "--generation-config=auto", "--cpu-offload-gb", "0"], []),
        ([], []),
    ],
)
def test_a_flag_is_an_override(arguments: list[str], expected: list[str], catalogue: Catalogue) -> None:
    assert _overrides(arguments) == expected
    compose_config(expected, catalogue=catalogue)


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        (["--max-num-seqs", "many"], "--max-num-seqs"),
        (["--max-model-len", "1.2345k"], "--max-model-len"),
        (["--seed", "x"], "--seed"),
        (["--gpu-memory-utilization", "half"], "--gpu-memory-utilization"),
        (["--quantization", "awq"], "--quantization"),
        (["-tp", "two"], "--tensor-parallel-size"),
        (["-pp", "2"], "-pp"),
        (["--data-parallel-size=4"], "--data-parallel-size"),
        (["--trust-remote-code"], "--trust-remote-code"),
        (["--speculative-config", "{}"], "--speculative-config"),
        (["--enable-lora"], "--enable-lora"),
        (["--kv-cache-dtype=fp8"], "--kv-cache-dtype fp8 is not available in this version; the only value is auto"),
        (["--return-tokens-as-token-ids"], "--return-tokens-as-token-ids is not available"),
        (["--enable-prompt-tokens-details"], "--enable-prompt-tokens-details is not available"),
        (["--exclude-tools-when-tool-choice-none"], "--exclude-tools-when-tool-choice-none is not available"),
        (["--task", "generate"], "--task is not available"),
        (["--disable-frontend-multiprocessing"], "--disable-frontend-multiprocessing is not available"),
        (["--max-cudagraph-capture-size", "64"], "--max-cudagraph-capture-size"),
        (["--cudagraph-capture-sizes", "1 2"], "--cudagraph-capture-sizes"),
    ],
)
def test_a_flag_that_cannot_be_served_is_refused_by_its_name(arguments: list[str], flag: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _overrides(arguments)
    assert str(caught.value).startswith(flag)
    assert "\n" not in str(caught.value)


def test_an_unknown_flag_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean '--max-num-seqs'"):
        refuse_unknown_flags(["x=1", "--max-num-seq", "3"], _parser())


def test_the_dotted_form_of_an_unavailable_flag_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError, match=r"--speculative-config\.method is not available"):
        refuse_unknown_flags(["--speculative-config.method=ngram"], _parser())


def test_the_negated_form_of_an_unavailable_flag_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError, match=r"--no-enable-lora is not available"):
        refuse_unknown_flags(["--no-enable-lora"], _parser())


@pytest.mark.parametrize("flag", ["--enable-lor", "--enable-prompt-embed", "--quantizatio", "--load-forma", "--por"])
def test_a_flag_that_is_refused_itself_is_not_suggested(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown flag {flag}") as caught:
        refuse_unknown_flags([flag], _parser())
    for suggested in re.findall(r"'(.*?)'", str(caught.value)):
        assert suggested in visible_options(_parser())
        assert suggested not in _UNAVAILABLE


def test_abbreviations_are_off() -> None:
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    assert parser.parse_known_args(["--max-num-s", "3"])[1] == ["--max-num-s", "3"]


def test_a_command_may_have_a_flag_of_ours_with_its_own_meaning() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--seed", action="store_true")
    add_engine_flags(parser, own=["--port", "--seed"])
    namespace = parser.parse_args(["--port", "3", "--seed"])
    assert (namespace.port, flags_to_overrides(namespace)) == (3, [])


@pytest.mark.parametrize(
    ("text", "number"), [("0", 0), ("25.6k", 25600), ("1K", 1024), ("", None), ("-1", None), ("k", None)]
)
def test_lengths_are_read_as_vllm_reads_them(text: str, number: int | None) -> None:
    assert parse_length(text) == number
