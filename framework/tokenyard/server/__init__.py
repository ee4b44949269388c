"""The HTTP server: OpenAI's API over an AsyncLLM. Needs the extra `serve`; pydantic is used here alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omegaconf import DictConfig


def serve(config: DictConfig | Mapping[str, object] | Sequence[str] = (), *, api_keys: Sequence[str] = ()) -> None:
    """Serve a model until SIGTERM or Ctrl-C, from a script of your own.

    `config` is a composed Hydra config, a dict or a list of overrides. With `api_keys` requests need one of them. The
    engine gets a process of its own unless `engine.process` says otherwise. Runs in the main thread; in another one it
    ends only with its engine. Raises UserError for mistakes, EngineDeadError when the engine died.
    """
    from tokenyard.server.run import load_config
    from tokenyard.server.run import serve as serve_config

    serve_config(*load_config(config), api_keys=api_keys)
