"""The decode path on xformers' real paged operator.

Needs xformers 0.0.35 and triton 3.6 to 3.8, later ones having no block pointers: those that are installed, or those
of a folder that TOKENYARD_XFORMERS_ENV names (`pip install --no-deps --target FOLDER xformers==0.0.35 triton==3.7.1`;
several folders as in PATH). With triton 3.6.0 its interpreter also needs numpy below 2.4.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

_ENV = "TOKENYARD_XFORMERS_ENV"
_HERE = Path(__file__).parent


def test_the_real_operator_in_the_interpreter_equals_float64_over_poisoned_caches(tmp_path: Path) -> None:
    folders = os.environ.get(_ENV, "")
    if not folders and not _is_installed():
        pytest.skip(f"xformers 0.0.35 with triton 3.6 to 3.8 is not installed, and {_ENV} names no folder with them")
    helpers = str(_HERE.parents[1] / "helpers")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [folders, helpers, os.environ.get("PYTHONPATH")])),
        "TRITON_INTERPRET": "1",
        "XFORMERS_ENABLE_TRITON": "1",
        "TRITON_CACHE_DIR": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, str(_HERE / "real_kernel.py")], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    print(done.stdout)
    for case in json.loads(done.stdout)["cases"]:
        assert case["share"] <= 1, done.stdout


def _is_installed() -> bool:
    try:
        triton = tuple(int(part) for part in metadata.version("triton").split(".")[:2])
        return metadata.version("xformers") == "0.0.35" and (3, 6) <= triton < (3, 9)
    except metadata.PackageNotFoundError:
        return False
