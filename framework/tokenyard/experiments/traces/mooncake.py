"""Format `mooncake`: the traces of Mooncake (FAST 2025), whose prompts are lists of hashes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tokenyard.experiments.traces.json_rows import json_rows
from tokenyard.experiments.traces.reader import Columns, TraceReader
from tokenyard.experiments.traces.values import hashed_content, second_value, token_value
from tokenyard.interfaces.workload import WorkloadRequest

if TYPE_CHECKING:
    from tokenyard.experiments.traces.lines import TraceLines

_HASHES = "hash_ids"


class MooncakeReader(TraceReader):
    """One JSON object a line; times are milliseconds, and a hash stands for 512 tokens and all before them."""

    columns = Columns("timestamp", "input_length", "output_length")

    @property
    def has_content(self) -> bool:
        return True

    def parse(self, lines: TraceLines) -> Iterator[WorkloadRequest]:
        for row in json_rows(lines, (*self.columns, _HASHES)):
            num_prompt = token_value(lines, self.columns.prompt, row[self.columns.prompt])
            yield WorkloadRequest(
                arrival=second_value(lines, self.columns.arrival, row[self.columns.arrival], per_second=1000),
                num_prompt_tokens=num_prompt,
                num_output_tokens=token_value(lines, self.columns.output, row[self.columns.output]),
                content=hashed_content(lines, _HASHES, row[_HASHES], num_prompt, self.options.tokens_per_hash),
            )
