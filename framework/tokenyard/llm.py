"""LLM: offline generation, with the names and habits of vLLM's class of that name."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypeAlias, TypeVar, cast

from tokenyard.engine.client import InprocClient
from tokenyard.engine.input_processor import InputProcessor, Prompt, TokenizedPrompt
from tokenyard.engine.output_processor import OutputProcessor, Update
from tokenyard.errors import UserError, ValidationError
from tokenyard.launch.assemble import RunningEngine, build_engine
from tokenyard.launch.compose import load_engine_config, load_engine_config_from
from tokenyard.launch.llm_arguments import llm_overrides, refuse_call_arguments
from tokenyard.metrics import Metric, metrics_of
from tokenyard.model.tokenizer import load_tokenizer
from tokenyard.progress import request_progress
from tokenyard.sampling_params import SamplingParams, default_sampling_params

if TYPE_CHECKING:
    from collections.abc import Callable

    from omegaconf import DictConfig

    from tokenyard.catalogue import Catalogue
    from tokenyard.config import EngineConfig
    from tokenyard.model.tokenizer import Tokenizer
    from tokenyard.outputs import RequestOutput

logger = logging.getLogger(__name__)

T = TypeVar("T")

Message: TypeAlias = Mapping[str, object]
Conversation: TypeAlias = Sequence[Message]


class ModelInfo:
    """`LLM.model_config`: what is loaded."""

    def __init__(self, engine: RunningEngine) -> None:
        self.model = engine.files.name
        self.max_model_len = engine.max_model_len
        self.dtype = engine.report.dtype
        self.vocab_size = engine.report.vocab_size


class LLM:
    """A model with an engine of its own, in this process.

    `LLM("smollm2-135m", dtype="float32", max_model_len=2048, scheduler="fcfs", attention="torch_native",
    overrides=["kv_cache.num_blocks=64"])`. Every part is chosen as on the command line: `scheduler`, `attention`,
    `engine`, `kv_cache` and `executor` name plugins, `overrides` are Hydra overrides, and the other keywords are
    vLLM's: `docs/reference/api.md` lists them; one that this version does not have is refused by name.

    Use it as a context manager, or call `shutdown` to give the memory back.
    """

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
            **others,
        }
        config, catalogue = load_engine_config([*llm_overrides(model, arguments), *_as_overrides(overrides)])
        self._start(config, catalogue)

    @classmethod
    def from_config(cls, config: DictConfig | Mapping[str, object] | Sequence[str]) -> LLM:
        """From a composed Hydra config (a `@hydra.main` script's own), or a list of override strings."""
        if isinstance(config, str | list | tuple):
            return cls.from_parts(*load_engine_config(_as_overrides(config)))
        if not isinstance(config, Mapping) and not hasattr(config, "items"):
            raise UserError(f"from_config takes a config, a dict or a list of overrides; got {config!r}")
        return cls.from_parts(*load_engine_config_from(cast("DictConfig | Mapping[str, object]", config)))

    @classmethod
    def from_parts(cls, config: EngineConfig, catalogue: Catalogue) -> LLM:
        """From a config that was converted and checked already."""
        llm = cls.__new__(cls)
        llm._start(config, catalogue)
        return llm

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
        **others: object,
    ) -> list[RequestOutput]:
        """Complete raw prompts: text, token ids, or dicts of one of them; no chat template is applied.

        Returns one RequestOutput per prompt, in the order of the prompts. One SamplingParams serves all, or there is
        one per prompt; None takes the model's own defaults. Everything is checked before anything is queued. A lower
        `priority` is more urgent; it is handed to the scheduling policy, and fcfs does not look at it.
        """
        refuse_call_arguments("generate", others)
        tokenized = [self._inputs.tokenize(prompt) for prompt in _as_prompts(prompts)]
        return self._run(tokenized, sampling_params, use_tqdm=use_tqdm, priority=priority)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, object] | None = None,
        **others: object,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several, through the model's chat template.

        A conversation is a list of `{"role": ..., "content": ...}`.
        """
        refuse_call_arguments("chat", others)
        tokenized = [
            self.tokenize_chat(conversation, add_generation_prompt, chat_template_kwargs)
            for conversation in _as_conversations(messages)
        ]
        return self._run(tokenized, sampling_params, use_tqdm=use_tqdm, priority=None)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer: Tokenyard's own, with encode, decode, render_chat, encode_chat and token_to_id."""
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What `sampling_params=None` stands for: the defaults, changed by the model's generation_config."""
        return default_sampling_params(self._engine.files.generation_config)

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False while requests hold blocks."""
        return self._engine.core.reset_prefix_cache()

    def get_metrics(self) -> list[Metric]:
        """Counters since the start, and gauges of now."""
        return metrics_of(self._engine.core.stats())

    def shutdown(self) -> None:
        """Stop the engine and give its memory back; a second call does nothing."""
        self._engine.core.shutdown()

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
        """Run one request; `on_text` gets each new piece of text, and may return False to end it there."""
        shown = 0

        def on_update(request_ids: Sequence[str], update: Update) -> None:
            nonlocal shown
            text = self._client.text(request_ids[0])
            piece, shown = text[shown:], len(text)
            if on_text(piece) is False:
                self._client.abort(request_ids)

        with self._lock:
            (output,) = self._client.complete([prompt], [params], [0], on_update)
        return output

    def tokenize_chat(
        self,
        conversation: Conversation,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> TokenizedPrompt:
        """A checked prompt of a conversation."""
        if not self._tokenizer.has_chat_template:
            raise UserError(
                f"model '{self.model_config.model}' has no chat template; give the prompt as text to generate()"
            )
        kwargs = _template_kwargs(chat_template_kwargs)
        ids = self._tokenizer.encode_chat(conversation, add_generation_prompt=add_generation_prompt, **kwargs)
        prompt = TokenizedPrompt(None, ids)
        self._inputs.check(prompt)
        return prompt

    def tokenize(self, prompt: Prompt) -> TokenizedPrompt:
        """A checked raw prompt."""
        return self._inputs.tokenize(prompt)

    @property
    def engine(self) -> RunningEngine:
        """The parts that run."""
        return self._engine

    def _start(self, config: EngineConfig, catalogue: Catalogue) -> None:
        self._engine = build_engine(config, catalogue, on_progress=logger.info)
        self._tokenizer = load_tokenizer(self._engine.files)
        self._inputs = InputProcessor(
            tokenizer=self._tokenizer,
            max_model_len=self._engine.max_model_len,
            vocab_size=self._engine.report.vocab_size,
            eos_token_ids=self._engine.files.eos_token_ids,
        )
        self._client = InprocClient(
            engine=self._engine.core,
            clock=self._engine.clock,
            inputs=self._inputs,
            outputs=OutputProcessor(self._tokenizer),
        )
        self.model_config = ModelInfo(self._engine)
        self._lock = threading.RLock()  # one engine, one thread at a time; a callback may generate again

    def _run(
        self,
        prompts: Sequence[TokenizedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        use_tqdm: bool,
        priority: int | Sequence[int] | None,
    ) -> list[RequestOutput]:
        params = self._params_for(sampling_params, len(prompts))
        priorities = _priorities_for(priority, len(prompts))
        with self._lock, request_progress(len(prompts), shown=use_tqdm) as progress:
            return self._client.complete(prompts, params, priorities, lambda request_ids, update: progress(update))

    def _params_for(
        self, given: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> Sequence[SamplingParams]:
        if given is None:
            given = self.get_default_sampling_params()
        if isinstance(given, SamplingParams):
            return [given] * count
        if not isinstance(given, Sequence) or not all(isinstance(row, SamplingParams) for row in given):
            raise ValidationError(
                f"sampling_params is a SamplingParams or a list of them; got {type(given).__name__}",
                parameter="sampling_params",
                value=given,
            )
        return _one_each("sampling_params", given, count)


def _as_overrides(overrides: str | Sequence[str] | None) -> Sequence[str]:
    if overrides is None:
        return ()
    if not isinstance(overrides, list | tuple) or not all(isinstance(override, str) for override in overrides):
        raise UserError(f"overrides are a list of strings such as ['kv_cache.num_blocks=64']; got {overrides!r}")
    return overrides


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, or several: a list of ints is one prompt of token ids."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise ValidationError(
            f"prompts is a prompt or a list of prompts; got {type(prompts).__name__}",
            parameter="prompts",
            value=prompts,
        )
    if prompts and all(isinstance(item, int) for item in prompts):
        return [cast("Sequence[int]", prompts)]
    return [cast("Prompt", prompt) for prompt in prompts]


def _template_kwargs(given: Mapping[str, object] | None) -> dict[str, object]:
    if given is None:
        return {}
    reserved = {"messages", "add_generation_prompt", "self"}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) and name not in reserved for name in given):
        raise ValidationError(
            f"chat_template_kwargs is a dict of names in the template, without {' and '.join(sorted(reserved))}; "
            f"got {given!r}",
            parameter="chat_template_kwargs",
            value=given,
        )
    return dict(given)


def _as_conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise ValidationError(
            f"messages is a list of messages or a list of such lists; got {type(messages).__name__}",
            parameter="messages",
            value=messages,
        )
    if not messages or isinstance(messages[0], Mapping):
        return [cast("Conversation", messages)]
    return [cast("Conversation", conversation) for conversation in messages]


def _priorities_for(priority: int | Sequence[int] | None, count: int) -> Sequence[int]:
    given = 0 if priority is None else priority
    rows = _one_each("priority", given, count) if isinstance(given, list | tuple) else [cast("int", given)] * count
    for value in rows:
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValidationError(f"a priority is an integer; got {value!r}", parameter="priority", value=value)
    return rows


def _one_each(name: str, rows: Sequence[T], count: int) -> Sequence[T]:
    if len(rows) != count:
        raise ValidationError(
            f"{name} has {len(rows)} entries for {count} prompts; give one for all, or one each",
            parameter=name,
            value=len(rows),
        )
    return rows
