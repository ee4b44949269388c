"""Figures of a load run, from its records alone.

TTFT is the first token's time since the request was sent; E2EL the last one's; TPOT = (last - first) / (tokens - 1),
left out of the statistics for answers of one token and counted as 0 where it decides about goodput; ITL are all gaps
between chunks with tokens, of all requests in one pool. Percentiles interpolate linearly, deviations are those of the
population. Only completed requests count; in goodput the others are not good.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tokenyard.bench.load import Record

_DIGITS = 3  # of milliseconds and rates


def figures(records: Sequence[Record], percentiles: Sequence[float], slos: Mapping[str, float]) -> dict[str, object]:
    """Everything, under the names of `vllm bench serve`; times in ms. `slos` are seconds by metric.

    None where there is nothing to tell, as of the time between tokens when every answer has one.
    """
    completed = [record for record in records if record.error is None]
    duration = _duration(completed)
    num_input = sum(record.input_len for record in completed)
    num_output = sum(record.output_len for record in completed)
    rows: dict[str, object] = {
        "duration": round(duration, 6),
        "completed": len(completed),
        "failed": len(records) - len(completed),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": _rate(len(completed), duration),
        "output_throughput": _rate(num_output, duration),
        "total_token_throughput": _rate(num_input + num_output, duration),
        "max_concurrent_requests": _most_at_once(completed),
    }
    if slos:
        good = sum(_is_good(record, slos) for record in completed)
        rows["request_goodput"] = _rate(good, duration)
        rows["goodput_attainment"] = round(good / len(records), 6) if records else None
    for name, values in times(completed).items():
        rows |= _statistics(name, values, percentiles)
    return rows


def times(completed: Sequence[Record]) -> dict[str, list[float]]:
    """Seconds by metric: a value a request, of `tpot` one for each with several tokens, of `itl` one a gap."""
    return {
        "ttft": [ttft(record) for record in completed],
        "tpot": [tpot(record) for record in completed if record.output_len > 1],
        "itl": [gap for record in completed for gap in itl(record)],
        "e2el": [e2el(record) for record in completed],
    }


def ttft(record: Record) -> float:
    """Seconds from sending a completed request to its first token."""
    return record.token_times[0] - record.sent


def e2el(record: Record) -> float:
    """Seconds from sending a completed request to its last token."""
    return _last(record) - record.sent


def tpot(record: Record) -> float:
    """Seconds for each token after the first; 0 for an answer of one token."""
    later = record.output_len - 1
    return (_last(record) - record.token_times[0]) / later if later > 0 else 0.0


def itl(record: Record) -> list[float]:
    """Seconds between chunks with tokens."""
    return [after - before for before, after in pairwise(record.token_times)]


def _last(record: Record) -> float:
    return record.token_times[-1] if record.last is None else record.last


def wrong_counts(records: Sequence[Record], *, must_be_full: bool) -> dict[str, int]:
    """How many completed requests contradict themselves, by what is wrong; 0 everywhere when a server counts well.

    `must_be_full` is whether answers have as many tokens as were asked for.
    """
    completed = [record for record in records if record.error is None]
    return {
        "num_without_usage": sum(record.usage is None for record in completed),
        "num_wrong_output_len": sum(
            record.output_len != record.request.output_len
            if must_be_full
            else record.output_len > record.request.output_len
            for record in completed
        ),
        "num_wrong_input_len": sum(
            record.request.has_exact_prompt and record.input_len != record.request.input_len for record in completed
        ),
        "num_wrong_deltas": sum(_has_wrong_deltas(record) for record in completed),
    }


def errors(records: Sequence[Record]) -> dict[str, int]:
    """Each error once, with how many requests ended with it, the most frequent first."""
    return dict(Counter(record.error for record in records if record.error is not None).most_common())


def _has_wrong_deltas(record: Record) -> bool:
    """Chunks tell their tokens' ids, or else cannot be more than there are tokens."""
    if record.usage is None:
        return False
    told = record.num_told_tokens
    return len(record.token_times) > max(1, record.output_len) if told is None else told != record.output_len


def _duration(completed: Sequence[Record]) -> float:
    """Seconds from the first request to the last completion."""
    if not completed:
        return 0.0
    return max(map(_last, completed)) - min(record.sent for record in completed)


def _most_at_once(completed: Sequence[Record]) -> int:
    changes = sorted([(record.sent, 1) for record in completed] + [(_last(record), -1) for record in completed])
    return int(np.cumsum([change for _, change in changes]).max()) if changes else 0


def _is_good(record: Record, slos: Mapping[str, float]) -> bool:
    taken = {"ttft": ttft(record), "tpot": tpot(record), "e2el": e2el(record)}
    return all(taken[name] <= most for name, most in slos.items())


def _rate(count: int, duration: float) -> float | None:
    return round(count / duration, _DIGITS) if duration > 0 else None


def _statistics(name: str, seconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    keys = [f"{figure}_{name}_ms" for figure in ("mean", "median", "std", "max", *map(_share, percentiles))]
    if not seconds:
        return dict.fromkeys(keys)
    values = 1000 * np.asarray(seconds)
    found = [np.mean(values), np.median(values), np.std(values), np.max(values), *np.percentile(values, percentiles)]
    return {key: round(float(value), _DIGITS) for key, value in zip(keys, found, strict=True)}


def _share(percentile: float) -> str:
    return f"p{percentile:g}"
