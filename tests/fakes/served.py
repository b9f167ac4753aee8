"""The scripted engine with what a client of the whole server asks for, too: its version and its process's age."""

from __future__ import annotations

import time
from typing import Any

from aiohttp import web

from tests.fakes.engine import FakeEngine, Seen


class Served(FakeEngine):
    def __init__(self, born: float, version: str, **settings: Any) -> None:
        super().__init__(**settings)
        self.born, self.version = born, version

    async def _other(self, request: web.Request) -> web.Response:
        if request.path != "/version":
            return await super()._other(request)
        self.seen.append(Seen(request.path, request.headers, b"", {}, time.monotonic()))
        return web.json_response({"version": self.version})

    async def _metrics(self, request: web.Request) -> web.Response:
        page = await super()._metrics(request)
        return web.Response(text=f"{page.text}process_start_time_seconds {self.born}\n")
