"""Where API keys come from. They are no part of the config, which is printed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tokenyard.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

KEY_VARIABLE = "TOKENYARD_API_KEY"
MAX_KEYS = 10_000
_KEY = re.compile(r"[\x21-\x7e]{1,512}", re.ASCII)


def read_api_keys(flags: Sequence[str], file: Path | None, environment: Mapping[str, str]) -> list[str]:
    """Keys of flags, of a file with one a line (`#` begins a comment line), and of the variable; each once.

    Raises UserError, which never holds a key, for one that no header can carry and for a file without any.
    """
    found = [(key, "--api-key") for key in flags]
    if file is not None:
        found += [(key, f"--api-key-file {file}") for key in _lines(file)]
    if (variable := environment.get(KEY_VARIABLE)) is not None:
        found.append((variable.strip(), KEY_VARIABLE))
    for key, origin in found:
        if not _KEY.fullmatch(key):
            raise UserError(
                f"{origin}: the key is not usable: it has {len(key)} characters; allowed are 1 to 512 printable ASCII "
                "characters without blanks"
            )
    if len(found) > MAX_KEYS:
        raise UserError(f"{len(found)} API keys were given; at most {MAX_KEYS} are allowed")
    return list(dict.fromkeys(key for key, _ in found))


def _lines(file: Path) -> list[str]:
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise UserError(f"--api-key-file {file} cannot be read: {reason}") from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise UserError(f"--api-key-file {file} has no key; write one a line")
    return keys
