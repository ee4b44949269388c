"""AsyncLLM: streaming generation for asyncio programs."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from tokenyard.engine.async_client import AsyncClient, Load, Submission
from tokenyard.engine.engine_thread import EngineThread
from tokenyard.errors import ValidationError
from tokenyard.front_end import ChatOptions, FrontEnd, check_content_format, start_engine, start_own_process
from tokenyard.language_model import LanguageModel
from tokenyard.launch.llm_arguments import refuse_call_arguments
from tokenyard.metrics import Metric, metrics_of
from tokenyard.sampling_checks import short

if TYPE_CHECKING:
    from tokenyard.call_arguments import Conversation
    from tokenyard.catalogue import Catalogue
    from tokenyard.config import EngineConfig
    from tokenyard.engine.input_processor import Prompt, TokenizedPrompt
    from tokenyard.engine.link import EngineLink
    from tokenyard.engine.request_listener import RequestListener
    from tokenyard.errors import EngineDeadError
    from tokenyard.front_end import OnProgress
    from tokenyard.ipc.progress import ProgressReading
    from tokenyard.outputs import RequestOutput
    from tokenyard.sampling_params import SamplingParams
    from tokenyard.scheduling_hints import SchedulingHints

_MAX_ID = 256  # characters


class AsyncLLM(LanguageModel):
    """A model with an engine in a thread of its own, or with `engine.process=own` in a process of its own.

    Made with the arguments of LLM:

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

    @classmethod
    def from_link(cls, link: EngineLink, front: FrontEnd) -> Self:
        """Around an engine that was started already, and belongs to this object from now on."""
        llm = cls.__new__(cls)
        llm._take_over(link, front)
        return llm

    @property
    def front(self) -> FrontEnd:
        """Tokenizer, limits and defaults."""
        return self._front

    @property
    def load(self) -> Load:
        """What the engine has to do, and has done."""
        return self._client.load

    def submit(
        self,
        prompts: Sequence[TokenizedPrompt],
        params: Sequence[SamplingParams],
        label: str,
        priority: int = 0,
        scheduling: SchedulingHints | None = None,
    ) -> Submission:
        """Queue checked prompts, all or none, for the running coroutine, which has to close what it gets."""
        return self._client.submit(label, prompts, params, priority, scheduling)

    def watch(self, listener: RequestListener) -> None:
        """Tell this one what becomes of requests that are submitted from now on."""
        self._client.watch(listener)

    def on_death(self, callback: Callable[[EngineDeadError], None]) -> None:
        """Call this when the engine ends, `shutdown` included: see AsyncClient.on_death."""
        self._client.on_death(callback)

    def progress(self) -> ProgressReading:
        """How far the engine is; asks nobody."""
        return self._link.progress()

    def num_dropped_frames(self) -> int:
        """What came from the engine's process and was no message."""
        return self._link.num_dropped_frames()

    def dump_stacks(self, path: Path | None = None) -> str:
        """Python stacks of this process and the engine's, for people: see EngineLink.dump_stacks."""
        return self._link.dump_stacks(path)

    def kill(self, cause: str) -> None:
        """End an engine that hangs: streams raise EngineDeadError with the cause."""
        self._link.kill(cause)

    def abort_all(self) -> None:
        """End all requests; their streams end with finish reason `abort`."""
        self._client.abort_all()

    def _start(
        self,
        config: EngineConfig,
        catalogue: Catalogue,
        hub_token: str | bool | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        start = start_own_process if config.engine.process == "own" else _start_thread
        self._take_over(*start(config, catalogue, hub_token, on_progress))

    def _take_over(self, link: EngineLink, front: FrontEnd) -> None:
        self._link, self._front = link, front
        self._client = AsyncClient(self._link, self._front.inputs, self._front.tokenizer)
        self.model_config = self._front.model_config
        # At the interpreter's end too: a thread within torch must not outlive it.
        self._finalizer = weakref.finalize(self, _shut_down, self._link, self._front)


def _start_thread(
    config: EngineConfig,
    catalogue: Catalogue,
    hub_token: str | bool | None,
    on_progress: OnProgress | None,
) -> tuple[EngineLink, FrontEnd]:
    thread = EngineThread(lambda: start_engine(config, catalogue, hub_token, on_progress))
    try:
        return thread, FrontEnd(config, thread.engine)
    except BaseException:
        thread.stop()
        raise


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
