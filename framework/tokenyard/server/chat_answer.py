"""The whole answer of the chat endpoint, in OpenAI's form with vLLM's further fields."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec

from tokenyard import __version__
from tokenyard.server.chat_logprobs import ChatLogprobs, chat_logprobs
from tokenyard.server.logprobs import TokenLogprob, by_token_id
from tokenyard.server.usage import Usage, usage_of

if TYPE_CHECKING:
    from tokenyard.config import EngineConfig
    from tokenyard.outputs import CompletionOutput, RequestOutput


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """What the model said. What this version never makes is null."""

    role: str
    content: str
    refusal: None = None
    annotations: tuple[()] = ()
    audio: None = None
    function_call: None = None
    reasoning: None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One of n answers."""

    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """The body of an answer that is no stream."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int  # Unix seconds
    model: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: str | None
    system_fingerprint: str
    prompt_logprobs: list[Mapping[int, TokenLogprob] | None] | None
    prompt_token_ids: list[int] | None
    prompt_text: str | None
    kv_transfer_params: None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """What stands in an answer, streamed or not, besides what the model makes."""

    response_id: str
    model: str
    fingerprint: str
    role: str  # of the message
    prefix: str = ""  # of its content: an echoed message
    num_top_logprobs: int | None = None  # None = no logprobs
    names_tokens_by_id: bool = False
    includes_token_ids: bool = False
    includes_usage: bool = False  # of a stream: see StreamFields
    has_continuous_usage: bool = False
    service_tier: str | None = None

    def logprobs(self, output: CompletionOutput) -> ChatLogprobs | None:
        """Those of an output's tokens; None where none were asked for."""
        if self.num_top_logprobs is None or output.logprobs is None:
            return None
        return chat_logprobs(output, self.num_top_logprobs, as_token_ids=self.names_tokens_by_id)


def chat_completion(options: AnswerOptions, output: RequestOutput) -> bytes:
    """The answer that a finished output is, as JSON."""
    prompt_logprobs = output.prompt_logprobs
    answer = ChatCompletion(
        id=options.response_id,
        created=int(time.time()),
        model=options.model,
        choices=[_choice(options, choice) for choice in output.outputs],
        usage=usage_of([output]),
        service_tier=options.service_tier,
        system_fingerprint=options.fingerprint,
        prompt_logprobs=None if prompt_logprobs is None else by_token_id(prompt_logprobs),
        prompt_token_ids=output.prompt_token_ids if options.includes_token_ids else None,
        prompt_text=output.prompt,
    )
    return msgspec.json.encode(answer)


def _choice(options: AnswerOptions, output: CompletionOutput) -> ChatChoice:
    return ChatChoice(
        index=output.index,
        message=Message(role=options.role, content=options.prefix + output.text),
        logprobs=options.logprobs(output),
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
        token_ids=output.token_ids if options.includes_token_ids else None,
    )


def system_fingerprint(config: EngineConfig) -> str:
    """The same for the same version, model and parts; a seed gives the same tokens only where it is."""
    parts = repr((__version__, config.model, config.attention, config.executor, config.engine.name))
    return f"tokenyard-{hashlib.sha256(parts.encode()).hexdigest()[:12]}"
