"""Fixtures: stand-ins for the operators, over stand-in masks and over those of the package where it is installed."""

from __future__ import annotations

from types import ModuleType

import fake_xformers as fake
import pytest
from tokenyard_backends.xformers.operators import Operators


@pytest.fixture(scope="session")
def package() -> ModuleType:
    """The real `xformers.ops.fmha`."""
    pytest.importorskip("xformers", reason=f"xformers {fake.VERSION} is not installed", exc_type=ImportError)
    return fake.real_package()


@pytest.fixture(params=["stand-in masks", "masks of the package"])
def operators(request: pytest.FixtureRequest) -> Operators:
    """What the backend is made with."""
    if request.param == "stand-in masks":
        return fake.fake_operators()
    return fake.operators_over(request.getfixturevalue("package"))
