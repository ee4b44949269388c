"""Fixtures: the stand-in for the package, in each release that signatures are recorded of."""

from __future__ import annotations

import sys

import fake_flashinfer as fake
import pytest


@pytest.fixture(params=[fake.VERSIONS[0], fake.VERSIONS[-1]])
def calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> fake.Calls:
    """What is called of the stand-in, which is what `import flashinfer` finds; the oldest and the newest release."""
    module, calls = fake.fake_flashinfer(request.param)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    return calls
