"""serve: one server, from its config to its end.

Signals are taken first, then the port is bound, and the engine is begun: its own process loads the model while this one
answers probes and imports what it serves with. So nothing heavy is imported at the top of this module.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, cast

from tokenyard.call_arguments import as_overrides
from tokenyard.errors import EngineDeadError, UserError
from tokenyard.launch.compose import load_engine_config, load_engine_config_from
from tokenyard.server.chat_template import check_chat_settings
from tokenyard.server.drain import Drain, signals_to
from tokenyard.server.listen import check_certificates, open_listener
from tokenyard.server.supervisor import Supervisor

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from starlette.types import ASGIApp

    from tokenyard.async_llm import AsyncLLM
    from tokenyard.catalogue import Catalogue
    from tokenyard.config import EngineConfig, ServerConfig
    from tokenyard.engine.process import EngineProcess
    from tokenyard.model.tokenizer import Tokenizer
    from tokenyard.server.listen import Listener
    from tokenyard.server.service import Service
    from tokenyard.server.supervisor import Progress

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
    from tokenyard.server.service import Service

    service = Service(config=config)
    try:
        _run(_Running(service, _Starter(service, catalogue), api_keys))
    except EngineDeadError as error:
        raise EngineDeadError(error.cause) from error
    finally:
        logger.info("stopped")


def check_packages() -> None:
    """Raise UserError where what the extra `serve` brings is not installed."""
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise UserError(f"serving needs {', '.join(missing)}; install with: pip install 'tokenyard[serve]'")


def _warn_open(config: ServerConfig, api_keys: Sequence[str]) -> None:
    if not api_keys and config.uds is None and not config.host.startswith(_LOOPBACK):
        logger.warning(_WARNING.format(host=config.host))


class _Starter:
    """Starts a service's engine, in a thread, which `cancel` ends from another one; nothing is left of it then."""

    def __init__(self, service: Service, catalogue: Catalogue) -> None:
        self._service = service
        self._catalogue = catalogue
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._num_starts = 0
        self._process: EngineProcess | None = None

    def __call__(self, on_progress: Progress) -> AsyncLLM:
        config = self._service.config
        if config.engine.process == "own":
            process = self._begin_process()  # first: while this one imports what it needs, the other one does so too
            from tokenyard.front_end import start_own_process

            link, front = start_own_process(
                self._numbered(config), self._catalogue, on_progress=on_progress, process=process, check=self._check
            )
        from tokenyard.async_llm import AsyncLLM

        if config.engine.process == "own":
            return AsyncLLM.from_link(link, front)
        llm = AsyncLLM.from_parts(self._numbered(config), self._catalogue, on_progress)
        try:
            self._check(llm.front.tokenizer)
        except BaseException:
            llm.shutdown()
            raise
        return llm

    def cancel(self) -> None:
        """End the start that runs, and let no other one begin."""
        with self._lock:
            self._is_cancelled = True
            if self._process is not None:
                self._process.abandon()

    def _begin_process(self) -> EngineProcess:
        from tokenyard.engine.process import EngineProcess
        from tokenyard.launch.engine_process import MODULE

        with self._lock:
            if self._is_cancelled:
                raise EngineDeadError("the server ends")
            self._process = EngineProcess(MODULE)
            return self._process

    def _numbered(self, config: EngineConfig) -> EngineConfig:
        """With trace files of its own for each engine."""
        from tokenyard.launch.tracing import with_numbered_trace

        self._num_starts += 1
        return with_numbered_trace(config, self._num_starts)

    def _check(self, tokenizer: Tokenizer) -> None:
        check_chat_settings(self._service.config.server, self._service.chat_template, tokenizer)


class _Running:
    """One server while it runs."""

    def __init__(self, service: Service, starter: _Starter, api_keys: Sequence[str]) -> None:
        self._service = service
        self._api_keys = api_keys
        self._address = ""
        self._supervisor = Supervisor(service, starter, START_THREAD, cancel=starter.cancel, on_ready=self._tell_ready)

    async def run(self) -> None:
        """Until a drain has ended, or the engine, whose error is raised."""
        drain = Drain(self._service)
        with signals_to(drain), open_listener(self._service.config.server) as listener:
            self._address = listener.address
            self._supervisor.begin()
            async with self._service.observation.running(self._service):
                await self._serve(listener, drain)

    async def _serve(self, listener: Listener, drain: Drain) -> None:
        from tokenyard.server.early import EarlyApp
        from tokenyard.server.http import make_http_server

        app = EarlyApp(self._service, self._make_app)
        server = make_http_server(self._service.config.server, app, self._tell_listening, lifespan="off")
        http = asyncio.create_task(server.serve([listener.socket]))
        making = asyncio.create_task(app.make())
        ends = [asyncio.create_task(drain.run()), asyncio.create_task(self._supervisor.run())]
        try:
            await asyncio.wait((making, http, *ends), return_when=asyncio.FIRST_COMPLETED)
            if making.done() and making.exception() is None:
                await asyncio.wait((http, *ends), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
            server.should_exit = True
            results = await asyncio.gather(*ends, making, http, self._supervisor.close(), return_exceptions=True)
        for error in results:
            if isinstance(error, BaseException) and not isinstance(error, asyncio.CancelledError):
                raise error

    def _make_app(self) -> ASGIApp:
        from tokenyard.server.app import create_app

        return create_app(self._service, self._api_keys)

    def _tell_listening(self) -> None:
        logger.info("listening on %s", self._address)
        _warn_open(self._service.config.server, self._api_keys)

    def _tell_ready(self, llm: AsyncLLM, seconds: float) -> None:
        facts, cache = llm.front.engine, self._service.config.kv_cache
        per_request = -(-facts.max_model_len // cache.block_size) * len(facts.report.kv_cache_groups)
        logger.info(
            "ready at %s after %.1f s: %s, max_model_len %d, K/V cache of %d tokens (%.1f requests of that length), %s",
            self._address,
            seconds,
            ", ".join(self._service.model_names),
            facts.max_model_len,
            facts.num_blocks // len(facts.report.kv_cache_groups) * cache.block_size,
            facts.num_blocks / per_request,
            f"{len(self._api_keys)} API keys"
            if len(self._api_keys) > 1
            else "an API key"
            if self._api_keys
            else "no API key",
        )


def _run(running: _Running) -> None:
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(running.run())


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed; it is not on every platform."""
    if find_spec("uvloop") is None:
        return None
    import uvloop

    return uvloop.new_event_loop
