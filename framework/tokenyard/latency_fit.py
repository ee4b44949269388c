"""LatencyFit: a latency model with fitted coefficients, and the file that it is kept in (since API 1.7).

`tokenyard calibrate` writes such files, `latency=fitted` reads them.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tokenyard.errors import ConfigError, UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenyard.config import EngineConfig
    from tokenyard.interfaces.latency import StepLoad

FORMAT = "tokenyard.latency_fit"
VERSION = 1
_MOST_BYTES = 2**20  # of a file
_MOST_KNOTS = 64


class Fit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of a step: the sum of these, each at least 0.

    `per_token` is by the number of tokens that a step computes: its i-th number counts for each token from
    `token_knots[i]` to `token_knots[i + 1]`, the last one for all beyond. Few tokens cost next to nothing while the
    weights are what takes the time, and more do once the arithmetic is.
    """

    per_step: float  # above 0
    token_knots: tuple[int, ...]  # [K] ascending, the first is 0
    per_token: tuple[float, ...]  # [K]
    per_decode: float  # row
    per_prefill: float  # row
    per_decode_context_token: float
    per_prefill_pair: float  # of a prefill token and one that it attends to


class Errors(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far a fit is off from measured steps; shares of what was measured."""

    num_steps: int
    mean: float  # of the absolute errors of the steps
    median: float
    total: float  # of the time of all steps together: above 0 = the fit says more than was measured


class FitFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `tokenyard calibrate` writes."""

    format: str
    version: int
    created: str  # ISO 8601, UTC
    machine: dict[str, str | int]
    settings: dict[str, str | int | None]  # of `settings_of`
    most_tokens: int  # of a step that was measured
    fit: Fit
    in_sample: Errors
    held_out: Errors


@dataclass(slots=True)
class LatencyFit:
    """A pure function of the load."""

    fit: Fit

    def seconds(self, load: StepLoad) -> float:
        fit, num_tokens = self.fit, load.num_tokens
        seconds = fit.per_step + fit.per_decode * load.num_decodes + fit.per_prefill * load.num_prefills
        seconds += fit.per_decode_context_token * load.num_decode_context_tokens + fit.per_prefill_pair * pairs_of(load)
        for at in range(bisect_right(fit.token_knots, num_tokens) - 1):
            seconds += fit.per_token[at] * (fit.token_knots[at + 1] - fit.token_knots[at])
        last = bisect_right(fit.token_knots, num_tokens) - 1
        return seconds + fit.per_token[last] * (num_tokens - fit.token_knots[last])


def pairs_of(load: StepLoad) -> float:
    """Pairs of a prefill token and one before it or itself; chunks of different lengths count as if they were equal."""
    if not load.num_prefills:
        return 0.0
    tokens, context = load.num_prefill_tokens, load.num_prefill_context_tokens
    return tokens * (context + (tokens + load.num_prefills) / 2) / load.num_prefills


def settings_of(config: EngineConfig) -> dict[str, str | int | None]:
    """What a step's time depends on, by key; a simulation has the same, whatever its executor."""
    return {
        "model.name": config.model.name,
        "model.dtype": config.model.dtype,
        "engine": config.engine.name,
        "attention": config.attention.name,
        "kv_cache.block_size": config.kv_cache.block_size,
        "executor.device": config.executor.device,
        "executor.num_threads": config.executor.num_threads,
        "executor.tensor_parallel_size": config.executor.tensor_parallel_size,
    }


def differences(file: FitFile, config: EngineConfig) -> list[str]:
    """What a config has that the file was not measured with, in words."""
    now = settings_of(config)
    found = [
        f"{key}={_shown(now.get(key))} (it was {_shown(value)})"
        for key, value in file.settings.items()
        if now.get(key) != value
    ]
    budget = config.scheduler.max_num_batched_tokens
    if budget > file.most_tokens:
        found.append(f"scheduler.max_num_batched_tokens={budget} (steps of at most {file.most_tokens} were measured)")
    return found


def read_fit(path: str) -> FitFile:
    """Raises ConfigError, which says what of the file does not hold."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"latency.path={path}: cannot be read ({reason}); it takes a file that `tokenyard calibrate` has written"
        ) from error
    if len(content) > _MOST_BYTES:
        raise _not_ours(path, f"it has more than {_MOST_BYTES} bytes")
    try:
        found = msgspec.json.decode(content, type=FitFile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _not_ours(path, str(error)) from error
    if (problem := _problem(found)) is not None:
        raise _not_ours(path, problem)
    return found


def write_fit(path: Path, file: FitFile) -> None:
    """All of it or nothing. Raises UserError."""
    text = json.dumps(msgspec.to_builtins(file), indent=2) + "\n"
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise UserError(f"{path} cannot be written: {error.strerror}; name another file with --to") from error


def _problem(file: FitFile) -> str | None:
    if file.format != FORMAT:
        return f"its format is {file.format!r:.60}, not {FORMAT!r}"
    if file.version != VERSION:
        return f"it has version {file.version}, and this version of Tokenyard reads {VERSION}"
    fit = file.fit
    if not 0 < fit.per_step < math.inf:
        return f"fit.per_step={fit.per_step} must be above 0"
    rest = (*fit.per_token, fit.per_decode, fit.per_prefill, fit.per_decode_context_token, fit.per_prefill_pair)
    if not all(0 <= value < math.inf for value in rest):
        return "a number of fit is below 0 or not finite"
    return None if _are_knots(fit.token_knots, len(fit.per_token)) else "fit.token_knots must ascend from 0"


def _are_knots(knots: Sequence[int], num_slopes: int) -> bool:
    is_ascending = all(left < right for left, right in itertools.pairwise(knots))
    return 0 < len(knots) <= _MOST_KNOTS and knots[0] == 0 and is_ascending and len(knots) == num_slopes


def _not_ours(path: str, reason: str) -> ConfigError:
    return ConfigError(f"latency.path={path}: not a file of `tokenyard calibrate` ({reason}); write one with it")


def _shown(value: str | int | None) -> str:
    return "null" if value is None else str(value)
