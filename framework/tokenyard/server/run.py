"""serve: one server, from its config to its end.

The port is bound first and the engine is begun second: its own process loads the model while this one imports what it
serves with. So nothing heavy is imported at the top of this module.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, cast

from tokenyard.call_arguments import as_overrides
from tokenyard.errors import UserError
from tokenyard.launch.compose import load_engine_config, load_engine_config_from
from tokenyard.server.listen import check_certificates, open_listener

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from tokenyard.async_llm import AsyncLLM
    from tokenyard.catalogue import Catalogue
    from tokenyard.config import EngineConfig, ServerConfig
    from tokenyard.server.http import HttpServer
    from tokenyard.server.listen import Listener
    from tokenyard.server.service import Service
    from tokenyard.server.supervisor import Progress, Supervisor

logger = logging.getLogger(__name__)

START_THREAD = "tokenyard-start"
"""The thread in which the engine is started."""

_PACKAGES = ("fastapi", "uvicorn", "prometheus_client")
_LOOPBACK = ("127.", "::1", "localhost")
_WARNING = """
+------------------------------------------------------------------------------+
| Everybody who can reach {host} may use this server: it has no API key.
| Set TOKENYARD_API_KEY or --api-key-file, or listen on 127.0.0.1.
+------------------------------------------------------------------------------+"""


def load_config(
    config: DictConfig | Mapping[str, object] | Sequence[str],
) -> tuple[EngineConfig, Catalogue]:
    """The checked config, of what `tokenyard.serve` takes, and the plugins that it admits."""
    if isinstance(config, str | list | tuple):
        return load_engine_config(as_overrides(config))
    if not hasattr(config, "items"):
        raise UserError(f"serve takes a config, a dict or a list of overrides; got {config!r}")
    return load_engine_config_from(cast("DictConfig | Mapping[str, object]", config))


def serve(config: EngineConfig, catalogue: Catalogue, *, api_keys: Sequence[str] = ()) -> None:
    """Serve until a signal ends it, which takes the main thread, or the engine ends for good.

    Raises ConfigError for what cannot be, before the model is loaded; what the start of the engine raises;
    EngineDeadError when the engine died and is not to be started again.
    """
    check_packages()
    check_certificates(config.server)
    if config.engine.process == "auto":
        config = replace(config, engine=replace(config.engine, process="own"))
    with open_listener(config.server) as listener:
        logger.info("listening on %s", listener.address)
        _warn_open(config.server, api_keys)
        # First what the engine's process is begun with, then the rest: two interpreters then import at the same time.
        from tokenyard.async_llm import AsyncLLM  # noqa: F401
        from tokenyard.server.service import Service
        from tokenyard.server.supervisor import Supervisor

        service = Service(config=config)
        supervisor = Supervisor(service, _starter(service, catalogue), START_THREAD)
        supervisor.begin()
        from tokenyard.server.http import make_http_server

        _run(_Running(service, supervisor, make_http_server(service, api_keys), listener))


def check_packages() -> None:
    """Raise UserError where what the extra `serve` brings is not installed."""
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise UserError(f"serving needs {', '.join(missing)}; install with: pip install 'tokenyard[serve]'")


def _warn_open(config: ServerConfig, api_keys: Sequence[str]) -> None:
    if not api_keys and config.uds is None and not config.host.startswith(_LOOPBACK):
        logger.warning(_WARNING.format(host=config.host))


def _starter(service: Service, catalogue: Catalogue) -> Callable[[Progress], AsyncLLM]:
    def start(on_progress: Progress) -> AsyncLLM:
        from tokenyard.async_llm import AsyncLLM
        from tokenyard.server.chat_template import check_chat_settings

        llm = AsyncLLM.from_parts(service.config, catalogue, on_progress)
        try:
            check_chat_settings(service.config.server, service.chat_template, llm.front)
        except BaseException:
            llm.shutdown()
            raise
        return llm

    return start


class _Running:
    """One server while it runs."""

    def __init__(self, service: Service, supervisor: Supervisor, http: HttpServer, listener: Listener) -> None:
        self._service = service
        self._supervisor = supervisor
        self._http = http
        self._listener = listener

    async def run(self) -> None:
        """Until a drain has ended, or the engine, whose error is raised."""
        from tokenyard.server.drain import Drain, signals_to

        drain = Drain(self._service)
        with signals_to(drain):
            http = asyncio.create_task(self._http.serve([self._listener.socket]))
            ends = [asyncio.create_task(drain.run()), asyncio.create_task(self._supervisor.run())]
            try:
                await asyncio.wait((http, *ends), return_when=asyncio.FIRST_COMPLETED)
            finally:
                for end in ends:
                    end.cancel()
                self._http.should_exit = True
                await asyncio.wait((http, *ends, asyncio.create_task(self._supervisor.close())))
        for task in (*ends, http):
            if not task.cancelled():
                task.result()


def _run(running: _Running) -> None:
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(running.run())


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed; it is not on every platform."""
    if find_spec("uvloop") is None:
        return None
    import uvloop

    return uvloop.new_event_loop
