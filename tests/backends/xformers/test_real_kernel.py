"""The decode path on xformers' real paged operator.

Needs a folder with xformers 0.0.35 and triton 3.6 to 3.8, later ones having no block pointers (`pip install --no-deps
--target FOLDER xformers==0.0.35 triton==3.7.1`); with triton 3.6.0 also numpy below 2.4, for its interpreter.
TOKENYARD_XFORMERS_ENV names the folder, or several as in PATH.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_ENV = "TOKENYARD_XFORMERS_ENV"
_HERE = Path(__file__).parent


def test_the_real_operator_in_the_interpreter_equals_float64_over_poisoned_caches(tmp_path: Path) -> None:
    folders = os.environ.get(_ENV)
    if not folders:
        pytest.skip(f"{_ENV} names no folder with xformers 0.0.35 and triton 3.6 to 3.8")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([folders, str(_HERE.parents[1] / "helpers")]),
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
