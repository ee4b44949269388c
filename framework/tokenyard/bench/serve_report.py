"""What people see of a row of `tokenyard bench serve`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from tokenyard.bench.report import table

_NAMES = {
    "ttft": "TTFT, time to first token",
    "tpot": "TPOT, time per output token after the first",
    "itl": "ITL, inter-token latency: time between chunks",
    "e2el": "E2EL, end-to-end latency: time to last token",
}
_LINES = {
    "requests": "{completed} completed, {failed} failed",
    "seconds": "{duration:.2f}, from the first request to the last completion",
    "most requests at once": "{max_concurrent_requests}",
    "input tokens": "{total_input_tokens}",
    "output tokens": "{total_output_tokens}",
    "requests/s": "{request_throughput}",
    "output tokens/s": "{output_throughput}",
    "total tokens/s": "{total_token_throughput}",
}
_GOOD = {"good requests/s": "{request_goodput}", "good share of all": "{goodput_attainment:.4f}"}
_WRONG = {
    "num_without_usage": "have no usage; their tokens are counted as chunks with text",
    "num_wrong_output_len": "have another number of tokens than they asked for",
    "num_wrong_input_len": "have a usage with another number of prompt tokens than were sent",
    "num_wrong_deltas": "have a usage that contradicts their chunks",
}
_BUSY, _LONG = 0.5, 1.0  # of a core, and seconds of it, from which on the client itself may be what is slow


def report_text(row: Mapping[str, object], metrics: Sequence[str], percentiles: Sequence[float]) -> str:
    """Totals, a table of times in ms, and what was measured by whom."""
    lines = _LINES | (_GOOD if "request_goodput" in row else {})
    width = max(map(len, lines))
    parts = [f"{name:<{width}}  {text.format(**row)}" for name, text in lines.items()]
    if metrics:
        parts += ["", _times(row, metrics, percentiles)]
    return "\n".join([*parts, "", *_facts(row)])


def failures(row: Mapping[str, object]) -> str:
    """How many requests failed and why, in a line; empty where none did."""
    reasons = [
        f"{count} of {row['num_prompts']} requests failed: {error}" for error, count in _counts(row["errors"]).items()
    ]
    return "; ".join(reasons)


def warnings(row: Mapping[str, object]) -> list[str]:
    """What makes the figures doubtful, a line each."""
    found = [f"{row[name]} of {row['completed']} answers {text}" for name, text in _WRONG.items() if row[name]]
    seconds, share = (cast("float", row[name] or 0.0) for name in ("client_cpu_s", "client_cpu_share"))
    if seconds >= _LONG and share > _BUSY:
        found.append(f"this client alone took {100 * share:.0f} % of a core: it may be what is slow")
    return found


def _times(row: Mapping[str, object], metrics: Sequence[str], percentiles: Sequence[float]) -> str:
    shares = [f"p{share:g}" for share in percentiles if share != 50]  # which is the median
    figures = ("mean", "median", "std", *shares, "max")
    rows = [
        {"ms": _NAMES[name], **{figure: _cell(row[f"{figure}_{name}_ms"]) for figure in figures}} for name in metrics
    ]
    return table(rows, ("ms", *figures))


def _cell(value: object) -> object:
    return "-" if value is None else value


def _facts(row: Mapping[str, object]) -> list[str]:
    how = f"{row['loop']} loop, request rate {row['request_rate']}"
    if row["loop"] == "open" and row["request_rate"] != "inf":
        how += f", burstiness {row['burstiness']}, at most {row['max_late_ms']} ms late"
    if row["max_concurrency"] is not None:
        how += f", at most {row['max_concurrency']} requests at once"
    counted = row["server_counted"]
    told = "its /metrics cannot be read" if counted is None else f"it counted {_pairs(_counts(counted))} meanwhile"
    version = row["server_version"] or "unknown"
    return [
        f"[{row['model_id']} at {row['server']}{row['endpoint']}, version {version}; {told}]",
        f"[{how}; this client took {row['client_cpu_s']} s of a core ({row['client_us_per_chunk']} us a chunk); "
        f"python {row['python']}, load {row['load']}]",
    ]


def _counts(value: object) -> Mapping[str, int]:
    return cast("Mapping[str, int]", value)


def _pairs(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items())
