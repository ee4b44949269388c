"""How cpu_native's kernels are built and kept, and what runs where they cannot be."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from tokenyard.interfaces import AttentionBackendContext, AttentionSpec
from tokenyard_backends.cpu_native import build, cache, plugin
from tokenyard_backends.cpu_native.backend import CpuNativeBackend, make_backend
from tokenyard_backends.cpu_native.build import BuildError, ask_version, find_compilers
from tokenyard_backends.cpu_native.cache import load_kernels
from tokenyard_backends.torch_native.backend import TorchNativeBackend

_REAL = shutil.which("c++") or ""
_SPEC = AttentionSpec(
    device_type="cpu", dtype="float32", num_heads=2, num_kv_heads=1, head_dim=8, v_head_dim=8, block_size=4
)
_CONTEXT = AttentionBackendContext(spec=_SPEC, device=torch.device("cpu"), num_threads=1)

needs_compiler = pytest.mark.skipif(not _REAL, reason="no c++ here")


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, no compiler named, and code that is compiled fast rather than fast code."""
    monkeypatch.setattr(build, "FLAGS", [flag.replace("-O3", "-O0") for flag in build.FLAGS])
    monkeypatch.setenv("TOKENYARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path / "cache" / "cpu_native"


def script(path: Path, body: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def fake_compiler(path: Path, body: str) -> Path:
    """Answers --version, and does `body` for anything else."""
    return script(path, f'if [ "$1" = --version ]; then echo fake 1.0; exit 0; fi\n{body}')


def recording_compiler(folder: Path) -> tuple[Path, Path]:
    """The real one, and a file that gets a line each time it compiles."""
    log = folder / "compiled.log"
    return script(
        folder / "recording-c++", f'[ "$1" = --version ] || echo compiled >> "{log}"\nexec "{_REAL}" "$@"'
    ), log


def num_compiled(log: Path) -> int:
    return len(log.read_text().splitlines()) if log.exists() else 0


def fallen_back(caplog: pytest.LogCaptureFixture) -> str:
    """The reason that the backend gives; exactly one warning gives it too."""
    caplog.clear()
    backend = make_backend(_CONTEXT)
    assert type(backend) is TorchNativeBackend
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "\n" not in record.getMessage()
    kind, _, reason = backend.description.partition(": ")
    assert kind == "torch_native"
    assert f"attention=cpu_native runs as torch_native: {reason}; install" in record.getMessage()
    return reason


# ---- Without a compiler that works ----------------------------------------------------------------------------------


def test_without_a_compiler_torch_native_runs_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert fallen_back(caplog) == "no C++ compiler found (tried c++, g++, clang++)"


def test_a_compiler_named_in_cxx_is_the_only_one_tried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "/no/such/c++ -O1")
    assert fallen_back(caplog) == "no C++ compiler found (CXX=/no/such/c++ -O1 is not on PATH)"
    monkeypatch.setenv("CXX", "c++ 'open")
    assert fallen_back(caplog) == 'CXX="c++ \'open" is not a command: No closing quotation'


def test_the_first_error_of_a_broken_compiler_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    body = "echo 'In file included from here:'; echo 'x.h:3: fatal error: no cstdint' >&2; echo more error; exit 1"
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path / "fake", body)))
    assert fallen_back(caplog) == "fake failed: x.h:3: fatal error: no cstdint"
    fake_compiler(tmp_path / "fake", "exit 3")
    assert fallen_back(caplog) == "fake failed: exit status 3"
    fake_compiler(tmp_path / "fake", "exit 0")
    assert fallen_back(caplog) == "fake said nothing and wrote nothing"
    script(tmp_path / "fake", "echo unlicensed; exit 1")
    assert fallen_back(caplog) == "fake failed: unlicensed"


def test_a_compiler_that_is_no_program_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    script(tmp_path / "fake", "").write_bytes(b"\x00\x01 no program")
    monkeypatch.setenv("CXX", str(tmp_path / "fake"))
    assert fallen_back(caplog) == "fake does not run: Exec format error"


