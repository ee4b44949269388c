"""LanguageModel: what LLM and AsyncLLM share for those who use them: how they are made, and what they are asked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, NoReturn, Self, cast

from tokenyard.call_arguments import as_overrides
from tokenyard.errors import UserError
from tokenyard.launch.compose import load_engine_config, load_engine_config_from
from tokenyard.launch.llm_arguments import llm_overrides, refused_method

if TYPE_CHECKING:
    from pathlib import Path

    from omegaconf import DictConfig

    from tokenyard.catalogue import Catalogue
    from tokenyard.config import EngineConfig
    from tokenyard.front_end import FrontEnd, OnProgress
    from tokenyard.model.tokenizer import Tokenizer
    from tokenyard.sampling_params import SamplingParams


class LanguageModel(ABC):
    """A model with an engine of its own; `_start` sets `_front`."""

    _generates_with: ClassVar[str]  # the methods that are there, for who calls another one of vLLM's
    _front: FrontEnd

    @classmethod
    def from_config(cls, config: DictConfig | Mapping[str, object] | Sequence[str]) -> Self:
        """From a composed Hydra config (a `@hydra.main` script's own), or a list of override strings."""
        if isinstance(config, str | list | tuple):
            return cls.from_parts(*load_engine_config(as_overrides(config)))
        if not isinstance(config, Mapping) and not hasattr(config, "items"):
            raise UserError(f"from_config takes a config, a dict or a list of overrides; got {config!r}")
        return cls.from_parts(*load_engine_config_from(cast("DictConfig | Mapping[str, object]", config)))

    @classmethod
    def from_parts(cls, config: EngineConfig, catalogue: Catalogue, on_progress: OnProgress | None = None) -> Self:
        """From a config that was converted and checked already; `on_progress` is told what the start is at."""
        llm = cls.__new__(cls)
        llm._start(config, catalogue, on_progress=on_progress)
        return llm

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer: Tokenyard's own, with encode, decode, apply_chat_template and token_to_id."""
        return self._front.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What `sampling_params=None` stands for: the defaults, changed by the model's generation_config."""
        return self._front.default_sampling_params()

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        """vLLM's other methods: calling one says that it is not there, which AttributeError would leave in doubt."""
        return refused_method(name, type(self).__name__, self._generates_with)

    def _start_with(
        self,
        model: str | Path | None,
        arguments: Mapping[str, object],
        overrides: Sequence[str] | None,
        hub_token: str | bool | None,
    ) -> None:
        """From the arguments of the constructor; the token is a secret: no override, which would be printed."""
        config, catalogue = load_engine_config([*llm_overrides(model, arguments), *as_overrides(overrides)])
        self._start(config, catalogue, hub_token)

    @abstractmethod
    def _start(
        self,
        config: EngineConfig,
        catalogue: Catalogue,
        hub_token: str | bool | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        """Start the engine; nothing is left running when it raises."""
