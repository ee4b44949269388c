"""A file that is cut, broken, of another version or of another installation is told as what it is."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenyard.errors import PluginError, UserError
from tokenyard.replay.run import replay
from traced_runs import SMALL, base_config, drive, harness, lines_of, traced, with_sizes, write_lines


class TestBrokenFiles:
    def test_a_last_line_that_was_cut_is_left_out_with_a_note(self, trace: Path) -> None:
        text = trace.read_text()
        trace.write_text(text[: len(text) - len(text.splitlines()[-1]) // 2])
        result = replay(trace)
        assert result.difference is None
        assert "was killed" in " ".join(result.notes)

    def test_a_trace_without_an_end_says_so(self, trace: Path) -> None:
        write_lines(trace, lines_of(trace)[:-1])
        assert "has no end" in " ".join(replay(trace).notes)

    def test_a_line_in_the_middle_that_was_cut_is_an_error_with_its_number(self, trace: Path) -> None:
        lines = trace.read_text().splitlines()
        lines[4] = lines[4][:20]
        trace.write_text("\n".join(lines) + "\n")
        with pytest.raises(UserError, match="line 5: no record of a trace"):
            replay(trace)

    @pytest.mark.parametrize("content", ["", "{}\n", "not json\n", "[1]\n", '{"call": "schedule"}\n', "\x00\n"])
    def test_what_is_no_trace_is_refused(self, tmp_path: Path, content: str) -> None:
        path = tmp_path / "x.jsonl"
        path.write_text(content)
        with pytest.raises(UserError, match="is no trace"):
            replay(path)

    def test_another_format_version_is_refused(self, trace: Path) -> None:
        lines = lines_of(trace)
        lines[0]["version"] = 2
        write_lines(trace, lines)
        with pytest.raises(UserError, match="format version 2"):
            replay(trace)

    def test_a_file_that_is_not_there_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="cannot be read"):
            replay(tmp_path / "missing")

    def test_what_is_no_regular_file_is_refused_at_once(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        for path in (tmp_path / "pipe", tmp_path):
            with pytest.raises(UserError, match="it is no regular file"):
                replay(path)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("num_blocks", 10**9),
            ("num_blocks", 10**30),
            ("num_blocks", 0),
            ("num_host_blocks", -1),
            ("num_host_blocks", 10**13),
            ("max_model_len", -1),
            ("max_model_len", 10**9),
            ("vocab_size", 0),
            ("kv_cache_groups", []),
            ("kv_cache_groups", [[1, 1, None]] * 1000),
            ("kv_cache_groups", [[1, 1, -4]]),
            ("kv_cache_groups", [[1, 0, None]]),
        ],
    )
    def test_a_size_that_cannot_be_is_refused_by_name(self, trace: Path, name: str, value: object) -> None:
        lines = lines_of(trace)
        lines[0]["sizes"][name] = value
        write_lines(trace, lines)
        with pytest.raises(UserError, match=rf"line 1: no record of a trace: .*\$\.sizes\.{name}") as caught:
            replay(trace)
        assert "\n" not in str(caught.value)

    @settings(max_examples=40, deadline=None)
    @given(data=st.data())
    def test_no_change_of_bytes_does_worse_than_an_error_of_ours(self, data: st.DataObject) -> None:
        content = bytearray(_short_trace())
        for _ in range(data.draw(st.integers(1, 4))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "x.jsonl"
            path.write_bytes(bytes(content))
            with contextlib.suppress(UserError):
                replay(path)


def _short_trace() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.jsonl"
        with harness(traced(with_sizes(base_config(), SMALL), path)) as engine:
            drive(engine, seed=1, num_turns=6)
        return path.read_bytes()


class TestInstallation:
    def test_a_policy_that_is_not_installed_is_named_with_its_distribution(self, trace: Path) -> None:
        lines = lines_of(trace)
        lines[0]["config"]["scheduler"]["policy"] = {"name": "gone"}
        lines[0]["components"] = [["policy", "gone", "their-package", "1.2"]]
        write_lines(trace, lines)
        with pytest.raises(PluginError, match=r"recorded with policy 'gone' of their-package 1\.2, not installed here"):
            replay(trace)

    def test_another_version_of_a_component_is_noted(self, trace: Path) -> None:
        lines = lines_of(trace)
        for component in lines[0]["components"]:
            if component[0] == "policy":
                component[3] = "0.0.1"
        write_lines(trace, lines)
        result = replay(trace)
        assert result.difference is None
        assert any("policy 'priority' was recorded from tokenyard 0.0.1" in note for note in result.notes)

    def test_backends_and_executors_of_another_machine_are_not_needed(self, trace: Path) -> None:
        lines = lines_of(trace)
        lines[0]["config"]["attention"] = {"name": "flashattention_9"}
        lines[0]["config"]["executor"]["name"] = "ray"
        lines[0]["config"]["engine"]["name"] = "their_loop"
        lines[0]["components"].append(["engine", "their_loop", "their-package", "1"])
        write_lines(trace, lines)
        assert replay(trace).difference is None
