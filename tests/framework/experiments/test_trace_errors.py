"""Bad traces: one line with the file, the row and the column, what was given and what is allowed."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from tokenyard.errors import ConfigError
from trace_workloads import trace_requests, write_jsonl, write_servegen

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
GOOD = "2023-11-16 18:15:46.6805900,374,44\n"
ROW = {"arrival": 0.5, "prompt": 3, "output": 4}
BURSTGPT = "Timestamp,Model,Request tokens,Response tokens\n"


def error(path: Path | str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        trace_requests(path, *overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("rows", "where", "why"),
    [
        ("yesterday,1,1\n", "row 2 (line 3), column 'TIMESTAMP'", "a time such as"),
        ("2023-02-30 18:15:46,1,1\n", "row 2 (line 3), column 'TIMESTAMP'", "a time such as"),
        ("2023-11-16 18:15:46.0,1,1\n", "row 2 (line 3), column 'TIMESTAMP'", "sort the file"),
        ("2023-11-16 18:15:47,-1,1\n", "row 2 (line 3), column 'ContextTokens'", "got '-1'; it must be a whole number"),
        ("2023-11-16 18:15:47,1.5,1\n", "row 2 (line 3), column 'ContextTokens'", "whole number"),
        ("2023-11-16 18:15:47,nan,1\n", "row 2 (line 3), column 'ContextTokens'", "whole number"),
        (f"2023-11-16 18:15:47,{2**63},1\n", "row 2 (line 3), column 'ContextTokens'", "2147483647"),
        ("2023-11-16 18:15:47,1_0,1\n", "row 2 (line 3), column 'ContextTokens'", "whole number"),
        ("2023-11-16 18:15:47,1,0\n", "row 2 (line 3), column 'GeneratedTokens'", "workload.zero_length=skip"),
        ("2023-11-16 18:15:47,0,1\n", "row 2 (line 3), column 'ContextTokens'", "workload.zero_length=skip"),
        ("2023-11-16 18:15:47,,1\n", "row 2 (line 3), column 'ContextTokens'", "got ''"),
        ("2023-11-16 18:15:47,1\n", "row 2 (line 3)", "has 2 columns; the header has 3"),
        ("2023-11-16 18:15:47,1,1,1\n", "row 2 (line 3)", "has 4 columns"),
        ('"2023-11-16 18:15:47,1,1\n', "row 1 (line 3)", "is not CSV"),
        ("2023-11-16 18:15:47\0,1,1\n", "line 3", "zero byte"),
    ],
)
def test_a_row_of_a_csv_file_is_named(tmp_path: Path, rows: str, where: str, why: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(HEADER + GOOD + rows)
    message = error(path)
    assert message.startswith(f"{path}: {where}")
    assert why in message


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ("TIMESTAMP,ContextTokens\n", "column 'GeneratedTokens': missing"),
        ("TIMESTAMP,ContextTokens,GeneratedToken\n", "did you mean 'GeneratedToken'?"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens,ContextTokens\n", "column 'ContextTokens': is there twice"),
    ],
)
def test_a_header_that_lacks_a_column_is_told_at_once(tmp_path: Path, header: str, why: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(header + GOOD)
    assert "row 0 (line 1)" in error(path)
    assert why in error(path)


@pytest.mark.parametrize(
    ("change", "column", "why"),
    [
        ({"arrival": -1}, "arrival", "at least 0"),
        ({"arrival": 0.25}, "arrival", "sort the file"),
        ({"arrival": "1"}, "arrival", "a time"),
        ({"arrival": True}, "arrival", "a time"),
        ({"arrival": 1e300}, "arrival", "a time"),
        ({"arrival": 10**400}, "arrival", "a time"),
        ({"arrival": 1.7e12}, "arrival", "milliseconds"),
        ({"prompt": 1.0}, "prompt", "whole number"),
        ({"prompt": "1"}, "prompt", "whole number"),
        ({"prompt": None}, "prompt", "got nothing"),
        ({"prompt": 2**63}, "prompt", "2147483647"),
        ({"output": 0}, "output", "workload.zero_length=skip"),
        ({"client": ""}, "client", "1 to 256 characters"),
        ({"client": 7}, "client", "text"),
        ({"session": "s" * 300}, "session", "1 to 256 characters"),
        ({"priority": 0.5}, "priority", "whole number"),
        ({"priority": 2**53 + 1}, "priority", "2**53"),
        ({"deadline": 0}, "deadline", "above 0"),
        ({"deadline": -1}, "deadline", "at least 0"),
        ({"hash_ids": [1, 2]}, "hash_ids", "a list of 1 ids"),
        ({"hash_ids": [-1]}, "hash_ids", "whole numbers from 0"),
        ({"hash_ids": "1"}, "hash_ids", "a list of 1 ids"),
        ({"promt": 4}, "promt", "did you mean 'prompt'?"),
    ],
)
def test_a_member_of_a_json_row_is_named(tmp_path: Path, change: dict[str, object], column: str, why: str) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", [ROW, {**ROW, **change}])
    message = error(path, "workload.format=jsonl")
    assert message.startswith(f"{path}: row 2 (line 2), column '{column}'")
    assert why in message


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"arrival": 1, "prompt": 1}', "column 'output'"),
        ('{"arrival": 1, "arrival": 2, "prompt": 1, "output": 1}', "the key 'arrival' is there twice"),
        ('{"arrival": NaN, "prompt": 1, "output": 1}', "NaN is not a number"),
        ('{"arrival": -Infinity, "prompt": 1, "output": 1}', "-Infinity is not a number"),
        ('{"arrival": 1, "prompt": 1, "output":', "is not JSON"),
        ("[1, 2, 3]", "is not a JSON object"),
        ("[" * 100_000, "nested too deeply"),
        ("9" * 5000, "not valid"),
    ],
)
def test_a_line_that_is_no_row_is_named(tmp_path: Path, line: str, why: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(f"{json.dumps(ROW)}\n{line}\n")
    assert "row 2 (line 2)" in error(path)
    assert why in error(path)


@pytest.mark.parametrize(
    ("rows", "column", "why"),
    [
        ("inf,GPT-4,1,1\n", "Timestamp", "at least 0"),
        ("-5,GPT-4,1,1\n", "Timestamp", "at least 0"),
        ("5,GPT-4,0,1\n", "Request tokens", "workload.zero_length=skip"),
        ("5,GPT-4,1,x\n", "Response tokens", "whole number"),
    ],
)
def test_a_burstgpt_row_is_named(tmp_path: Path, rows: str, column: str, why: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(BURSTGPT + rows)
    assert f"row 1 (line 2), column '{column}'" in error(path)
    assert why in error(path)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "the file is empty"),
        (b"\n\n", "the file is empty"),
        (HEADER.encode(), "there are no rows"),
        (b"a,b,c\n1,2,3\n", "unknown format"),
        (b'{"a": 1}\n', "unknown format"),
        (b"\x00\x01\x02", "zero byte"),
        (b"\xff\xfe\x00", "zero byte"),
        (b"\x89PNG\r\n", "not UTF-8 text"),
        (gzip.compress(b"x" * 5000)[:-9], "damaged or cut off"),
        (b"\x1f\x8bnot gzip at all", "damaged or cut off"),
        (b"x" * (2**22 + 1), "longer than"),
        (HEADER.encode().strip() + b"\r1,2,3\r", "row 1 (line 1): is not CSV"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "t"
    path.write_bytes(content)
    assert error(path).startswith(f"{path}: ")
    assert why in error(path)


def test_a_file_of_failures_alone_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"{BURSTGPT}5,GPT-4,1,0\n")
    assert "all 1 rows were left out: 1 without output" in error(path)


def test_what_a_path_can_be_is_told(tmp_path: Path) -> None:
    assert "no such file" in error(tmp_path / "missing.csv")
    assert "only format servegen is one" in error(tmp_path, "workload.format=azure")
    assert "CLIENT-trace.csv" in error(tmp_path)
    assert "read more than once" in error("/dev/null")
    assert "did you mean 'azure2023_conv'?" in error("packaged:azure2023_con")
    assert "workload.path is empty" in error(" ")


def test_a_trace_that_was_not_fetched_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENYARD_CACHE", str(tmp_path))
    assert "run `tokenyard fetch-trace burstgpt` first" in error("fetched:burstgpt")


def test_an_unknown_format_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "t", [ROW])
    assert "did you mean 'mooncake'?; there is: azure, mooncake, burstgpt" in error(path, "workload.format=moncake")


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("workload.rate_scale=0", "above 0"),
        ("workload.rate_scale=nan", "above 0"),
        ("workload.rate_scale=2", "workload.time_scale"),
        ("workload.max_request_tokens=1", "from 2"),
        ("workload.tokens_per_hash=0", "from 1"),
        ("workload.zero_length=maybe", "workload.zero_length"),
    ],
)
def test_an_option_that_does_not_hold_is_refused(tmp_path: Path, override: str, why: str) -> None:
    assert why in error(write_jsonl(tmp_path / "t", [ROW]), override)


@pytest.mark.parametrize(
    ("rates", "where", "why"),
    [
        ("600,1,1,Gamma,0.5\n", "row 1 (line 1)", "has 5 columns"),
        ("600,-1,1,Gamma,0.5,1\n", "column 'rate'", "at least 0"),
        ("600,nan,1,Gamma,0.5,1\n", "column 'rate'", "at least 0"),
        ("600,1,1,Poisson,0.5,1\n", "column 'pattern'", "Gamma or Weibull"),
        ("600,1,1,Gamma,0,1\n", "column 'pattern'", "shape"),
        ("600,1,1,Gamma,1,1\n600,1,1,Gamma,1,1\n", "row 2 (line 2), column 'start'", "order of time"),
        ("600,1e99,1,Gamma,1,1\n", "column 'rate'", "requests a second"),
        ("600,0,0,,0,0\n", "one-trace.csv", "all rates are 0"),
        ("", "one-trace.csv", "the file is empty"),
    ],
)
def test_a_servegen_window_is_named(tmp_path: Path, rates: str, where: str, why: str) -> None:
    path = write_servegen(tmp_path, "one")
    path.write_text(rates)
    assert where in error(path)
    assert why in error(path)


@pytest.mark.parametrize(
    ("text", "why"),
    [("{1: 0.5, 2}", "text such as"), ("[1]", "text such as"), ("{1: 0}", "above 0"), ("{9999999999: 1}", "lengths")],
)
def test_a_servegen_distribution_is_named(tmp_path: Path, text: str, why: str) -> None:
    path = write_servegen(tmp_path, "one")
    write_jsonl(tmp_path / "one-dataset.json", [{"600": {"input_tokens": "{1: 1}", "output_tokens": text}}])
    assert "column 'output_tokens'" in error(path)
    assert why in error(path)


def test_a_servegen_client_without_lengths_is_refused(tmp_path: Path) -> None:
    path = write_servegen(tmp_path, "one")
    (tmp_path / "one-dataset.json").unlink()
    assert "no one-dataset.json beside it" in error(path)
