"""LivePrompts: a workload's prompts for a model that runs, and what it answered, which comes back in later turns."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from tokenyard.errors import ConfigError, ModelLoadError
from tokenyard.model.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from tokenyard.arrays import IntArray
    from tokenyard.engine_outputs import EngineCoreOutputs
    from tokenyard.experiments.arrivals import Arrived
    from tokenyard.experiments.content import ContentTokens
    from tokenyard.launch.assemble import EngineFacts

logger = logging.getLogger(__name__)


class LivePrompts:
    """Answers of requests without a session are not kept: nothing could continue them."""

    def __init__(self, tokens: ContentTokens, *, has_content: bool) -> None:
        self._tokens = tokens
        self._has_content = has_content
        self._open: dict[str, tuple[str, list[IntArray]]] = {}  # by request id: session, and the tokens of each step
        self._answers: dict[str, list[IntArray]] = {}  # by session

    def of(self, arrived: Arrived) -> IntArray:
        """[num_prompt_tokens] of a request that is sent now; its answer is kept from now on."""
        request = arrived.request
        if request.content is None or not self._has_content:
            return self._tokens.unknown(arrived.number, request.num_prompt_tokens)
        answers = () if request.session is None else self._answers.get(request.session, ())
        if request.session is not None:
            self._open[arrived.request_id] = request.session, []
        return self._tokens.of(request.content, answers)

    def take(self, outputs: EngineCoreOutputs) -> None:
        """What a step has brought."""
        if self._open:
            self._take_tokens(outputs)
            for end in outputs.finished:
                if (found := self._open.pop(end.request_id, None)) is not None:
                    session, pieces = found
                    self._answers.setdefault(session, []).append(np.concatenate([np.empty(0, np.int32), *pieces]))

    def _take_tokens(self, outputs: EngineCoreOutputs) -> None:
        ends = np.cumsum(outputs.num_tokens)
        for request_id, end, count in zip(outputs.request_ids, ends, outputs.num_tokens, strict=True):
            if (found := self._open.get(request_id)) is not None:
                found[1].append(outputs.token_ids[end - count : end].copy())


def text_vocabulary(facts: EngineFacts) -> IntArray:
    """[V] ids of tokens that stand for text: no control tokens, and no rows that fill the embedding up."""
    size = facts.report.vocab_size
    special: frozenset[int] = frozenset()
    try:
        tokenizer = load_tokenizer(facts.files)
    except ModelLoadError as error:
        logger.warning("%s; prompts are made of all token ids, control tokens among them", error)
    else:
        size, special = min(size, tokenizer.vocab_size), tokenizer.special_ids
        tokenizer.close()
    found = np.setdiff1d(np.arange(size, dtype=np.int32), np.array(sorted(special), dtype=np.int32))
    if not len(found):
        raise ConfigError(f"model.name={facts.files.name}: its vocabulary has no token that stands for text")
    return found
