"""The suites: classes of pytest tests that a plugin's own tests inherit. They need the extra `testing`."""

from __future__ import annotations

from tokenyard.testing.errors import MissingExtraError

try:
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
except ImportError as error:
    raise MissingExtraError(
        f"the contract suites of tokenyard.testing need {error.name}, which is not installed: "
        "pip install tokenyard[testing]"
    ) from error
