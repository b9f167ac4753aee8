"""Two small servers of the proof: one that takes Alertmanager's webhooks, one that serves a recorded page."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from scripts import _ports


@dataclass(frozen=True)
class Told:
    """One alert in one webhook. at: seconds of the monotonic clock."""

    at: float
    receiver: str
    status: str  # firing or resolved
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    starts_at: str


class _Server:
    """A threading HTTP server on a free port of loopback."""

    def __init__(self) -> None:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer._answer(self, *outer.get(self.path))

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                outer._answer(self, outer.post(self.path, body), b"")

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer((_ports.HOST, 0), Handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name=type(self).__name__, daemon=True)
        self._thread.start()

    @staticmethod
    def _answer(handler: BaseHTTPRequestHandler, status: int, body: bytes) -> None:
        with contextlib.suppress(ConnectionError):  # whoever asked may be gone: a scrape waits one second
            handler.send_response(status)
            handler.send_header("Content-Type", "text/plain; version=0.0.4")
            handler.send_header("Content-Length", str(len(body)))
            handler.end_headers()
            handler.wfile.write(body)

    def get(self, path: str) -> tuple[int, bytes]:
        return 404, b""

    def post(self, path: str, body: bytes) -> int:
        return 404

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Receiver(_Server):
    """Keeps what it is told. `refusing`: names of receivers that answer 403 meanwhile."""

    def __init__(self) -> None:
        self._told: list[Told] = []
        self.refusing: set[str] = set()
        super().__init__()

    def url(self, receiver: str) -> str:
        return f"http://{_ports.HOST}:{self.port}/{receiver}"

    def post(self, path: str, body: bytes) -> int:
        receiver, now = path.strip("/"), time.monotonic()
        if receiver in self.refusing:
            return 403
        for alert in json.loads(body)["alerts"]:
            told = Told(now, receiver, alert["status"], alert["labels"], alert["annotations"], alert["startsAt"])
            self._told.append(told)
        return 200

    def firing(self, name: str, since: float, meant: Callable[[Mapping[str, str]], bool]) -> Told | None:
        """The first message since then that the alert fires, of those whose labels are meant."""
        return next((told for told in self._about(name, since, meant) if told.status == "firing"), None)

    def resolved(self, name: str, since: float, meant: Callable[[Mapping[str, str]], bool]) -> Told | None:
        """The last message since then, if it is the all-clear."""
        told = self._about(name, since, meant)
        return told[-1] if told and told[-1].status == "resolved" else None

    def _about(self, name: str, since: float, meant: Callable[[Mapping[str, str]], bool]) -> list[Told]:
        told = list(self._told)
        return [one for one in told if one.at >= since and one.labels["alertname"] == name and meant(one.labels)]


class Page(_Server):
    """Serves one text at /metrics and lets it be changed; a card's energy counter goes on with the power it draws."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._began = time.monotonic()
        super().__init__()

    def get(self, path: str) -> tuple[int, bytes]:
        return (200, self._now().encode()) if path == "/metrics" else (404, b"")

    def _now(self) -> str:
        power = re.search(r"(?m)^DCGM_FI_DEV_POWER_USAGE\{.*\} (\S+)$", self.text)
        drawn_mj = float(power[1]) * (time.monotonic() - self._began) * 1000 if power else 0
        return re.sub(
            r"(?m)^(DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION\{.*\}) (\S+)$",
            lambda found: f"{found[1]} {float(found[2]) + drawn_mj:.0f}",
            self.text,
        )
