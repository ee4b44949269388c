"""Fixtures for every test."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by torch at import: two threads on a busy machine wait for each other
