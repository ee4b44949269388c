"""Kernel profiles that ship with Tokenyard, for latency models: folders of tables, each with a `profile.json`."""

from __future__ import annotations

from pathlib import Path

from tokenyard.errors import ConfigError

MANIFEST = "profile.json"
"""The file that makes a folder a profile."""

_PACKAGED = Path(__file__).resolve().parent / "data" / "profiles"


def profile_names() -> tuple[str, ...]:
    """The profiles that ship, sorted."""
    return tuple(sorted(path.parent.name for path in _PACKAGED.glob(f"*/{MANIFEST}")))


def find_profile(key: str, profile: str) -> Path:
    """The folder of a profile, by the name of one that ships or by a path. `key` is the option that named it.

    Raises ConfigError.
    """
    if profile in profile_names():
        return _PACKAGED / profile
    path = Path(profile)
    folder = path.parent if path.name == MANIFEST else path
    if profile and (folder / MANIFEST).is_file():
        return folder
    raise ConfigError(
        f"{key}={profile!r}: no such profile; give a folder with a {MANIFEST}, or one of {', '.join(profile_names())}"
    )
