"""What must hold of log probabilities: each stays with its token, and a prompt's are complete before the output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from tokenyard.testing.errors import ContractViolation
from tokenyard.testing.scripted_logprobs import logprob_of, num_logprobs

if TYPE_CHECKING:
    from tokenyard.engine_outputs import EngineCoreOutputs
    from tokenyard.runner_output import Logprobs, PromptLogprobs
    from tokenyard.testing.records import RequestRecord

_NO_VOCABULARY = 1  # it matters whether a request asks, not for how many


def check_prompt_logprobs(outputs: EngineCoreOutputs, records: Mapping[str, RequestRecord]) -> None:
    """Before the tokens of `outputs` are delivered: chunks come in order, of live requests that ask."""
    for chunk in outputs.prompt_logprobs:
        record = records.get(chunk.request_id)
        if record is None or record.is_finished:
            raise ContractViolation(
                "request.only_live", f"prompt logprobs of '{chunk.request_id}', which has ended or never was"
            )
        _check_chunk(chunk, record)
    failed = {finished.request_id for finished in outputs.finished if finished.error is not None}
    for request_id in outputs.request_ids:
        record = records.get(request_id)
        if record is None or record.output_token_ids or not _asks_of_prompt(record) or request_id in failed:
            continue
        if record.prompt_logprobs_until < len(record.core.prompt_token_ids):
            raise ContractViolation(
                "request.prompt_logprobs_complete",
                f"{record} gets its first token, with prompt logprobs up to position {record.prompt_logprobs_until} of "
                f"{len(record.core.prompt_token_ids)}",
            )


def check_sampled_logprobs(outputs: EngineCoreOutputs, records: Mapping[str, RequestRecord]) -> None:
    """When the tokens of `outputs` were delivered: each of a request that asks has its own, and no other has any."""
    found = {} if outputs.logprobs is None else dict(_first_column(outputs.logprobs))
    expected = dict(_expected(outputs, records))
    if found != expected:
        place = min(one for one in found.keys() | expected.keys() if found.get(one) != expected.get(one))
        raise ContractViolation(
            "request.logprobs_as_sampled",
            f"token {place} of the step, of {list(outputs.request_ids)} with {outputs.num_tokens.tolist()} tokens, has "
            f"(id, logprob) {found.get(place)}, sampled was {expected.get(place)}",
        )


def _check_chunk(chunk: PromptLogprobs, record: RequestRecord) -> None:
    prompt, start = record.core.prompt_token_ids.tolist(), chunk.start
    stop = start + len(chunk.logprobs.rows)
    if not _asks_of_prompt(record) or not 1 <= start <= record.prompt_logprobs_until or stop > len(prompt):
        raise ContractViolation(
            "request.prompt_logprobs_in_order",
            f"{record} gets those of positions {start} to {stop} of {len(prompt)}, known are those before "
            f"{record.prompt_logprobs_until}, asked for are {'some' if _asks_of_prompt(record) else 'none'}",
        )
    found = [value for _, value in _first_column(chunk.logprobs)]
    expected = [(prompt[at], logprob_of(record.request_id, at, prompt[at])) for at in range(start, stop)]
    if found != expected:
        raise ContractViolation(
            "request.prompt_logprobs_as_computed", f"{record} from position {start} on: {found} instead of {expected}"
        )
    record.prompt_logprobs_until = max(record.prompt_logprobs_until, stop)


def _expected(
    outputs: EngineCoreOutputs, records: Mapping[str, RequestRecord]
) -> Iterator[tuple[int, tuple[int, float]]]:
    end = 0
    for request_id, count in zip(outputs.request_ids, outputs.num_tokens.tolist(), strict=True):
        start, end = end, end + count
        record = records[request_id]
        if num_logprobs(record.core.params, _NO_VOCABULARY) is not None:
            first = record.num_tokens - count
            for place in range(start, end):
                token_id = int(outputs.token_ids[place])
                yield place, (token_id, logprob_of(request_id, first + place - start, token_id))


def _first_column(logprobs: Logprobs) -> Iterator[tuple[int, tuple[int, float]]]:
    for row, token_ids, values in zip(logprobs.rows, logprobs.token_ids, logprobs.logprobs, strict=True):
        yield int(row), (int(token_ids[0]), float(values[0]))


def _asks_of_prompt(record: RequestRecord) -> bool:
    return num_logprobs(record.core.params, _NO_VOCABULARY, of_prompt=True) is not None
