"""Compiled kernels are kept in the cache folder: one file for each source, flags, compiler and CPU.

A file's name carries the digest of its content, and it appears by renaming. So nothing half-written or damaged is ever
loaded, and processes that build at the same time need no lock: each leaves a whole file, one of which is used.
Whoever can write to the folder can make this process run what they like: one that others can write to is not used.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import platform
import tempfile
import time
from pathlib import Path

from tokenyard.errors import ConfigError
from tokenyard.paths import cache_dir

from tokenyard_backends.cpu_native.build import (
    SOURCES,
    BuildError,
    Compiler,
    ask_version,
    compile_kernels,
    find_compilers,
    flags_for_this_cpu,
)
from tokenyard_backends.cpu_native.library import Kernels

logger = logging.getLogger(__name__)

_CPU_FACTS = ("model name", "flags", "Features", "CPU implementer", "CPU part", "isa")


def load_kernels() -> Kernels:
    """Kernels for this CPU, from the cache folder or built now. Raises BuildError if no compiler can build them."""
    failures = []
    for command in find_compilers():
        try:
            compiler = ask_version(command)
            return _cached(_key(compiler)) or _build(compiler)
        except BuildError as error:
            failures.append(error)
        except OSError as error:  # no temporary folder, a full disk
            failures.append(BuildError(f"nothing can be built here: {error}"))
    raise failures[0]


def cpu_identity() -> str:
    """Model and features of this CPU: code that was compiled for another one may not run here."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").split("\n\n")[0].splitlines() if info.is_file() else []
    facts = [line for line in lines if line.split(":")[0].strip() in _CPU_FACTS]
    return "\n".join([platform.machine(), platform.processor(), *facts])


def _folder() -> Path:
    return cache_dir() / "cpu_native"


def _key(compiler: Compiler) -> str:
    files = sorted(path for path in SOURCES.iterdir() if path.suffix in (".cpp", ".h"))
    sources = [path.read_text(encoding="utf-8") for path in files]
    parts = (*sources, *flags_for_this_cpu(), *compiler.command, compiler.version, cpu_identity())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _cached(key: str) -> Kernels | None:
    """The kept kernels; what is damaged or does not load is said and removed."""
    for path in _kept(key):
        try:
            if path.stem != _stem(key, path.read_bytes()):
                raise OSError("it is damaged")
            return Kernels(path)
        except (OSError, AttributeError) as error:
            logger.warning("attention=cpu_native builds its kernels again: %s: %s", path, error)
            _remove(path)
    return None


def _kept(key: str) -> list[Path]:
    try:
        folder = _folder()
    except ConfigError:  # told when something is to be kept
        return []
    return sorted(folder.glob(f"{key}-*.so")) if _is_own(folder) else []


def _is_own(folder: Path) -> bool:
    """Whether only this user, or root, can put a library there."""
    try:
        about = folder.stat()
    except OSError:
        return False
    return about.st_uid in (0, os.getuid()) and not about.st_mode & 0o022


def _build(compiler: Compiler) -> Kernels:
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="tokenyard-", ignore_cleanup_errors=True) as folder:
        built = Path(folder) / "kernels.so"
        compile_kernels(compiler, built)
        seconds = time.perf_counter() - start
        kernels = _load((_keep(_key(compiler), built), built))  # a loaded file may be removed
    logger.info("attention=cpu_native compiled its kernels for this CPU (%s) in %.1f s", kernels.isa, seconds)
    return kernels


def _load(paths: tuple[Path | None, ...]) -> Kernels:
    """The first that loads: a folder may be mounted so that nothing in it is executable."""
    problem = ""
    for path in paths:
        try:
            if path is not None:
                return Kernels(path)
        except (OSError, AttributeError) as error:
            problem = problem or str(error)
    raise BuildError(f"the compiled kernels do not load: {problem}")


def _keep(key: str, built: Path) -> Path | None:
    """Copy a library to the cache folder; None, and a warning, where that cannot be done."""
    try:
        folder = _folder()
        return _copy(key, built, folder)
    except ConfigError as error:
        reason = str(error)
    except OSError as error:
        reason = f"{folder}: {error.strerror}; set TOKENYARD_CACHE to a folder that can be written by you alone"
    logger.warning(
        "attention=cpu_native cannot keep its compiled kernels, and compiles them at every start: %s", reason
    )
    return None


def _copy(key: str, built: Path, folder: Path) -> Path:
    content = built.read_bytes()
    target = folder / f"{_stem(key, content)}.so"
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    if not _is_own(folder):
        raise OSError(errno.EPERM, "other users can write there")
    handle, name = tempfile.mkstemp(prefix="new-", dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(name).replace(target)
    except BaseException:
        _remove(Path(name))
        raise
    return target


def _stem(key: str, content: bytes) -> str:
    return f"{key}-{hashlib.sha256(content).hexdigest()[:16]}"


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
