"""AsyncLLM: streaming generation for asyncio programs."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from tokenyard.engine.async_client import AsyncClient
from tokenyard.engine.engine_thread import EngineThread
from tokenyard.engine.link import EngineLink
from tokenyard.errors import ValidationError
from tokenyard.front_end import ChatOptions, FrontEnd, check_content_format, start_engine
from tokenyard.language_model import LanguageModel
from tokenyard.launch.llm_arguments import refuse_call_arguments
from tokenyard.metrics import Metric, metrics_of
from tokenyard.sampling_checks import short

if TYPE_CHECKING:
    from tokenyard.call_arguments import Conversation
    from tokenyard.catalogue import Catalogue
    from tokenyard.config import EngineConfig
    from tokenyard.engine.input_processor import Prompt, TokenizedPrompt
    from tokenyard.outputs import RequestOutput
    from tokenyard.sampling_params import SamplingParams
    from tokenyard.scheduling_hints import SchedulingHints

_MAX_ID = 256  # characters


class AsyncLLM(LanguageModel):
    """A model with an engine in a thread of its own; made with the arguments of LLM.

        async with AsyncLLM("smollm2-135m") as llm:
            async for output in llm.generate("Hello", SamplingParams(output_kind=RequestOutputKind.DELTA)):
                print(output.outputs[0].text, end="")

    Each call is one request; run many at once as tasks. Leaving the loop, closing the iterator or cancelling the task
    ends the request within a step. Making one blocks until the model is loaded.
    """

    _generates_with = "generate, chat and abort"

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        hf_token: str | bool | None = None,
        overrides: Sequence[str] | None = None,
        **arguments: object,
    ) -> None:
        self._start_with(model, arguments, overrides, hf_token)

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        scheduling: Mapping[str, object] | SchedulingHints | None = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
        **others: object,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one raw prompt: text, token ids, or a dict of one of them.

        Yields outputs as `sampling_params.output_kind` and `stream_interval` say; a consumer that is slow gets several
        tokens at once. The last one is `finished`. `request_id` is a label for outputs and `abort`; it need not be
        unique. Raises ValidationError for a request that is refused, EngineDeadError when the engine ends.
        """
        refuse_call_arguments("generate", others, "AsyncLLM")

        def tokenize() -> TokenizedPrompt:
            return self._front.tokenize(prompt, tokenization_kwargs)

        return self._stream(_label(request_id), tokenize, sampling_params, priority, scheduling)

    def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        scheduling: Mapping[str, object] | SchedulingHints | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        **others: object,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer one conversation through the model's chat template; otherwise as `generate`."""
        refuse_call_arguments("chat", others, "AsyncLLM")
        check_content_format(chat_template_content_format)
        options = ChatOptions(
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )

        def tokenize() -> TokenizedPrompt:
            return self._front.tokenize_chat(messages, options)

        return self._stream(_label(request_id), tokenize, sampling_params, priority, scheduling)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End the requests of this label; their streams end with finish reason `abort`. Unknown ones are ignored."""
        self._client.abort([request_id] if isinstance(request_id, str) else request_id)

    async def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False while requests hold blocks."""
        return await asyncio.to_thread(self._link.reset_prefix_cache)

    async def get_metrics(self) -> list[Metric]:
        """Counters since the start, and gauges of now."""
        return metrics_of(await asyncio.to_thread(self._link.stats))

    def shutdown(self) -> None:
        """Stop the engine after the step that runs and give its memory back; streams raise EngineDeadError."""
        self._finalizer()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.shutdown)

    async def _stream(
        self,
        label: str | None,
        tokenize: Callable[[], TokenizedPrompt],
        sampling_params: SamplingParams | None,
        priority: int,
        scheduling: Mapping[str, object] | SchedulingHints | None,
    ) -> AsyncGenerator[RequestOutput, None]:
        tokenized = await asyncio.to_thread(tokenize)  # a long prompt, or a template, would hold up all other streams
        batch = self._front.batch([tokenized], sampling_params, priority, scheduling)
        (params,), (number,), (hints,) = batch.params, batch.priorities, batch.scheduling
        # Closed with this generator, not when it is collected: that is what ends the request.
        async with contextlib.aclosing(self._client.stream(label, tokenized, params, number, hints)) as outputs:
            async for output in outputs:
                yield output

    # For the server

    @property
    def front(self) -> FrontEnd:
        """Tokenizer, limits and defaults."""
        return self._front

    def submit(
        self,
        prompt: TokenizedPrompt,
        params: SamplingParams,
        label: str,
        priority: int = 0,
        scheduling: SchedulingHints | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run one checked prompt: see AsyncClient.stream. It is queued when the first output is asked for."""
        return self._client.stream(label, prompt, params, priority, scheduling)

    def _start(self, config: EngineConfig, catalogue: Catalogue, hub_token: str | bool | None = None) -> None:
        thread = EngineThread(lambda: start_engine(config, catalogue, hub_token))
        self._link: EngineLink = thread
        try:
            self._front = FrontEnd(config, thread.engine)
        except BaseException:
            self._link.stop()
            raise
        self._client = AsyncClient(self._link, self._front.inputs, self._front.tokenizer)
        self.model_config = self._front.model_config
        # At the interpreter's end too: a thread within torch must not outlive it.
        self._finalizer = weakref.finalize(self, _shut_down, self._link, self._front)


def _shut_down(link: EngineLink, front: FrontEnd) -> None:
    link.stop()
    front.close()


def _label(request_id: object) -> str | None:
    if request_id is None or (isinstance(request_id, str) and 0 < len(request_id) <= _MAX_ID):
        return request_id
    raise ValidationError(
        f"request_id={short(request_id)} is not valid: it must be text of 1 to {_MAX_ID} characters",
        parameter="request_id",
        value=request_id,
    )