def is_running(process: int) -> bool:
    try:
        return (Path("/proc") / str(process) / "stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_compiler_that_hangs_is_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    body = f'sleep 1000 & echo $! > "{tmp_path}/child"; wait'
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path / "fake", body)))
    monkeypatch.setattr(build, "_SECONDS", 1.0)
    assert fallen_back(caplog) == "fake did not finish within 1 s"
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 30  # a process that was killed is gone when the scheduler gets to it
    while is_running(child):
        assert time.monotonic() < deadline, "it lives on"


def test_what_the_compiler_makes_must_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    body = 'while [ "$1" != -o ]; do shift; done; echo no library > "$2"'
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path / "fake", body)))
    assert fallen_back(caplog).startswith("the compiled kernels do not load: ")


def test_no_shell_reads_the_name_of_the_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake = fake_compiler(tmp_path / "fake", "exit 1")
    monkeypatch.setenv("CXX", f"{fake} $(touch {tmp_path}/touched) ; touch {tmp_path}/touched")
    fallen_back(caplog)
    assert not (tmp_path / "touched").exists()


def test_without_a_folder_to_build_in_torch_native_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path / "fake", "exit 1")))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    assert fallen_back(caplog).startswith("nothing can be built here: [Errno 2] No such file")


def test_windows_is_refused_with_a_reason(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(BuildError, match="on Linux and macOS only"):
        find_compilers()


# ---- The choice of a compiler ---------------------------------------------------------------------------------------


@needs_compiler
def test_one_program_under_two_names_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "c++").symlink_to(_REAL)
    (tmp_path / "g++").symlink_to(_REAL)
    script(tmp_path / "clang++", "exit 1")
    assert find_compilers() == [(str(tmp_path / "c++"),), (str(tmp_path / "clang++"),)]


@needs_compiler
def test_the_next_compiler_is_tried_where_one_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "bin"
    fake_compiler(folder / "c++", "exit 1")
    real = recording_compiler(tmp_path)[0]
    (folder / "clang++").symlink_to(real)
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", f"{folder}:{path}")
    monkeypatch.setattr(build, "COMPILERS", ("c++", "clang++"))
    assert load_kernels().isa


@needs_compiler
def test_cxx_may_have_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", f"{_REAL} -g0 -DNAME='two words'")
    assert isinstance(make_backend(_CONTEXT), CpuNativeBackend)


