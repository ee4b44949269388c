"""ModelRunnerOutput as a record, as far as a scheduler looks at it, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tokenyard.runner_output import Logprobs, ModelRunnerOutput, PromptLogprobs
from tokenyard.trace.records import PromptChunk, Sampled

if TYPE_CHECKING:
    from tokenyard.scheduler_output import SchedulerOutput


def result_to_record(output: SchedulerOutput, result: ModelRunnerOutput) -> Sampled:
    """Log probabilities and pooled states are left out: nothing that is decided depends on them."""
    is_plain = np.array_equal(result.num_sampled, output.samples)
    drafts = result.draft_token_ids
    return Sampled(
        tokens=tuple(result.token_ids.tolist()),
        counts=None if is_plain else tuple(result.num_sampled.tolist()),
        errors=dict(result.errors),
        prompt_logprobs=tuple(
            PromptChunk(chunk.request_id, chunk.start, len(chunk.logprobs.token_ids))
            for chunk in result.prompt_logprobs
        ),
        drafts=None if drafts is None else tuple(tuple(draft.tolist()) for draft in drafts),
        kv_transfers=tuple(result.finished_kv_transfers),
    )


def result_from_record(output: SchedulerOutput, record: Sampled) -> ModelRunnerOutput:
    """Prompt logprobs are there with no numbers in them: which ones came is all that counts."""
    counts, drafts = record.counts, record.drafts
    return ModelRunnerOutput(
        step=output.step,
        num_sampled=output.samples.astype(np.int32) if counts is None else np.array(counts, dtype=np.int32),
        token_ids=np.array(record.tokens, dtype=np.int32),
        prompt_logprobs=tuple(
            PromptLogprobs(request_id=chunk.id, start=chunk.start, logprobs=_no_logprobs(chunk.num_tokens))
            for chunk in record.prompt_logprobs
        ),
        draft_token_ids=None if drafts is None else [np.array(draft, dtype=np.int32) for draft in drafts],
        finished_kv_transfers=record.kv_transfers,
        errors=dict(record.errors),
    )


def _no_logprobs(count: int) -> Logprobs:
    return Logprobs(
        rows=np.arange(count, dtype=np.int32),
        token_ids=np.zeros((count, 1), dtype=np.int32),
        logprobs=np.zeros((count, 1), dtype=np.float32),
        sampled_ranks=np.ones(count, dtype=np.int32),
    )
