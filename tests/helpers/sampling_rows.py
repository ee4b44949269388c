"""Rows of `sampling_reference` through the sampler, and tests of how often it draws what."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from sampling_reference import Row
from tokenyard.arrays import IntArray
from tokenyard.interfaces.logits_processor import RowLogitsProcessor
from tokenyard.sampling_params import SamplingParams
from tokenyard.worker.input_batch import SampledRequest
from tokenyard.worker.sampler import Sampled, Sampler, SamplingBatch

CPU = torch.device("cpu")


def request_of(row: Row, request_id: str, processor: RowLogitsProcessor | None = None) -> SampledRequest:
    return SampledRequest(
        request_id,
        row.params,
        len(row.prompt),
        tuple(row.stop_token_ids),
        tuple(tuple(word) for word in row.bad_words),
        processor,
    )


def history_of(rows: Sequence[Row]) -> Callable[[int], IntArray]:
    tokens = [np.array([*row.prompt, *row.output], dtype=np.int32) for row in rows]
    for array in tokens:
        array.flags.writeable = False
    return tokens.__getitem__


def positions_of(rows: Sequence[Row]) -> IntArray:
    return np.array([len(row.prompt) + len(row.output) for row in rows], dtype=np.int32)


def logits_of(rows: Sequence[Row]) -> torch.Tensor:
    return torch.tensor([list(row.logits) for row in rows], dtype=torch.float32)


def sampled_from(
    logits: torch.Tensor, batch: SamplingBatch, positions: IntArray, history: Callable[[int], IntArray]
) -> Sampled:
    """Tokens for `positions`, on a device that has no queue."""
    chosen = Sampler(CPU).choose(logits, batch, positions, history)
    return Sampler.finish(chosen, [result.numpy() for result in chosen.results], batch, positions)


def sample(
    rows: Sequence[Row],
    *,
    processors: Sequence[RowLogitsProcessor | None] | None = None,
    request_ids: Sequence[str] | None = None,
    engine_seed: int = 0,
) -> Sampled:
    """One step of the sampler for these rows."""
    names = request_ids or [f"r{index}" for index in range(len(rows))]
    calls = processors or [None] * len(rows)
    requests = [request_of(row, name, call) for row, name, call in zip(rows, names, calls, strict=True)]
    batch = SamplingBatch.of(requests, len(rows[0].logits), CPU, engine_seed)
    with torch.inference_mode():
        return sampled_from(logits_of(rows), batch, positions_of(rows), history_of(rows))


def results(found: Sampled, num_rows: int) -> list[object]:
    """Of each row, all that its request gets, without the padding that is its neighbours'."""
    logprobs: dict[int, object] = {}
    if found.logprobs is not None:
        columns = found.logprobs.token_ids, found.logprobs.logprobs, found.logprobs.sampled_ranks
        for row, ids, values, rank in zip(found.logprobs.rows.tolist(), *columns, strict=True):
            known = ids >= 0
            logprobs[row] = (ids[known].tolist(), values[known].tolist(), int(rank))
    tokens = found.token_ids.tolist()
    return [(tokens[row], logprobs.get(row), found.errors.get(row)) for row in range(num_rows)]


def result_alone(row: Row, request_id: str, processor: RowLogitsProcessor | None = None) -> object:
    return results(sample([row], request_ids=[request_id], processors=[processor]), 1)[0]


def edited(rows: Sequence[Row]) -> list[list[float]]:
    """Logits after masks, biases and penalties."""
    requests = [request_of(row, f"r{index}") for index, row in enumerate(rows)]
    logits = logits_of(rows)
    edits = SamplingBatch.of(requests, logits.shape[-1], CPU, 0).edits
    assert edits.apply(logits, positions_of(rows), history_of(rows)) == {}
    found: list[list[float]] = logits.tolist()
    return found


def draws(row: Row, count: int, name: str = "r") -> list[int]:
    """Tokens of `count` requests that differ in their ids only."""
    request = request_of(row, name)
    requests = [request._replace(request_id=f"{name}{index}") for index in range(count)]
    logits = torch.tensor(list(row.logits)).repeat(count, 1)
    tokens = np.array([*row.prompt, *row.output], dtype=np.int32)
    positions = np.full(count, len(tokens), dtype=np.int32)
    batch = SamplingBatch.of(requests, logits.shape[-1], CPU, 0)
    found: list[int] = sampled_from(logits, batch, positions, lambda _: tokens).token_ids.tolist()
    return found


def p_value(tokens: Sequence[int], probabilities: Sequence[float]) -> float:
    """Of the chi-square test that tokens are drawn with these probabilities; 0 when an impossible one was drawn."""
    counts = np.bincount(tokens, minlength=len(probabilities)).astype(np.float64)
    expected = np.array(probabilities) * len(tokens)
    if counts[expected == 0].any():
        return 0.0
    order = np.argsort(expected)
    is_rare = np.cumsum(expected[order]) < 10  # these are one bin
    rare, common = order[is_rare], order[~is_rare]
    observed = np.append(counts[common], counts[rare].sum())
    wanted = np.append(expected[common], expected[rare].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    if len(wanted) == 1:
        return 1.0
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    half_freedom, half_statistic = torch.tensor([(len(wanted) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half_freedom, half_statistic))


def params_of(values: Mapping[str, object]) -> SamplingParams:
    return SamplingParams(**values)  # type: ignore[arg-type]


def greedy(**values: object) -> SamplingParams:
    return params_of({"temperature": 0, **values})
