"""LLM: offline generation, with the names and habits of vLLM's class of that name."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypeAlias

from tokenyard.call_arguments import as_conversations, as_prompts
from tokenyard.engine.client import InprocClient
from tokenyard.engine.output_processor import OutputProcessor, Update
from tokenyard.engine.process_core import RemoteEngine
from tokenyard.errors import UnsupportedError
from tokenyard.front_end import ChatOptions, FrontEnd, check_content_format, start_engine, start_own_process
from tokenyard.language_model import LanguageModel
from tokenyard.launch.assemble import RunningEngine
from tokenyard.launch.llm_arguments import refuse_call_arguments
from tokenyard.metrics import Metric, metrics_of
from tokenyard.outputs import RequestOutput
from tokenyard.progress import ProgressBarFactory, request_progress
from tokenyard.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from tokenyard.call_arguments import Conversation
    from tokenyard.catalogue import Catalogue
    from tokenyard.clock import Clock
    from tokenyard.config import EngineConfig
    from tokenyard.engine.client import AddRequests
    from tokenyard.engine.input_processor import Prompt, TokenizedPrompt
    from tokenyard.front_end import Batch, OnProgress
    from tokenyard.interfaces.engine_core import EngineCore
    from tokenyard.launch.assemble import EngineFacts
    from tokenyard.sampling_params import SamplingParams
    from tokenyard.scheduling_hints import SchedulingHints

Scheduling: TypeAlias = "Mapping[str, object] | SchedulingHints | Sequence[Mapping[str, object] | None] | None"


class LLM(LanguageModel):
    """A model with an engine of its own, in this process or with `engine.process=own` in one of its own.

    `LLM("smollm2-135m", dtype="float32", max_model_len=2048, scheduler="fcfs", attention="torch_native",
    overrides=["kv_cache.num_blocks=64"])`. Every part is chosen as on the command line: `scheduler`, `attention`,
    `engine`, `kv_cache` and `executor` name plugins, `overrides` are Hydra overrides, and the other keywords are
    vLLM's: `docs/reference/api.md` lists them; one that this version does not have is refused by name.

    Use it as a context manager, or call `shutdown` to give the memory back.
    """

    _generates_with = "generate, chat, enqueue and wait_for_completion"

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        dtype: str | None = None,
        max_model_len: int | None = None,
        seed: int | None = None,
        scheduler: str | None = None,
        attention: str | None = None,
        kv_cache: str | None = None,
        engine: str | None = None,
        executor: str | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        block_size: int | None = None,
        enable_prefix_caching: bool | None = None,
        gpu_memory_utilization: float | None = None,
        revision: str | None = None,
        hf_token: str | bool | None = None,
        overrides: Sequence[str] | None = None,
        **others: object,
    ) -> None:
        arguments = {
            "dtype": dtype,
            "max_model_len": max_model_len,
            "seed": seed,
            "scheduler": scheduler,
            "attention": attention,
            "kv_cache": kv_cache,
            "engine": engine,
            "executor": executor,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "block_size": block_size,
            "enable_prefix_caching": enable_prefix_caching,
            "gpu_memory_utilization": gpu_memory_utilization,
            "revision": revision,
            **others,
        }
        self._start_with(model, arguments, overrides, hf_token)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | ProgressBarFactory = True,
        priority: int | Sequence[int] | None = None,
        scheduling: Scheduling = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
        **others: object,
    ) -> list[RequestOutput]:
        """Complete raw prompts: text, token ids, or dicts of one of them; no chat template is applied.

        Returns one RequestOutput per prompt, in the order of the prompts. One SamplingParams serves all, or there is
        one per prompt; None takes the model's own defaults, with which an explicit one is not merged. Everything is
        checked before anything is queued. A lower `priority` is more urgent; it is handed to the scheduling policy, and
        fcfs does not look at it. `scheduling` are hints for the policy: see `tokenyard.scheduling_hints.read_hints`.
        `tokenization_kwargs` has the key `add_special_tokens`. `use_tqdm` shows a progress bar on a terminal, or is
        what makes one, such as `tqdm.tqdm`.
        """
        refuse_call_arguments("generate", others)
        tokenized = [self._front.tokenize(prompt, tokenization_kwargs) for prompt in as_prompts(prompts)]
        return self._complete(self._front.batch(tokenized, sampling_params, priority, scheduling), use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | ProgressBarFactory = True,
        *,
        priority: int | Sequence[int] | None = None,
        scheduling: Scheduling = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        **others: object,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several, through the model's chat template.

        A conversation is a list of `{"role": ..., "content": ...}`. The template is the model's, or the text given as
        `chat_template`; `chat_template_kwargs` are variables that it reads, such as `enable_thinking`, `tools` what it
        is told of tools. `continue_final_message` goes on with the last message instead of answering it. The rest is as
        in `generate`.
        """
        refuse_call_arguments("chat", others)
        check_content_format(chat_template_content_format)
        options = ChatOptions(
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        tokenized = [self._front.tokenize_chat(conversation, options) for conversation in as_conversations(messages)]
        return self._complete(self._front.batch(tokenized, sampling_params, priority, scheduling), use_tqdm)

    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
        scheduling: Scheduling = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
        **others: object,
    ) -> list[str]:
        """Queue prompts as `generate` does, without running them; returns their request ids."""
        refuse_call_arguments("enqueue", others)
        tokenized = [self._front.tokenize(prompt, tokenization_kwargs) for prompt in as_prompts(prompts)]
        batch = self._front.batch(tokenized, sampling_params, priority, scheduling)
        with self._lock:
            request_ids = self._client.submit(*batch)
            self._enqueued += zip(request_ids, map(num_tokens, batch.prompts), strict=True)
        return request_ids

    def wait_for_completion(
        self, output_type: type[RequestOutput] | None = None, *, use_tqdm: bool | ProgressBarFactory = True
    ) -> list[RequestOutput]:
        """Run what was enqueued; its outputs in the order of enqueueing, an empty list when there is nothing.

        After Ctrl-C it is still queued: call again, or `shutdown`.
        """
        if output_type is not None and output_type is not RequestOutput:
            raise UnsupportedError(
                f"output_type={output_type!r} is not available in this version; leave it out, or RequestOutput",
                parameter="output_type",
                value=output_type,
            )
        with self._lock:
            # `generate` may have run some of them along.
            waiting = {
                request_id: length for request_id, length in self._enqueued if not self._client.is_finished(request_id)
            }
            with request_progress(list(waiting.values()), use_tqdm) as progress:
                self._client.run(list(waiting), progress)
            outputs = [self._client.take(request_id) for request_id, _ in self._enqueued]
            self._enqueued.clear()
            return outputs

    def get_world_size(self) -> int:
        """How many processes share the model."""
        return 1

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False while requests hold blocks."""
        return self._engine.core.reset_prefix_cache()

    def get_metrics(self) -> list[Metric]:
        """Counters since the start, and gauges of now."""
        return metrics_of(self._engine.core.stats())

    def shutdown(self) -> None:
        """Stop the engine and give its memory back; a second call does nothing."""
        self._engine.core.shutdown()
        self._front.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    # For the command line

    def stream(
        self, prompt: TokenizedPrompt, params: SamplingParams, on_text: Callable[[str], bool | None]
    ) -> RequestOutput:
        """Run one request; `on_text` gets what each new token of its first choice adds, and may return False to end it.

        A token may add no text: that of an incomplete character, or of what may become a stop string, comes later.
        """

        def on_update(request_ids: Sequence[str], update: Update) -> None:
            output = self._client.stream_output(request_ids[0])
            for choice in () if output is None else output.outputs:
                if choice.index == 0 and on_text(choice.text) is False:
                    self._client.abort(request_ids)

        deltas = dataclasses.replace(params, output_kind=RequestOutputKind.DELTA)
        with self._lock:
            (output,) = self._client.complete([prompt], [deltas], [0], on_update)
        return output

    def tokenize_chat(self, conversation: Conversation) -> TokenizedPrompt:
        """A checked prompt of a conversation."""
        return self._front.tokenize_chat(conversation, ChatOptions())

    def tokenize(self, prompt: Prompt) -> TokenizedPrompt:
        """A checked raw prompt."""
        return self._front.tokenize(prompt)

    @property
    def engine(self) -> RunningEngine:
        """The parts that run."""
        return self._engine

    def _start(
        self,
        config: EngineConfig,
        catalogue: Catalogue,
        hub_token: str | bool | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        add_requests: AddRequests | None = None
        if config.engine.process == "own":
            link, self._front = start_own_process(config, catalogue, hub_token, on_progress)
            remote = RemoteEngine(link)
            self._engine, add_requests = _facts_with(remote, link.clock, self._front.engine), remote.add_requests
            weakref.finalize(self, link.stop)  # at the interpreter's end, too
        else:
            self._engine = start_engine(config, catalogue, hub_token, on_progress)
            try:
                self._front = FrontEnd(config, self._engine)
            except BaseException:
                self._engine.core.shutdown()
                raise
        self._client = InprocClient(
            engine=self._engine.core,
            clock=self._engine.clock,
            inputs=self._front.inputs,
            outputs=OutputProcessor(self._front.tokenizer),
            add_requests=add_requests,
        )
        self.model_config = self._front.model_config
        self._enqueued: list[tuple[str, int]] = []  # request id and prompt tokens
        self._lock = threading.RLock()  # one engine, one thread at a time; a callback may generate again

    def _complete(self, batch: Batch, use_tqdm: bool | ProgressBarFactory) -> list[RequestOutput]:
        with self._lock, request_progress(list(map(num_tokens, batch.prompts)), use_tqdm) as progress:
            return self._client.complete(batch.prompts, batch.params, batch.priorities, progress, batch.scheduling)


def _facts_with(core: EngineCore, clock: Clock, facts: EngineFacts) -> RunningEngine:
    return RunningEngine(
        core=core,
        clock=clock,
        files=facts.files,
        report=facts.report,
        max_model_len=facts.max_model_len,
        num_blocks=facts.num_blocks,
        metadata_type=facts.metadata_type,
    )


def num_tokens(prompt: TokenizedPrompt) -> int:
    """Of a prompt."""
    return len(prompt.token_ids)
