"""Format `jsonl`: our own, one JSON object a request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

from tokenyard.errors import did_you_mean
from tokenyard.experiments.traces.json_rows import json_rows
from tokenyard.experiments.traces.lines import TraceLines, open_bytes
from tokenyard.experiments.traces.reader import Columns, TraceReader
from tokenyard.experiments.traces.values import hashed_content, optional_text, second_value, token_value
from tokenyard.interfaces.workload import Segment, WorkloadRequest
from tokenyard.scheduler.limits import MAX_PRIORITY

KEYS = ("arrival", "prompt", "output", "client", "session", "priority", "deadline", "hash_ids")
"""Keys of a row; all but the first three may be left out or be null."""
_CHUNK_BYTES = 2**20
_HASHES = b'"hash_ids"'


class JSONLReader(TraceReader):
    """Times are seconds of the workload, `deadline` is seconds after arrival."""

    columns = Columns(*KEYS[:3])

    @cached_property
    def _has_hashes(self) -> bool:
        """Found by the bytes alone: any row may be the first that has them."""
        tail = b""
        with open_bytes(self.path) as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                if _HASHES in tail + chunk:
                    return True
                tail = chunk[-len(_HASHES) :]
        return False

    @property
    def has_content(self) -> bool:
        return self._has_hashes

    def parse(self, lines: TraceLines) -> Iterator[WorkloadRequest]:
        for row in json_rows(lines, self.columns):
            for name in row:
                if name not in KEYS:
                    lines.wrong(name, row[name], f"one of the keys {', '.join(KEYS)}", did_you_mean(name, KEYS))
            num_prompt = token_value(lines, "prompt", row["prompt"])
            yield WorkloadRequest(
                arrival=second_value(lines, "arrival", row["arrival"]),
                num_prompt_tokens=num_prompt,
                num_output_tokens=token_value(lines, "output", row["output"]),
                client=optional_text(lines, "client", row.get("client")),
                session=optional_text(lines, "session", row.get("session")),
                priority=_priority(lines, row.get("priority")),
                deadline=_deadline(lines, row.get("deadline")),
                content=self._content(lines, row.get("hash_ids"), num_prompt),
            )

    def _content(self, lines: TraceLines, ids: object, num_prompt: int) -> Sequence[Segment] | None:
        if ids is None:
            return None
        return hashed_content(lines, "hash_ids", ids, num_prompt, self.options.tokens_per_hash)


def _priority(lines: TraceLines, value: object) -> int:
    if value is None:
        return 0
    if type(value) is not int or not -MAX_PRIORITY <= value <= MAX_PRIORITY:
        lines.wrong("priority", value, "a whole number from -2**53 to 2**53; lower is more urgent")
    return value


def _deadline(lines: TraceLines, value: object) -> float | None:
    if value is None:
        return None
    seconds = second_value(lines, "deadline", value)
    if seconds <= 0:
        lines.wrong("deadline", value, "a number of seconds after arrival, above 0")
    return seconds
