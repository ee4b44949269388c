"""Of the tests of the backend `triton`. Kernels are interpreted or compiled, never both in one process.

The tests in `interpreter/` run in processes of their own, which `test_interpreter.py` starts; with TRITON_INTERPRET=1
in the environment they run directly: `TRITON_INTERPRET=1 pytest tests/backends/triton`.
"""

from __future__ import annotations

import pytest
from tokenyard_backends.triton.limits import is_interpreted

pytest.importorskip("triton", reason="the extra [triton] is not installed")

collect_ignore_glob = ["test_*.py"] if is_interpreted() else []