# ---- The cache ------------------------------------------------------------------------------------------------------


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The log of a compiler that works."""
    compiler, log = recording_compiler(tmp_path)
    monkeypatch.setenv("CXX", str(compiler))
    return log


@needs_compiler
def test_kernels_are_compiled_once_and_kept(kept: Path, compiled: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    load_kernels()
    assert [record.getMessage().split(" in ")[0] for record in caplog.records] == [
        f"attention=cpu_native compiled its kernels for this CPU ({load_kernels().isa})"
    ]
    load_kernels()
    assert num_compiled(compiled) == 1
    (file,) = kept.iterdir()
    assert not stat.S_IMODE(file.stat().st_mode) & 0o022


@needs_compiler
@pytest.mark.parametrize("damage", ["cut", "changed", "emptied"])
def test_a_damaged_file_is_told_and_built_again(
    kept: Path, compiled: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    load_kernels()
    (file,) = kept.iterdir()
    content = file.read_bytes()
    middle = len(content) // 2
    changed = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    damaged = {"cut": content[:middle], "changed": changed, "emptied": b""}[damage]
    file.unlink()  # the library is loaded from it: writing into it would change the code that runs
    file.write_bytes(damaged)
    assert load_kernels().isa
    assert f"builds its kernels again: {file}: it is damaged" in caplog.text
    assert num_compiled(compiled) == 2
    (again,) = kept.iterdir()
    assert again.read_bytes() == content


@needs_compiler
@pytest.mark.parametrize("other", ["text", "library"])
def test_a_kept_file_that_is_no_kernels_is_told_and_built_again(
    kept: Path, compiled: Path, caplog: pytest.LogCaptureFixture, other: str
) -> None:
    library = Path(torch.__file__).parent / "lib" / "libtorch.so"
    content = b"no library" if other == "text" else library.read_bytes()
    load_kernels()
    (good,) = kept.iterdir()
    key = good.stem.partition("-")[0]
    good.unlink()
    wrong = kept / f"{cache._stem(key, content)}.so"
    wrong.write_bytes(content)
    assert load_kernels().isa
    assert f"builds its kernels again: {wrong}" in caplog.text
    assert list(kept.iterdir()) == [good]


@needs_compiler
def test_kernels_of_another_cpu_flags_or_source_are_left_alone(
    kept: Path, compiled: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    load_kernels()
    with monkeypatch.context() as patch:
        patch.setattr(cache, "cpu_identity", lambda: "another CPU")
        load_kernels()
        assert (num_compiled(compiled), len(list(kept.iterdir()))) == (2, 2)
    with monkeypatch.context() as patch:
        patch.setattr(build, "FLAGS", [*build.FLAGS, "-DOTHER"])
        load_kernels()
        assert (num_compiled(compiled), len(list(kept.iterdir()))) == (3, 3)
    sources = shutil.copytree(build.SOURCES, tmp_path / "sources")
    (sources / "job.h").write_text((sources / "job.h").read_text() + "// changed\n")
    with monkeypatch.context() as patch:
        patch.setattr(cache, "SOURCES", sources)
        load_kernels()
        assert num_compiled(compiled) == 4
    load_kernels()
    assert num_compiled(compiled) == 4


@needs_compiler
@pytest.mark.parametrize("obstacle", ["a file", "read-only"])
def test_without_a_cache_folder_they_are_built_for_this_process_and_it_is_told(
    kept: Path, compiled: Path, caplog: pytest.LogCaptureFixture, tmp_path: Path, obstacle: str
) -> None:
    if obstacle == "a file":
        kept.parent.write_text("not a folder")
    elif os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    else:
        kept.parent.mkdir(mode=0o500)
    for turn in (1, 2):
        caplog.clear()
        assert isinstance(make_backend(_CONTEXT), CpuNativeBackend)
        assert num_compiled(compiled) == turn
        assert f"cannot keep its compiled kernels, and compiles them at every start: {kept}: " in caplog.text
        assert "set TOKENYARD_CACHE to a folder that can be written" in caplog.text


@needs_compiler
def test_a_folder_that_others_can_write_to_is_neither_read_nor_written(
    kept: Path, compiled: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever writes a library there would run in this process."""
    load_kernels()
    planted = list(kept.iterdir())
    for mode in (0o777, 0o775):
        kept.chmod(mode)
        count = num_compiled(compiled)
        load_kernels()
        assert num_compiled(compiled) == count + 1
        assert "other users can write there" in caplog.text
        assert list(kept.iterdir()) == planted
    kept.chmod(0o755)
    assert load_kernels().isa
    assert num_compiled(compiled) == count + 1


@needs_compiler
def test_its_own_folder_is_not_writable_by_others_whatever_the_umask(kept: Path, compiled: Path) -> None:
    before = os.umask(0)
    try:
        load_kernels()
    finally:
        os.umask(before)
    assert not kept.stat().st_mode & 0o022


