"""`tokenyard new-plugin`: what it writes and refuses. That the packages work is tested where they are installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tokenyard.cli import run
from tokenyard.cli.plugin_names import MAX_LENGTH, plugin_names
from tokenyard.cli.plugin_package import KINDS, package_files, write_package

LONGEST = "l" * MAX_LENGTH


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(["new-plugin", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


@pytest.mark.parametrize("kind", KINDS)
def test_it_writes_a_folder_and_says_what_everything_is_called(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["new-plugin", "Tokenyard-My.Part", "--kind", kind, "--path", str(tmp_path)]) == 0
    folder = tmp_path / "Tokenyard-My.Part"
    source = folder / "src" / "tokenyard_my_part"
    assert {path.name for path in folder.iterdir()} == {"README.md", "pyproject.toml", "src", "tests"}
    assert (source / "py.typed").is_file()
    assert (source / "configs" / KINDS[kind].group / "my_part_preset.yaml").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["Tokenyard-My.Part"]
    out = capsys.readouterr().out
    assert f"distribution Tokenyard-My.Part, module tokenyard_my_part, chosen by {KINDS[kind].group}=my_part" in out


def test_without_a_path_the_folder_is_made_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["new-plugin", "mine", "--kind", "policy"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["give the package a name"]),
        (["mine"], ["--kind", "policy", "executor"]),
        (["mine", "--kind", "polcy"], ["unknown kind 'polcy'", "policy"]),
        (["synthetic", "--kind", "workload"], ["the workload 'synthetic'", "installed already"]),
        (["linear", "--kind", "latency"], ["the latency 'linear'", "installed already"]),
        (["mine", "--kind", "policy", "--path", ""], ["--path is empty", "name the folder"]),
        (["mine", "--kind", "policy", "other"], ["unexpected argument 'other'"]),
        (["mine", "--kind", "policy", "seed=1"], ["unexpected argument 'seed=1'", "no overrides"]),
        (["mine", "--kind", "policy", "--model", "x"], ["--model"]),
        (["1st", "--kind", "policy"], ["'1st' is no name for a package", "beginning with a letter"]),
        (["../mine", "--kind", "policy"], ["'../mine' is no name"]),
        (["mine-", "--kind", "policy"], ["'mine-' is no name"]),
        (["naïve", "--kind", "policy"], ["'naïve' is no name"]),
        (["", "--kind", "policy"], ["'' is no name"]),
        (["m" * (MAX_LENGTH + 1), "--kind", "policy"], [f"up to {MAX_LENGTH} letters"]),
        (["class", "--kind", "policy"], ["'class'", "choose another name"]),
        (["null", "--kind", "policy"], ["'null'", "choose another name"]),
        (["tokenyard-2q", "--kind", "policy"], ["'2q'", "choose another name"]),
        (["fcfs", "--kind", "policy"], ["the policy 'fcfs'", "installed already"]),
        (["tokenyard-batch", "--kind", "policy"], ["'batch'", "installed already"]),
        (["json", "--kind", "policy"], ["the module 'json'", "exists here already"]),
        (["torch", "--kind", "policy"], ["the module 'torch'", "exists here already"]),
        (["tokenyard", "--kind", "policy"], ["the module 'tokenyard'", "exists here already"]),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(
    arguments: list[str],
    parts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    line = refused(capsys, *arguments)
    assert all(part in line for part in parts), line
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path / "folder", tmp_path / "file", tmp_path / "link"):
        path.mkdir() if path.name == "folder" else path.symlink_to("nowhere") if path.name == "link" else path.touch()
        assert "exists; nothing is overwritten" in refused(
            capsys, path.name, "--kind", "policy", "--path", str(tmp_path)
        )
    assert list((tmp_path / "folder").iterdir()) == []


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for name in ("file", "missing"):
        line = refused(capsys, "mine", "--kind", "policy", "--path", str(tmp_path / name))
        assert f"there is no folder '{tmp_path / name}'" in line


def test_an_error_while_writing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Path.write_text

    def full(path: Path, *arguments: str, **options: str) -> int:
        if path.suffix == ".yaml":
            raise OSError(28, "No space left on device", str(path))
        return write(path, *arguments, **options)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        write_package(tmp_path, "mine", package_files("policy", plugin_names("mine")))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["x", "my-part", LONGEST], ids=["short", "usual", "longest"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_formatted_and_lint_free_whatever_its_name(kind: str, name: str, tmp_path: Path) -> None:
    folder = write_package(tmp_path, name, package_files(kind, plugin_names(name)))
    for command in (["check", "--no-cache", "."], ["format", "--no-cache", "--check", "."]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command], cwd=folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout
