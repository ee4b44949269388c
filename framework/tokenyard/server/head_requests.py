"""HEAD: what a GET answers, without its body; load balancers probe with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


class HeadRequests:
    """Makes a GET of a HEAD, for the routes, and drops the body of the answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        asked = {**scope, "method": "GET"}  # the server below must go on to see a HEAD
        await self._app(asked, receive, send_head)
        scope["route"] = asked.get("route")  # for who counts by it
