"""The chat endpoint's answer as a stream: for each choice its role, its content as it comes, and its end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Iterator
from typing import TYPE_CHECKING

from tokenyard.server.chat_logprobs import ChatLogprobs, TokenLogprob
from tokenyard.server.chunks import ChunkFrame, encode
from tokenyard.server.usage import UsageCount

if TYPE_CHECKING:
    from tokenyard.engine.input_processor import TokenizedPrompt
    from tokenyard.outputs import CompletionOutput, RequestOutput
    from tokenyard.server.chat_answer import AnswerOptions

_CONTENT_END = b'},"logprobs":null,"finish_reason":null}'


class ChatStream:
    """Turns the outputs of one prompt into events; its only state is what has not been sent.

    A chunk of content always has text. Logprobs and ids of tokens without text of their own, as those of a part of a
    character, come with the text that follows, or with the choice's end.
    """

    def __init__(self, options: AnswerOptions, prompt: TokenizedPrompt, num_choices: int) -> None:
        self._options = options
        self._prompt = prompt
        self._frame = ChunkFrame(
            object_name="chat.completion.chunk",
            response_id=options.response_id,
            created=int(time.time()),
            model=options.model,
        )
        self._usage = UsageCount([prompt])
        self._contents = [b'{"index":%d,"delta":{"content":' % index for index in range(num_choices)]
        self._has_details = options.num_top_logprobs is not None or options.includes_token_ids
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in range(num_choices)]
        self._token_ids: list[list[int]] = [[] for _ in range(num_choices)]

    async def events(self, outputs: AsyncGenerator[tuple[int, RequestOutput], None]) -> AsyncGenerator[bytes, None]:
        """Each is a whole `data: ...` block. Closing this closes `outputs`."""
        has_begun = False
        async with contextlib.aclosing(outputs):
            async for _, output in outputs:
                self._usage.add(0, output)
                if not has_begun:  # not before: what is refused is to be a plain HTTP error
                    has_begun = True
                    for event in self._beginnings():
                        yield event
                for choice in output.outputs:
                    for event in self._events(choice):
                        yield event
        if self._options.includes_usage:
            yield self._event(b"", self._last_fields(), with_usage=True)

    def _beginnings(self) -> Iterator[bytes]:
        role, extra = encode(self._options.role), self._first_fields()
        for index, head in enumerate(self._contents):
            yield self._event(
                b'{"index":%d,"delta":{"role":%b,"content":"","refusal":null' % (index, role) + _CONTENT_END, extra
            )
            extra = b""
            if self._options.prefix:
                yield self._event(head + encode(self._options.prefix) + _CONTENT_END)

    def _events(self, choice: CompletionOutput) -> Iterator[bytes]:
        """The content apart from the end: clients expect no text beside a finish reason."""
        if self._has_details:
            self._keep_details(choice)
        if choice.text:
            end = self._details(choice.index) + b',"finish_reason":null}' if self._has_details else _CONTENT_END
            yield self._event(self._contents[choice.index] + encode(choice.text) + end)
        if choice.finish_reason is not None:
            reasons = (encode(choice.finish_reason), encode(choice.stop_reason))
            end = self._details(choice.index) + b',"finish_reason":%b,"stop_reason":%b}' % reasons
            yield self._event(b'{"index":%d,"delta":{' % choice.index + end, self._last_fields())

    def _keep_details(self, choice: CompletionOutput) -> None:
        if (logprobs := self._options.logprobs(choice)) is not None:
            self._logprobs[choice.index] += logprobs.content
        if self._options.includes_token_ids:
            self._token_ids[choice.index] += choice.token_ids

    def _details(self, index: int) -> bytes:
        """The delta's end and what is kept beside it, which is sent with that."""
        logprobs, token_ids = self._logprobs[index], self._token_ids[index]
        told = b'},"logprobs":' + encode(ChatLogprobs(content=logprobs) if logprobs else None)
        if self._options.includes_token_ids:
            told += b',"token_ids":' + encode(token_ids)
        self._logprobs[index], self._token_ids[index] = [], []
        return told

    def _first_fields(self) -> bytes:
        """What the first chunk alone has."""
        fields = b""
        if self._options.includes_token_ids:
            fields += b',"prompt_token_ids":' + encode(self._prompt.token_ids)
        if self._prompt.text is not None:
            fields += b',"prompt_text":' + encode(self._prompt.text)
        return fields

    def _last_fields(self) -> bytes:
        """What a choice's last chunk has, and the one with the usage."""
        tier = self._options.service_tier
        fields = b',"system_fingerprint":' + encode(self._options.fingerprint)
        return fields if tier is None else fields + b',"service_tier":' + encode(tier)

    def _event(self, choice: bytes, extra: bytes = b"", *, with_usage: bool = False) -> bytes:
        if extra or with_usage or self._options.has_continuous_usage:
            shows = with_usage or self._options.has_continuous_usage
            usage = encode(self._usage.usage()) if shows else b"null"
            return b"".join((self._frame.head, choice, b"]", extra, b',"usage":', usage, b"}\n\n"))
        return self._frame.event(choice)
