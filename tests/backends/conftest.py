"""Fixtures of the backends' tests."""

from __future__ import annotations

from types import ModuleType

import attention_reference as reference
import pytest


@pytest.fixture(scope="session")
def attention_reference() -> ModuleType:
    """The float64 reference."""
    return reference
