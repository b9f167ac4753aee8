"""The routes that are not hot: models and health in public; metrics, status and drain on the admin address. FastAPI."""

import asyncio
import time
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from fastapi.telemetry import TelemetryConfig
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from gateway.auth import AdminToken
from gateway.errors import (
    BadRequestError,
    GatewayError,
    MethodNotAllowedError,
    NotFoundError,
    PayloadTooLargeError,
    RequestTimeoutError,
    UnauthorizedError,
    UnavailableError,
    error_object,
)
from gateway.health import Health
from gateway.metrics import Metrics
from gateway.openapi import document
from gateway.protocol import unknown_model
from gateway.replicas import Replicas
from gateway.settings import Settings
from gateway.workers import Siblings, Worker, whole_status

MAX_ADMIN_BODY_BYTES = 65536
ADMIN_BODY_S = 10.0


def public_app(settings: Settings, replicas: Replicas, health: Health) -> FastAPI:
    """GET /v1/models, /openapi.json, /healthz, /readyz, and the JSON 404 and 405 of everything else."""
    app = _bare_app()
    started = int(time.time())

    @app.api_route("/healthz", methods=["GET", "HEAD"])
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.api_route("/readyz", methods=["GET", "HEAD"])
    async def readyz() -> JSONResponse:
        ready, reason = health.ready()
        if ready:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "unready", "reason": reason}, 503, {"Retry-After": "5"})

    def listed() -> list[dict[str, Any]]:
        models = replicas.models
        aliases = {name: models[served] for name, served in settings.aliases.items() if served in models}
        return [
            {"id": name, "object": "model", "created": started, "owned_by": "vllm", "max_model_len": length}
            for name, length in {**models, **aliases}.items()
        ]

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": listed()}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        for entry in listed():
            if entry["id"] == name:
                return entry
        raise unknown_model(name, (entry["id"] for entry in listed()))

    described = document(settings)

    @app.get("/openapi.json")
    async def openapi() -> JSONResponse:
        return JSONResponse(described)

    return app


def admin_app(
    metrics: Metrics, replicas: Replicas, health: Health, token: AdminToken, worker: Worker, siblings: Siblings
) -> FastAPI:
    """GET /metrics (open, on an internal address), GET /status and POST /drain (with the admin token).

    Whichever worker is asked answers for all of them.
    """
    app = _bare_app()

    async def whole() -> dict[str, Any]:
        # The others first: telling their status, they tell their gauges, on which this one's advice rests as well.
        others = await siblings.tell("status")
        own = health.status()
        return own if worker.of == 1 else whole_status(worker, own, others)

    def require_token(request: Request) -> None:
        if not token.configured:
            raise UnauthorizedError("/status and /drain are off until auth.admin_token_file names a token's file")
        if not token.allows(request.scope):
            raise UnauthorizedError("send the admin token: Authorization: Bearer … (auth.admin_token_file)")

    @app.get("/metrics")
    async def metrics_page() -> Response:
        told = await siblings.tell("flush")
        silent = b"".join(
            b"# worker %d does not answer: its gauges are as they were\n" % number
            for number, done in sorted(told.items())
            if done is None
        )
        return Response(metrics.page() + silent, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/status")
    async def status(request: Request) -> dict[str, Any]:
        require_token(request)
        return await whole()

    @app.post("/drain")
    async def drain(request: Request) -> dict[str, Any]:
        require_token(request)  # before the body is read: it may be anybody's, and endless
        order = await _drain_order(request)
        if not replicas.drain(order.replica, order.on):
            raise BadRequestError("no replica has this URL; GET /status lists them", param="replica")
        told = await siblings.tell("drain", replica=order.replica, on=order.on)
        if silent := [number for number, done in told.items() if done is None]:
            raise UnavailableError(f"worker {silent[0]} did not take the order: send it again", retry_after_s=1)
        return await whole()

    return app


class _DrainOrder(BaseModel):
    """The body of POST /drain."""

    model_config = ConfigDict(extra="forbid")

    replica: str
    on: bool = True


async def _drain_order(request: Request) -> _DrainOrder:
    body = b""
    try:
        async with asyncio.timeout(ADMIN_BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > MAX_ADMIN_BODY_BYTES:
                    raise PayloadTooLargeError(f"at most {MAX_ADMIN_BODY_BYTES} bytes of body are accepted")
    except TimeoutError:
        raise RequestTimeoutError(f"the body did not arrive within {ADMIN_BODY_S:g} s") from None
    except ClientDisconnect:  # nobody is left to read this; a trace in the log would say that we failed
        raise BadRequestError("the body broke off") from None
    try:
        return _DrainOrder.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        param = ".".join(str(part) for part in first["loc"]) or None
        raise BadRequestError(f'expected {{"replica": URL, "on": true}}: {first["msg"]}', param=param) from None


def _bare_app() -> FastAPI:
    """FastAPI without docs, redirects, telemetry of its own (tracing.py decides that) or its own error shape."""
    off: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False, telemetry=off)

    async def gateway_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, GatewayError)
        return _rendered(error)

    async def http_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 405:
            return _rendered(
                MethodNotAllowedError("this route takes another method", allow=(error.headers or {}).get("Allow", ""))
            )
        if error.status_code == 404:
            return _rendered(NotFoundError("there is no such route here"))
        return _rendered(BadRequestError(str(error.detail)))

    async def unexpected(_: Request, error: Exception) -> Response:
        return _rendered(GatewayError("the gateway failed unexpectedly"))  # who serves the app logs the error

    app.add_exception_handler(Exception, unexpected)
    app.add_exception_handler(GatewayError, gateway_error)
    app.add_exception_handler(HTTPException, http_error)
    return app


def _rendered(error: GatewayError) -> Response:
    headers = {key.decode(): value.decode() for key, value in error.headers()}
    return JSONResponse({"error": error_object(error)}, error.status, headers)
