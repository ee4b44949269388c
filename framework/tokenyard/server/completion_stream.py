"""CompletionStream: the events of a streamed completion, as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokenyard.server.chunks import ChunkFrame, encode
from tokenyard.server.completion_choices import ChoiceOptions, CompletionChoice, PromptWriter
from tokenyard.server.usage import UsageCount

if TYPE_CHECKING:
    from tokenyard.engine.input_processor import TokenizedPrompt
    from tokenyard.model.tokenizer import Tokenizer
    from tokenyard.outputs import CompletionOutput, RequestOutput

_PLAIN_TAIL = b',"logprobs":null,"finish_reason":null,"stop_reason":null}'


class CompletionStream:
    """Deltas of the engine in, events out. A choice has no event with empty text before its last one.

    Most streams are of nothing but text; their events are put together from pieces, which is what a token costs most.
    """

    def __init__(
        self,
        frame: ChunkFrame,
        prompts: Sequence[TokenizedPrompt],
        tokenizer: Tokenizer,
        options: ChoiceOptions,
        *,
        includes_usage: bool,
        has_continuous_usage: bool,
    ) -> None:
        self._frame = frame
        self._count = options.num_choices
        self._usage = UsageCount(prompts) if includes_usage else None
        self._has_continuous_usage = has_continuous_usage
        self._heads: dict[int, bytes] = {}
        self._tail = _PLAIN_TAIL + frame.tail
        self._is_plain = options.is_plain and not has_continuous_usage
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._options = options
        self._writers: dict[int, PromptWriter] = {}  # by index of the prompt

    def events(self, prompt_index: int, delta: RequestOutput) -> list[bytes]:
        """What a delta of the prompt with that index makes to be sent; often one event, perhaps none."""
        if self._usage is not None:
            self._usage.add(prompt_index, delta)
        if self._is_plain:
            return self._plain_events(prompt_index, delta)
        usage = self._usage.usage() if self._usage is not None and self._has_continuous_usage else None
        return [self._frame.event(encode(part), usage) for part in self._writer(prompt_index).take(delta)]

    def usage_event(self) -> bytes | None:
        """The event after all others, if there is one."""
        return None if self._usage is None else self._frame.event(usage=self._usage.usage())

    def _writer(self, prompt_index: int) -> PromptWriter:
        """Made with the first delta: there may be very many prompts, each to be decoded for its echo."""
        writer = self._writers.get(prompt_index)
        if writer is None:
            prompt = self._prompts[prompt_index]
            writer = PromptWriter(prompt_index * self._count, prompt, self._tokenizer, self._options)
            self._writers[prompt_index] = writer
        return writer

    def _plain_events(self, prompt_index: int, delta: RequestOutput) -> list[bytes]:
        events = []
        for choice in delta.outputs:
            if choice.finish_reason is not None:
                events.append(self._last(prompt_index, choice))
            elif choice.text:
                index = prompt_index * self._count + choice.index
                head = self._heads.get(index) or self._head(index)
                events.append(head + encode(choice.text) + self._tail)
        return events

    def _last(self, prompt_index: int, choice: CompletionOutput) -> bytes:
        last = CompletionChoice(
            index=prompt_index * self._count + choice.index,
            text=choice.text,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )
        return self._frame.event(encode(last))

    def _head(self, index: int) -> bytes:
        head = self._heads[index] = self._frame.head + b'{"index":%d,"text":' % index
        return head
