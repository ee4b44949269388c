"""OfflineServer: the routes of a server over an engine of this process, without a port."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import TYPE_CHECKING

import httpx

from tokenyard.async_llm import AsyncLLM
from tokenyard.client.connection import Answer
from tokenyard.server.app import create_app
from tokenyard.server.chat_template import check_chat_settings
from tokenyard.server.service import Service

if TYPE_CHECKING:
    from tokenyard.catalogue import Catalogue
    from tokenyard.config import EngineConfig
    from tokenyard.errors import EngineDeadError

_JSON = {"Content-Type": "application/json"}


class OfflineServer:
    """Starts an engine, which blocks until the model is loaded; `answer` is used within one event loop."""

    def __init__(self, config: EngineConfig, catalogue: Catalogue) -> None:
        self._llm = AsyncLLM.from_parts(config, catalogue)
        try:
            self._service = Service(config=config, llm=self._llm)
            check_chat_settings(config.server, self._service.chat_template, self._llm.front.tokenizer)
            self._app = create_app(self._service)
        except BaseException:
            self._llm.shutdown()
            raise
        self._death: EngineDeadError | None = None
        self._llm.on_death(self._note_death)
        self._client: httpx.AsyncClient | None = None
        self._running = contextlib.AsyncExitStack()

    async def __aenter__(self) -> OfflineServer:
        await self._running.enter_async_context(self._app.router.lifespan_context(self._app))
        self._client = httpx.AsyncClient(
            transport=httpx.ASGITransport(self._app),
            base_url="http://offline",
            headers=_JSON,
            timeout=httpx.Timeout(None),  # a whole batch may wait for its turn
        )
        await self._running.enter_async_context(self._client)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._running.aclose()
        await asyncio.to_thread(self._llm.shutdown)

    async def answer(self, route: str, body: bytes) -> Answer:
        """What a server would answer to a POST. Raises EngineDeadError once the engine has ended."""
        if self._client is None:
            raise RuntimeError("an OfflineServer answers only inside `async with`")
        response = await self._client.post(route, content=body)
        if self._death is not None:
            raise self._death
        return Answer(response.status_code, response.content, response.headers)

    def _note_death(self, error: EngineDeadError) -> None:
        self._death = error