@needs_compiler
def test_a_user_without_a_home_folder_gets_kernels_that_are_not_kept(
    kept: Path, compiled: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("TOKENYARD_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", fail)
    assert load_kernels().isa
    assert "this user has no home folder; set TOKENYARD_CACHE" in caplog.text


@needs_compiler
def test_what_is_written_in_the_cache_folder_and_fails_leaves_nothing(
    kept: Path, compiled: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert load_kernels().isa
    assert "No space left on device" in caplog.text
    assert list(kept.iterdir()) == []


@needs_compiler
def test_asking_what_it_supports_builds_nothing(kept: Path, compiled: Path) -> None:
    (descriptor,) = plugin.tokenyard_attention_backends()
    assert descriptor.supports(_SPEC) == []
    assert num_compiled(compiled) == 0
    assert not kept.exists()


@needs_compiler
def test_processes_that_build_at_once_all_work_and_leave_one_file(kept: Path) -> None:
    code = "from tokenyard_backends.cpu_native.cache import load_kernels; print(load_kernels().isa)"
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    results = [process.communicate(timeout=200) for process in processes]
    assert results == [(f"{load_kernels().isa}\n", "")] * 3
    (ours,) = {file for file in kept.iterdir() if file.stem.startswith(cache._key(ask_version(find_compilers()[0])))}
    (theirs,) = set(kept.iterdir()) - {ours}  # one, since a compiler gives the same bytes each time
    assert theirs.suffix == ".so"


# ---- The process ----------------------------------------------------------------------------------------------------


def run_python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


_USE = """
import os, re, torch
from tokenyard.interfaces import AttentionBackendContext, AttentionLayer, AttentionSpec
from tokenyard.testing.attention import make_case
from tokenyard_backends.cpu_native.backend import CpuNativeBackend, make_backend

def use(num_threads):
    case = make_case(lengths=[(1, 3000)] * 8, num_heads=9, num_kv_heads=3, head_dim=64, block_size=16)
    spec = AttentionSpec(device_type="cpu", dtype="float32", num_heads=9, num_kv_heads=3, head_dim=64, v_head_dim=64,
                         block_size=16)
    context = AttentionBackendContext(spec=spec, device=torch.device("cpu"), num_threads=num_threads)
    backend = make_backend(context)
    assert isinstance(backend, CpuNativeBackend)
    caches = tuple(cache.transpose(1, 2).contiguous() for cache in case.kv_cache)
    backend.forward(AttentionLayer(index=0), case.query, case.key, case.value, caches, backend.plan(case.batch),
                    torch.empty(8, 9, 64))
"""


@needs_compiler
def test_subnormal_numbers_survive_in_the_whole_process() -> None:
    code = _USE + "use(2); print(1e-310 * 0.5, (torch.tensor(1e-40) * 0.5).item() > 0)"
    assert run_python(code) == "5e-311 True\n"


@needs_compiler
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no /proc here")
def test_it_runs_on_the_threads_of_torch_and_loads_no_second_runtime() -> None:
    code = (
        _USE
        + """
torch.set_num_threads(3)
torch.randn(2000, 2000).exp_().sum()
torch.randn(500, 500) @ torch.randn(500, 500)
before = len(os.listdir("/proc/self/task"))
use(3)
runtimes = set(re.findall(r"/[^ \\n]*lib(?:gomp|i?omp)[^ \\n]*", open("/proc/self/maps").read()))
print(len(os.listdir("/proc/self/task")) - before, len(runtimes), "torch" in runtimes.pop())
"""
    )
    assert run_python(code, OMP_NUM_THREADS="3") == "0 1 True\n"


@needs_compiler
def test_where_torch_has_no_runtime_to_share_one_thread_works_and_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import tokenyard_backends.cpu_native.backend as module

    monkeypatch.setattr(module, "torch_thread_pool", lambda: None)
    backend = make_backend(AttentionBackendContext(spec=_SPEC, device=torch.device("cpu"), num_threads=4))
    assert isinstance(backend, CpuNativeBackend)
    assert backend.description.endswith(", 1 thread: torch has no OpenMP runtime to share")


def test_importing_the_plugin_imports_no_torch_and_no_numpy() -> None:
    code = (
        "import sys; from tokenyard_backends.cpu_native import plugin; list(plugin.tokenyard_attention_backends()); "
        "print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    assert run_python(code) == "[]\n"
