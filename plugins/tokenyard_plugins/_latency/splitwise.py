"""Profiles as splitwise-sim keeps them: whole steps of one model on one machine, in milliseconds.

Its table, `steps`: prompt_time of a prompt phase by prompt_size x batch_size, token_time of a decode step by
batch_size, and of single requests by their context: of a batch the mean context counts as it does of one. Only the rows
with the shortest outputs count for decodes, since the others differ by more than their length. Only steps of one kind
are measured; of both, the prompt adds what it takes beyond the shortest one, which mostly reads the weights.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from tokenyard.errors import ConfigError

from tokenyard_plugins._latency.grid import Line
from tokenyard_plugins._latency.manifest import refuse, table_paths
from tokenyard_plugins._latency.tables import read_rows

if TYPE_CHECKING:
    from tokenyard.interfaces import StepLoad

    from tokenyard_plugins._latency.manifest import Manifest

_COLUMNS = ("prompt_size", "batch_size", "token_size", "prompt_time", "token_time")
_MILLISECOND = 1e-3

Times = dict[int, list[float]]


class SplitwiseProfile:
    """Satisfies `StepProfile`."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        refuse(manifest, folder, ["num_layers", "all_reduce"])
        (path,) = table_paths(manifest, folder, ["steps"])
        rows = list(read_rows(path, _COLUMNS))
        shortest = min(row.count("token_size") for row in rows)
        prompts: Times = {}
        batches: Times = {}
        contexts: Times = {}
        for row in rows:
            prompt, batch, output = (row.count(name) for name in _COLUMNS[:3])
            prompts.setdefault(prompt * batch, []).append(row.number("prompt_time"))
            if output == shortest:
                batches.setdefault(batch, []).append(row.number("token_time"))
            if output == shortest and batch == 1:
                contexts.setdefault(prompt + output // 2, []).append(row.number("token_time"))
        if not contexts:
            raise ConfigError(f"{path}: column 'batch_size' has no row of 1 among those with token_size {shortest}")
        self._prompt, self._batch, self._context = _line(prompts), _line(batches), _line(contexts)
        self._least_prompt = self._prompt.at(0)
        self._single = self._batch.at(1)
        if not self._single:
            raise ConfigError(f"{path}: column 'token_time': a decode alone takes no time")

    def seconds(self, load: StepLoad) -> float:
        if not load.num_decodes:
            return _MILLISECOND * self._prompt.at(load.num_prefill_tokens)
        return _MILLISECOND * (self._decodes(load) + self._added(load.num_prefill_tokens))

    def _decodes(self, load: StepLoad) -> float:
        context = round(load.num_decode_context_tokens / load.num_decodes)
        return self._batch.at(load.num_decodes) * self._context.at(context) / self._single

    def _added(self, num_prefill_tokens: int) -> float:
        return self._prompt.at(num_prefill_tokens) - self._least_prompt if num_prefill_tokens else 0.0


def _line(times: Times) -> Line:
    return Line({count: median(values) for count, values in times.items()})
