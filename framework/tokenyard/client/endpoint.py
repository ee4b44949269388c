"""Endpoint: where a server is, and the key that it is shown."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from tokenyard.errors import UserError

KEY_VARIABLES = ("TOKENYARD_API_KEY", "OPENAI_API_KEY")
"""Where a key is looked for, the first one first. Never on a command line: everybody on the machine can read those."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server by the URL in front of its routes, without a slash at the end and without /v1."""

    root: str
    api_key: str | None = None

    def url(self, path: str) -> str:
        """The URL of a route such as /v1/models."""
        return self.root + path

    @property
    def headers(self) -> dict[str, str]:
        """What every request carries."""
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}

    @property
    def is_local(self) -> bool:
        """Whether it is on this machine, where no proxy may come between."""
        host = urlsplit(self.root).hostname or ""
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host == "localhost" or host.endswith(".localhost")


def find_endpoint(url: str, name: str, environment: Mapping[str, str] = os.environ) -> Endpoint:
    """The server at a URL with or without /v1; `name` is the flag that it came from. Raises UserError."""
    try:
        parts = urlsplit(url)
        is_whole = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:  # a port that is no number, a broken IPv6 address
        is_whole = False
    if not is_whole:
        raise UserError(f"{name} takes the URL of a server, such as http://127.0.0.1:8000; got {_shown(url)!r}")
    if parts.username is not None or parts.query or parts.fragment:
        raise UserError(
            f"{name} takes a URL without user, query and fragment; set {' or '.join(KEY_VARIABLES)} for a key"
        )
    return Endpoint(_root(parts), api_key(environment))


def api_key(environment: Mapping[str, str]) -> str | None:
    """The key that the environment has, if any. Raises UserError for one that no header can hold."""
    for variable in KEY_VARIABLES:
        if key := environment.get(variable, "").strip():
            if not (key.isascii() and key.isprintable()):
                raise UserError(f"{variable} has characters that no HTTP header can hold; set it to the key alone")
            return key
    return None


def _root(parts: SplitResult) -> str:
    path = parts.path.rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path.removesuffix('/v1').rstrip('/')}"


def _shown(url: str) -> str:
    return url if len(url) <= 200 else f"{url[:197]}..."
