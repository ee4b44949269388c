"""An engine with a real model, without a front end: token ids in, and what EngineCoreOutputs say of each request."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import torch
import transformers
from tokenyard.launch.assemble import build_engine
from tokenyard.launch.compose import load_engine_config
from tokenyard.request import EngineCoreRequest, FinishReason
from tokenyard.sampling_params import SamplingParams
from tokenyard.testing.contracts.logprobs import ReceivedLogprobs


class CoreRun:
    """Requests are named by the caller; everything that was told of one is kept by its name."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        given = {override.partition("=")[0] for override in overrides}
        base = ["model.dtype=float32", "kv_cache.num_blocks=400", "kv_cache.block_size=4"]
        own = [override for override in base if override.partition("=")[0] not in given]
        config, catalogue = load_engine_config([f"model.name={folder}", *own, *overrides])
        self.engine = build_engine(config, catalogue)
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, FinishReason] = {}
        self.errors: dict[str, str | None] = {}
        self.num_cached: dict[str, int] = {}
        self.logprobs = ReceivedLogprobs()

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        bad_words_token_ids: tuple[tuple[int, ...], ...] = (),
    ) -> None:
        self.tokens[name] = []
        self.engine.core.add_request(
            EngineCoreRequest(
                request_id=name,
                prompt_token_ids=np.array(prompt, dtype=np.int32),
                params=params,
                bad_words_token_ids=bad_words_token_ids if params.bad_words else (),
                arrival_time=self.engine.clock.now(),
                skip_prefix_cache=bool(params.skip_reading_prefix_cache),
            )
        )

    def run(self) -> Self:
        """Until every request has ended."""
        for _ in range(5000):
            if not self.engine.core.has_requests():
                return self
            self._step()
        raise AssertionError("not done after 5000 steps")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.engine.core.shutdown()

    def _step(self) -> None:
        outputs = self.engine.core.step()
        self.logprobs.take(outputs, {name: name for name in self.tokens})
        end = 0
        for name, count in zip(outputs.request_ids, outputs.num_tokens.tolist(), strict=True):
            start, end = end, end + count
            self.tokens[name] += outputs.token_ids[start:end].tolist()
        for admitted in outputs.admitted:
            self.num_cached[admitted.request_id] = admitted.num_cached_tokens
        for ended in outputs.finished:
            self.ends[ended.request_id], self.errors[ended.request_id] = ended.reason, ended.error


@cache
def _reference(folder: Path) -> torch.nn.Module:
    model: torch.nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    return model


@torch.inference_mode()
def reference_logprobs(folder: Path, tokens: Sequence[int]) -> torch.Tensor:
    """[len(tokens) - 1, V] float32: what transformers says of each token but the first, in one pass over all."""
    logits = _reference(folder)(torch.tensor([list(tokens)]), use_cache=False).logits[0, :-1]
    result: torch.Tensor = logits.float().log_softmax(-1)
    return result
