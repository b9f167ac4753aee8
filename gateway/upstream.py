"""The HTTP client of the hot path: one narrow interface over aiohttp, its errors mapped once.

Why aiohttp and not httpx here: docs/decisions/0002. Nothing above this room knows which client it is.
"""

import re
from types import TracebackType
from typing import Self

import aiohttp

from gateway.errors import UpstreamFailedError, UpstreamTimeoutError, UpstreamUnreachableError
from gateway.settings import Timeouts

# vLLM's uvicorn closes idle connections after 5 s. Ours must let go first, or a request meets a closing door.
KEEPALIVE_S = 4.0
# Of an answer that its client does not take, the gateway holds up to three times this much before the engine waits.
READ_BUFFER_BYTES = 64 * 1024
# Seconds or a date, as HTTP defines them: anything else an engine says there would be passed on to every client.
_RETRY_AFTER = re.compile(r"[0-9]{1,9}|[A-Z][a-z]{2}, [0-9]{2} [A-Z][a-z]{2} [0-9]{4} [0-9:]{8} GMT")


class Answer:
    """An engine's response whose headers have come. Whoever holds it closes it; closing twice does nothing.

    Closing before the end breaks the connection, which is how an engine learns that nobody wants the rest.
    """

    __slots__ = ("_max_bytes", "_response", "content_type", "retry_after", "status")

    def __init__(self, response: aiohttp.ClientResponse, max_bytes: int) -> None:
        self._response = response
        self._max_bytes = max_bytes
        self.status = response.status
        self.content_type = response.headers.get("Content-Type", "").lower()
        retry_after = response.headers.get("Retry-After", "").strip()
        self.retry_after = retry_after if _RETRY_AFTER.fullmatch(retry_after) else None

    async def read(self) -> bytes:
        """The whole body. Raises UpstreamFailedError, also where it is larger than accepted; UpstreamTimeoutError."""
        with _MAPPED_ERRORS:
            parts, size = [], 0
            while part := await self._response.content.readany():
                parts.append(part)
                size += len(part)
                if size > self._max_bytes:
                    self.close()
                    raise UpstreamFailedError(f"the engine's answer has more than {self._max_bytes} bytes")
            return b"".join(parts)

    async def chunk(self) -> bytes:
        """Whatever has come since the last call, at least one byte; b"" at the end. Raises like `read`."""
        with _MAPPED_ERRORS:
            return await self._response.content.readany()

    def arrived(self) -> bytes:
        """Like `chunk`, what has come by now; b"" if nothing has. Nobody may be waiting in `chunk`."""
        with _MAPPED_ERRORS:
            return self._response.content.read_nowait()

    def close(self) -> None:
        self._response.close()


class Upstream:
    """Connections to all engines. `async with` it: the pool lives as long as the gateway."""

    def __init__(self, timeouts: Timeouts, max_answer_bytes: int, api_key: str | None = None) -> None:
        self._max_answer_bytes = max_answer_bytes
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
        with _MAPPED_ERRORS:
            response = await self._session.post(
                url, data=body, headers={**self._headers, **headers}, timeout=self._timeout, allow_redirects=False
            )
        answer = Answer(response, self._max_answer_bytes)
        if not 200 <= answer.status <= 599:  # nothing that a client could be told
            answer.close()
            raise UpstreamFailedError(f"the engine answered with the status {answer.status}")
        return answer


class _MappedErrors:
    """Around every step of the client's: its errors leave as ours. Messages name the kind of failure, never an address:
    clients read them. ReadTimeout and friends have no text.

    A class, because a generator would cost a stream's every read a microsecond.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        name = type(error).__name__
        if isinstance(error, aiohttp.ConnectionTimeoutError | aiohttp.ClientConnectorError):
            raise UpstreamUnreachableError(f"the engine can't be reached ({name})", retry_after_s=5) from error
        if isinstance(error, aiohttp.SocketTimeoutError | TimeoutError):
            raise UpstreamTimeoutError(f"the engine stayed silent too long ({name})") from error
        if isinstance(error, aiohttp.ClientError | OSError):
            raise UpstreamFailedError(f"the engine broke the connection off ({name})") from error


_MAPPED_ERRORS = _MappedErrors()
