"""The file: made once, for its owner alone, and never the engine's undoing."""

from __future__ import annotations

import dataclasses
import errno
import inspect
import json
import logging
import os
import stat
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenyard.clock import VirtualClock
from tokenyard.errors import ConfigError
from tokenyard.interfaces.scheduler import Scheduler
from tokenyard.launch.compose import load_engine_config
from tokenyard.launch.tracing import check_trace, with_absolute_trace, with_numbered_trace
from tokenyard.request import EngineCoreRequest
from tokenyard.testing import EngineHarness
from tokenyard.trace.clock import CallClock
from tokenyard.trace.lines import decode_line, encode_line
from tokenyard.trace.records import Added, Sizes
from tokenyard.trace.requests import request_from_record, request_to_record
from tokenyard.trace.scheduler import TracingScheduler
from traced_runs import base_config, drive, harness, traced


def records_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class TestFile:
    def test_only_its_owner_can_read_it(self, tmp_path: Path) -> None:
        files = tmp_path / "trace.jsonl", tmp_path / "chrome.json"
        harness(traced(base_config(), *files)).close()
        assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [0o600, 0o600]

    def test_it_begins_with_a_header_and_ends_with_an_end(self, tmp_path: Path) -> None:
        path = tmp_path / "trace.jsonl"
        with harness(traced(base_config(), path)) as engine:
            engine.add([1, 2, 3], max_tokens=2)
            engine.run()
        records = records_of(path)
        assert [records[0]["call"], records[-1]["call"]] == ["header", "end"]
        assert records[0]["version"] == 1
        assert {"scheduler", "kv_cache", "engine", "seed"} <= set(records[0]["config"])  # type: ignore[call-overload]

    def test_what_was_recorded_is_there_as_soon_as_the_engine_is_idle(self, tmp_path: Path) -> None:
        path = tmp_path / "trace.jsonl"
        with harness(traced(base_config(), path)) as engine:
            engine.add([1, 2, 3], max_tokens=2)
            engine.run()
            assert records_of(path)[-1]["call"] == "idle"

    @pytest.mark.parametrize("key", ["trace.path", "trace.chrome"])
    def test_a_name_that_is_too_long_is_refused(self, tmp_path: Path, key: str) -> None:
        with pytest.raises(ConfigError, match=rf"^{key}=.*x: no such file can be made: File name too long; give"):
            check_trace(load_engine_config([f"{key}={tmp_path / ('x' * 300)}"])[0].trace)

    @pytest.mark.parametrize("key", ["trace.path", "trace.chrome"])
    def test_one_that_exists_is_refused_and_kept(self, tmp_path: Path, key: str) -> None:
        path = tmp_path / "old"
        path.write_text("precious")
        config, catalogue = load_engine_config([f"{key}={path}"])
        with pytest.raises(ConfigError, match="exists already"):
            check_trace(config.trace)
        with pytest.raises(ConfigError, match="exists already"):
            EngineHarness(config=config, catalogue=catalogue)
        assert path.read_text() == "precious"

    def test_an_engine_that_does_not_start_leaves_none(self, tmp_path: Path) -> None:
        (tmp_path / "chrome.json").write_text("precious")
        with pytest.raises(ConfigError):
            harness(traced(base_config(), tmp_path / "trace.jsonl", tmp_path / "chrome.json"))
        assert [file.name for file in tmp_path.iterdir()] == ["chrome.json"]

    @pytest.mark.parametrize(
        ("overrides", "why"),
        [
            (["trace.path=''"], "the name of a new file"),
            (["trace.path=/no/such/folder/trace.jsonl"], "a folder that exists"),
            (["trace.path=a", "trace.chrome=./a"], "another file than trace.path"),
        ],
    )
    def test_names_that_cannot_be_are_refused_before_anything_starts(self, overrides: Sequence[str], why: str) -> None:
        config, _ = load_engine_config(overrides)
        with pytest.raises(ConfigError, match=why):
            check_trace(config.trace)

    def test_another_process_writes_where_this_one_stands(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        config, _ = load_engine_config(["trace.path=a.jsonl"])
        assert with_absolute_trace(config).trace.path == str(tmp_path / "a.jsonl")

    def test_an_engine_that_is_started_again_has_a_file_of_its_own(self) -> None:
        config, _ = load_engine_config(["trace.path=/x/a.jsonl", "trace.chrome=/x/a"])
        assert with_numbered_trace(config, 1) is config
        again = with_numbered_trace(config, 2).trace
        assert (again.path, again.chrome) == ("/x/a.2.jsonl", "/x/a.2")


class TestFailures:
    def test_a_full_disk_ends_the_trace_with_one_warning_and_not_the_engine(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = tmp_path / "trace.jsonl"
        with harness(traced(base_config(), path)) as engine:
            monkeypatch.setattr(os, "write", _raise_full)
            caplog.set_level(logging.WARNING, "tokenyard.trace")
            scheduled = drive(engine, seed=1)
        with harness(base_config()) as engine:
            assert drive(engine, seed=1) == scheduled
        warnings = [record.message for record in caplog.records if record.name.startswith("tokenyard.trace")]
        assert len(warnings) == 1
        assert "the trace" in warnings[0]
        assert "No space left" in warnings[0]

    def test_a_full_disk_at_launch_is_an_error(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "write", _raise_full)
        with pytest.raises(ConfigError, match="the trace cannot be written"):
            harness(traced(base_config(), tmp_path / "trace.jsonl"))
        assert not list(tmp_path.iterdir())

    def test_metadata_that_no_trace_holds_ends_it(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        with harness(traced(base_config(), tmp_path / "trace.jsonl")) as engine:
            engine.add([1], metadata={"what": object()}, max_tokens=2)
            engine.run()
        assert "the trace" in caplog.text


def _raise_full(descriptor: int, data: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class TestCompleteness:
    """What is new in an interface must not be forgotten here."""

    def test_every_method_of_a_scheduler_is_passed_on(self) -> None:
        public = {name for name, _ in inspect.getmembers(Scheduler, inspect.isfunction) if not name.startswith("_")}
        own = set(vars(TracingScheduler))
        assert not public - own

    def test_every_field_of_a_request_is_recorded(self) -> None:
        names = {"request_id": "id", "prompt_token_ids": "prompt", "arrival_time": "arrival"}
        names |= {"client_id": "client", "session_id": "session", "parent_id": "parent"}
        fields = {names.get(field.name, field.name) for field in dataclasses.fields(EngineCoreRequest)}
        with EngineHarness() as engine:
            request = _recorded(engine)
        assert fields == set(request_to_record(request).__struct_fields__)

    def test_a_request_is_the_same_again(self) -> None:
        with EngineHarness() as engine:
            request = dataclasses.replace(
                _recorded(engine), deadline=float("inf"), request_id="a\ud800", true_output_tokens=3, retention="high"
            )
        record = Added(at=0.0, request=request_to_record(request))
        read = decode_line(encode_line(record))
        assert isinstance(read, Added)
        again = request_from_record(read.request, {})
        assert again.prompt_token_ids.tolist() == request.prompt_token_ids.tolist()
        blank = {"prompt_token_ids": None}
        assert dataclasses.replace(again, **blank) == dataclasses.replace(request, **blank)  # type: ignore[arg-type]

    def test_sizes_are_those_of_the_pool(self, tmp_path: Path) -> None:
        path = tmp_path / "trace.jsonl"
        with harness(traced(base_config(), path), (None, 3)) as engine:
            num_blocks = engine.kv.num_total
        header = decode_line(path.read_bytes().splitlines(keepends=True)[0])
        sizes: Sizes = header.sizes  # type: ignore[union-attr]
        assert sizes.num_blocks == num_blocks
        assert [group.sliding_window for group in sizes.kv_cache_groups] == [None, 3]


def _recorded(engine: EngineHarness) -> EngineCoreRequest:
    name = engine.add([1, 2, 3], max_tokens=2, logit_bias={1: -5.0}, bad_words=["x"], cache_salt="s")
    return engine.request(name).core


class TestClock:
    def test_time_stands_still_during_a_call_and_passes_between_calls(self) -> None:
        inner = VirtualClock()
        clock = CallClock(inner)
        assert clock.begin() == 0.0
        inner.wait(1.0)
        assert clock.now() == 0.0
        clock.end()
        assert clock.now() == 1.0
