"""Ranges of the group `server`."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from tokenyard.launch.convert import wrong

if TYPE_CHECKING:
    from tokenyard.config import ServerConfig

MAX_SECONDS = 10**7  # more than a hundred days: whoever means "for ever" says null or 0
MAX_NAME = 256  # characters
MAX_COUNT = 2**31
_ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)*", re.ASCII)
_HOST_NAME = re.compile(r"(\*\.)?[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]", re.ASCII)
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+", re.ASCII)
_ENDPOINT = re.compile(r"https?://[^/\s]+\S*", re.ASCII)


def check_server(server: ServerConfig) -> None:
    """Raise ConfigError on the first value that cannot work; files and sockets are looked at when they are used."""
    _check_place(server)
    _check_names(server)
    _check_times(server)
    _check_counts(server)
    endpoint = server.otlp_traces_endpoint
    if endpoint is not None and not _ENDPOINT.fullmatch(endpoint):
        raise wrong("server.otlp_traces_endpoint", endpoint, "a URL such as http://127.0.0.1:4318/v1/traces")


def _check_place(server: ServerConfig) -> None:
    if not server.host.strip():
        raise wrong("server.host", server.host, "a name or an address of this machine; 0.0.0.0 for all of them")
    if not 0 <= server.port < 2**16:
        raise wrong("server.port", server.port, "a port from 1 to 65535, or 0 for one that is free")
    if server.uds is not None and (not server.uds or "\0" in server.uds):
        raise wrong("server.uds", server.uds, "the path of a socket, or null")
    if not _ROOT_PATH.fullmatch(server.root_path):
        raise wrong("server.root_path", server.root_path, "a path such as /llm, without a slash at its end, or nothing")
    files = {"keyfile": server.ssl_keyfile, "certfile": server.ssl_certfile, "ca_certs": server.ssl_ca_certs}
    for key, file in files.items():
        if file == "":
            raise wrong(f"server.ssl_{key}", file, "a file, or null")


def _check_names(server: ServerConfig) -> None:
    names = server.served_model_names
    for name in names:
        if not (0 < len(name) <= MAX_NAME and name.isprintable() and name == name.strip()):
            raise wrong("server.served_model_name", name, f"names of 1 to {MAX_NAME} printable characters")
    if len(set(names)) < len(names):
        raise wrong("server.served_model_name", list(names), "names that differ from each other")
    if not (server.response_role.isidentifier() and len(server.response_role) <= MAX_NAME):
        raise wrong("server.response_role", server.response_role, "a word such as assistant")
    for origin in server.allowed_origins:
        if not _ORIGIN.fullmatch(origin):
            raise wrong("server.allowed_origins", origin, "origins such as https://chat.example.org, or *")
    for host in server.allowed_hosts:
        if not _HOST_NAME.fullmatch(host):
            raise wrong(
                "server.allowed_hosts", host, "host names without a port, such as llm.example.org or *.example.org"
            )


def _check_times(server: ServerConfig) -> None:
    from_zero = {"shutdown_timeout": server.shutdown_timeout, "log_stats_interval": server.log_stats_interval}
    above_zero = {
        "slow_reader_timeout": server.slow_reader_timeout,
        "stall_timeout": server.stall_timeout,
        "request_timeout": server.request_timeout,
    }
    for key, value in {**from_zero, **above_zero}.items():
        if value is None:
            continue
        least = "0 or more" if key in from_zero else "above 0"
        if not math.isfinite(value) or not 0 <= value <= MAX_SECONDS or (key in above_zero and value == 0):
            raise wrong(f"server.{key}", value, f"a number of seconds, {least}, at most {MAX_SECONDS}")


def _check_counts(server: ServerConfig) -> None:
    counts: dict[str, tuple[int | None, int, int]] = {
        "max_num_queued_reqs": (server.max_num_queued_reqs, 1, MAX_COUNT),
        "max_num_queued_tokens": (server.max_num_queued_tokens, 1, MAX_COUNT),
        "max_n": (server.max_n, 1, 2**16),
        "max_prompts": (server.max_prompts, 1, 2**16),
        "max_body_bytes": (server.max_body_bytes, 2**10, MAX_COUNT),
        "timeline_size": (server.timeline_size, 0, 2**20),
    }
    for key, (value, least, most) in counts.items():
        if value is not None and not least <= value <= most:
            raise wrong(f"server.{key}", value, f"a whole number from {least} to {most}")
