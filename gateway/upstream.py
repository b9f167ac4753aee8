"""The HTTP client of the hot path: one narrow interface over aiohttp, its errors mapped once.

Why aiohttp and not httpx here: docs/decisions/0002. Nothing above this room knows which client it is.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import aiohttp

from gateway.errors import UpstreamFailedError, UpstreamTimeoutError, UpstreamUnreachableError
from gateway.settings import Timeouts

# vLLM's uvicorn closes idle connections after 5 s. Ours must let go first, or a request meets a closing door.
KEEPALIVE_S = 4.0
# Of an answer that its client does not take, the gateway holds up to three times this much before the engine waits.
READ_BUFFER_BYTES = 64 * 1024


class Answer:
    """An engine's response whose headers have come. Whoever holds it closes it; closing twice does nothing.

    Closing before the end breaks the connection, which is how an engine learns that nobody wants the rest.
    """

    __slots__ = ("_response", "content_type", "retry_after", "status")

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.content_type = response.headers.get("Content-Type", "")
        self.retry_after = response.headers.get("Retry-After")

    async def read(self) -> bytes:
        """The whole body. Raises UpstreamFailedError, UpstreamTimeoutError."""
        with _mapped_errors():
            return await self._response.read()

    async def chunk(self) -> bytes:
        """Whatever has come since the last call, at least one byte; b"" at the end. Raises like `read`."""
        with _mapped_errors():
            return await self._response.content.readany()

    def close(self) -> None:
        self._response.close()


class Upstream:
    """Connections to all engines. `async with` it: the pool lives as long as the gateway."""

    def __init__(self, timeouts: Timeouts, api_key: str | None = None) -> None:
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        # Only connecting is timed here; silence and the total are the caller's deadlines, who knows if it streams.
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=timeouts.connect_s)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        # limit=0: admission.max_in_flight is the one limit, a second and hidden one would only queue behind it.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
        self._session = aiohttp.ClientSession(
            connector=connector,
            read_bufsize=READ_BUFFER_BYTES,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=True,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def post(self, url: str, body: bytes, headers: dict[str, str]) -> Answer:
        """Send one request and wait for the response's headers.

        Raises UpstreamUnreachableError if no connection came about (it may be sent elsewhere), otherwise
        UpstreamFailedError or UpstreamTimeoutError (it may have begun to work: never send it again).
        """
        assert self._session is not None, "used outside `async with`"
        with _mapped_errors():
            response = await self._session.post(
                url, data=body, headers={**self._headers, **headers}, timeout=self._timeout, allow_redirects=False
            )
        return Answer(response)


@contextmanager
def _mapped_errors() -> Iterator[None]:
    # Messages name the kind of failure, never an address: clients read them. ReadTimeout and friends have no text.
    try:
        yield
    except (aiohttp.ConnectionTimeoutError, aiohttp.ClientConnectorError) as error:
        raise UpstreamUnreachableError(
            f"the engine can't be reached ({type(error).__name__})", retry_after_s=5
        ) from error
    except (aiohttp.SocketTimeoutError, TimeoutError) as error:
        raise UpstreamTimeoutError(f"the engine stayed silent too long ({type(error).__name__})") from error
    except (aiohttp.ClientError, OSError) as error:
        raise UpstreamFailedError(f"the engine broke the connection off ({type(error).__name__})") from error
