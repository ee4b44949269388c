"""FrontEnd: what LLM and AsyncLLM share. Arguments as users give them become checked requests of a running engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast

from tokenyard.call_arguments import one_each, params_for, priorities_for
from tokenyard.engine.input_processor import InputProcessor, TokenizedPrompt
from tokenyard.engine.process_link import EngineProcessLink
from tokenyard.errors import UnsupportedError, UserError, ValidationError
from tokenyard.launch.assemble import build_engine
from tokenyard.launch.own_process import OwnProcessStart
from tokenyard.model.eos import eos_token_ids
from tokenyard.model.rope_config import max_prompt_len
from tokenyard.model.tokenizer import load_tokenizer
from tokenyard.sampling_params import SamplingParams, default_sampling_params, log_default_sampling_params
from tokenyard.scheduling_hints import SchedulingHints, read_hints

if TYPE_CHECKING:
    from tokenyard.call_arguments import Conversation
    from tokenyard.catalogue import Catalogue
    from tokenyard.config import EngineConfig
    from tokenyard.engine.input_processor import Prompt
    from tokenyard.engine.process import EngineProcess
    from tokenyard.launch.assemble import EngineFacts, RunningEngine
    from tokenyard.model.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

OnProgress: TypeAlias = Callable[[str], None]
"""Told the phase that a start is in, in words."""


class ModelInfo:
    """`LLM.model_config`: what is loaded."""

    def __init__(self, engine: EngineFacts) -> None:
        self.model = engine.files.name
        self.max_model_len = engine.max_model_len
        self.dtype = engine.report.dtype
        self.vocab_size = engine.report.vocab_size


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """How a conversation is rendered: see Tokenizer.render_chat."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    tools: Sequence[Mapping[str, object]] | None = None
    chat_template_kwargs: Mapping[str, object] | None = None


class Batch(NamedTuple):
    """Checked prompts with what goes with each; all four are as long."""

    prompts: Sequence[TokenizedPrompt]
    params: Sequence[SamplingParams]
    priorities: Sequence[int]
    scheduling: Sequence[SchedulingHints | None]


class FrontEnd:
    """Tokenizer, limits and defaults of one running engine. Used from any thread."""

    def __init__(self, config: EngineConfig, engine: EngineFacts, tokenizer: Tokenizer | None = None) -> None:
        """`tokenizer`: that of the engine's files, where somebody has loaded it already."""
        self.engine = engine
        self.model_config = ModelInfo(engine)
        self.tokenizer = tokenizer or load_tokenizer(engine.files)
        self.inputs = InputProcessor(
            tokenizer=self.tokenizer,
            max_model_len=engine.max_model_len,
            vocab_size=engine.report.vocab_size,
            eos_token_ids=eos_token_ids(engine.files, self.tokenizer),
            max_logprobs=config.model.max_logprobs,
            has_logits_processors=bool(config.logits_processors),
            max_prompt_len=max_prompt_len(engine.files.config),
        )
        log_default_sampling_params(engine.files.generation_config)

    def tokenize(self, prompt: Prompt, tokenization_kwargs: Mapping[str, object] | None = None) -> TokenizedPrompt:
        """A checked raw prompt. The one tokenization keyword is `add_special_tokens`."""
        return self.inputs.tokenize(prompt, add_special_tokens=_adds_special_tokens(tokenization_kwargs))

    def tokenize_chat(self, conversation: Conversation, options: ChatOptions) -> TokenizedPrompt:
        """A checked prompt of a conversation."""
        if options.chat_template is None and not self.tokenizer.has_chat_template:
            raise UserError(
                f"model '{self.model_config.model}' has no chat template; give the prompt as text to generate(), or a "
                "chat_template"
            )
        ids = self.tokenizer.encode_chat(
            conversation,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            chat_template=options.chat_template,
            tools=options.tools,
            chat_template_kwargs=options.chat_template_kwargs,
            max_tokens=self.inputs.max_prompt_tokens,
        )
        prompt = TokenizedPrompt(None, ids)
        self.inputs.check(prompt)
        return prompt

    def batch(
        self,
        prompts: Sequence[TokenizedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int] | None,
        scheduling: Mapping[str, object] | SchedulingHints | Sequence[Mapping[str, object] | None] | None,
    ) -> Batch:
        """What goes with each prompt, one for all or one each; nothing is queued."""
        given = self.default_sampling_params() if sampling_params is None else sampling_params
        count = len(prompts)
        return Batch(prompts, params_for(given, count), priorities_for(priority, count), self._hints(scheduling, count))

    def default_sampling_params(self) -> SamplingParams:
        """The defaults, changed by the model's generation_config."""
        return default_sampling_params(self.engine.files.generation_config)

    def close(self) -> None:
        """End the process that renders chat templates, if one runs."""
        self.tokenizer.close()

    def _hints(
        self,
        given: Mapping[str, object] | SchedulingHints | Sequence[Mapping[str, object] | None] | None,
        count: int,
    ) -> Sequence[SchedulingHints | None]:
        metadata_type = self.engine.metadata_type
        if isinstance(given, list | tuple) and not isinstance(given, SchedulingHints):
            return [read_hints(row, metadata_type) for row in one_each("scheduling", given, count)]
        return [read_hints(cast("Mapping[str, object] | None", given), metadata_type)] * count


def check_content_format(value: str) -> None:
    """How message contents reach a template: always as text, whatever parts they came in."""
    if value not in ("auto", "string"):
        raise UnsupportedError(
            f"chat_template_content_format={value!r} is not available in this version; allowed: 'auto', 'string'",
            parameter="chat_template_content_format",
            value=value,
        )


def start_engine(
    config: EngineConfig,
    catalogue: Catalogue,
    hub_token: str | bool | None = None,
    on_progress: OnProgress | None = None,
) -> RunningEngine:
    """Load the model and put the engine together here, with a log line for each long phase."""
    return build_engine(config, catalogue, on_progress=on_progress or logger.info, hub_token=hub_token)


def start_own_process(
    config: EngineConfig,
    catalogue: Catalogue,
    hub_token: str | bool | None = None,
    on_progress: OnProgress | None = None,
    *,
    process: EngineProcess | None = None,
    check: Callable[[Tokenizer], None] | None = None,
) -> tuple[EngineProcessLink, FrontEnd]:
    """The same in a process of its own; this one needs no torch. Nothing is left running when it raises.

    `process`: see OwnProcessStart. `check` raises what it has against the tokenizer, before the model is loaded.
    """
    start = OwnProcessStart(config, catalogue, on_progress or logger.info, hub_token, process)
    try:
        tokenizer = load_tokenizer(start.files)  # meanwhile the process loads the model
        if check is not None:
            check(tokenizer)
        front = FrontEnd(config, start.wait(), tokenizer)
    except BaseException:
        start.stop()
        raise
    return EngineProcessLink(start.process), front


def _adds_special_tokens(given: Mapping[str, object] | None) -> bool:
    rest = dict(given or {})
    value = rest.pop("add_special_tokens", True)
    if rest or not isinstance(value, bool):
        raise ValidationError(
            f"tokenization_kwargs={dict(given or {})!r} is not valid: its one key is add_special_tokens, true or false",
            parameter="tokenization_kwargs",
            value=given,
        )
    return value
