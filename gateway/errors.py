"""Every way a request can fail at the gateway, and the one JSON shape in which a client hears of it.

Inner rooms raise these; only the edge (middleware.py) turns them into a response. The shape is OpenAI's
`{"error": {"message", "type", "param", "code"}}`; on Anthropic's route the same object also carries the top-level
`"type": "error"` that its clients look for.
"""

import math
from typing import ClassVar

import orjson


class GatewayError(Exception):
    """A refusal or failure with a status of its own. `retry_after_s` (seconds) becomes the Retry-After header."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "internal_error"
    default_code: ClassVar[str | None] = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code if code is not None else self.default_code
        self.retry_after_s = retry_after_s

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers that belong to this kind of error, lower-case names."""
        if self.retry_after_s is None:
            return []
        return [(b"retry-after", b"%d" % max(1, math.ceil(self.retry_after_s)))]


class BadRequestError(GatewayError):
    status = 400
    type = "invalid_request_error"


class UnauthorizedError(GatewayError):
    status = 401
    type = "authentication_error"
    default_code = "invalid_api_key"

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [*super().headers(), (b"www-authenticate", b"Bearer")]


class NotFoundError(GatewayError):
    status = 404
    type = "invalid_request_error"
    default_code = "not_found"


class MethodNotAllowedError(GatewayError):
    status = 405
    type = "invalid_request_error"
    default_code = "method_not_allowed"

    def __init__(self, message: str, *, allow: str) -> None:
        super().__init__(message)
        self.allow = allow

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [(b"allow", self.allow.encode("ascii"))]


class RequestTimeoutError(GatewayError):
    """The client did not finish sending its request in time."""

    status = 408
    type = "invalid_request_error"
    default_code = "request_timeout"


class PayloadTooLargeError(GatewayError):
    status = 413
    type = "invalid_request_error"
    default_code = "request_too_large"


class HeadTooLargeError(GatewayError):
    """Request line and headers (or trailers) take more than the gateway reads."""

    status = 431
    type = "invalid_request_error"
    default_code = "headers_too_large"


class UnsupportedMediaTypeError(GatewayError):
    status = 415
    type = "invalid_request_error"
    default_code = "unsupported_media_type"


class OverloadedError(GatewayError):
    """Refused by admission or by a key's own limits; nothing reached an engine."""

    status = 429
    type = "rate_limit_error"
    default_code = "overloaded"

    def __init__(self, message: str, *, cause: str, retry_after_s: float, code: str | None = None) -> None:
        super().__init__(message, retry_after_s=retry_after_s, code=code)
        self.cause = cause


class UnavailableError(GatewayError):
    """No engine is ready, or this gateway is draining."""

    status = 503
    type = "server_error"
    default_code = "engine_unavailable"


class UpstreamFailedError(GatewayError):
    """An engine broke off or answered something that is not an answer."""

    status = 502
    type = "server_error"
    default_code = "engine_failed"


class UpstreamUnreachableError(UpstreamFailedError):
    """No connection to the engine came about, so it has seen nothing of the request."""

    status = 503
    default_code = "engine_unreachable"


class UpstreamTimeoutError(GatewayError):
    status = 504
    type = "server_error"
    default_code = "engine_timeout"


def error_object(error: GatewayError) -> dict[str, str | None]:
    """The inner object: message, type, param, code."""
    return {"message": error.message, "type": error.type, "param": error.param, "code": error.code}


def error_body(error: GatewayError, *, anthropic: bool = False) -> bytes:
    """The JSON body of an error response; `anthropic` adds the top-level discriminator of /v1/messages."""
    body: dict[str, object] = {"error": error_object(error)}
    if anthropic:
        body = {"type": "error", **body}
    return orjson.dumps(body)
