"""The server's metrics and the bodies of its debug routes."""

from __future__ import annotations

from collections.abc import Iterator

from tokenyard.server import debug
from tokenyard.server.metric_names import FAMILIES, HistogramFamily

from reference_sections.markdown import code, joined, table
from reference_sections.source import doc_of, fields_of

_BODIES = (
    debug.TimelinesBody,
    debug.TimelineBody,
    debug.UsageBody,
    debug.EventBody,
    debug.SummariesBody,
    debug.SummaryBody,
)


def metrics() -> str:
    """Every family with the names that it stands under."""
    return table(("name", "kind", "labels", "meaning", "vLLM's names"), _metric_rows())


def timelines() -> str:
    """The JSON of /debug/requests."""
    return joined(f"### {_name(body.__name__)}\n\n{doc_of(body)}\n\n{_fields(body)}" for body in _BODIES)


def _fields(body: type) -> str:
    rows = [(code(field.name), code(_name(field.annotation)), field.meaning) for field in fields_of(body)]
    return table(("name", "type", "meaning"), rows)


def _name(written: str) -> str:
    return written.replace("Body", "")


def _metric_rows() -> Iterator[tuple[str, ...]]:
    for family in FAMILIES:
        kind = "histogram" if isinstance(family, HistogramFamily) else family.kind
        suffix = "_total" if kind == "counter" else ""
        own, *aliases = (f"{name}{suffix}" for name in family.names)
        note = " Not with `engine.log_stats=false`." if family.of_engine else ""
        yield code(own), kind, ", ".join(map(code, family.labels)), family.help + note, ", ".join(map(code, aliases))
