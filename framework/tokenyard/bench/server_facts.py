"""What a server tells of itself: its version, and what it has counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tokenyard.client.failures import RemoteError

if TYPE_CHECKING:
    from tokenyard.client.connection import Connection

COUNTERS: Mapping[str, str] = {
    "prompt_tokens": "vllm:prompt_tokens",
    "generation_tokens": "vllm:generation_tokens",
    "requests": "vllm:request_success",
}
"""What is read of /metrics, by our name. A counter's samples are added up over its labels."""


async def read_version(connection: Connection) -> str | None:
    """What /version says; None where there is none."""
    try:
        answer = await connection.json("GET", "/version")
    except RemoteError:
        return None
    version = answer.get("version") if isinstance(answer, Mapping) else None
    return version if isinstance(version, str) else None


async def read_counters(connection: Connection) -> dict[str, int] | None:
    """The COUNTERS of /metrics; None where it has not got all of them."""
    try:
        answer = await connection.request("GET", "/metrics")
    except RemoteError:
        return None
    return parse_counters(answer.body.decode(errors="replace")) if answer.status == 200 else None


def parse_counters(text: str) -> dict[str, int] | None:
    """The COUNTERS in a text of Prometheus' format; None where one is missing or the text is no such thing."""
    from prometheus_client.parser import text_string_to_metric_families  # of an extra

    found = dict.fromkeys(COUNTERS, 0.0)
    names = {f"{theirs}_total": ours for ours, theirs in COUNTERS.items()}
    seen: set[str] = set()
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if (ours := names.get(sample.name)) is not None:
                    seen.add(ours)
                    found[ours] += sample.value
    except ValueError:
        return None
    return {name: int(value) for name, value in found.items()} if seen == set(COUNTERS) else None
