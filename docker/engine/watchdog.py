"""Looks at the engine as the gateway does, and judges it by the gateway's rule (gateway/progress.py).

Standard library HTTP: whatever the image's Python carries, the watch must not depend on it. `look` is called about
once a second by one thread; a probe runs in a thread of its own, since its silence is the evidence.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import threading
from collections.abc import Callable
from typing import Any

from gateway.engine_metrics import read_engine_metrics
from gateway.progress import ForwardProgress, Sample

TIMEOUT_S = 5.0  # for one look; the probe has stall_s
# An engine whose core died says 503 and ends by itself within seconds; one that does not is ended.
DEAD_LOOKS = 15


class Watchdog:
    """Of one run of the engine; a restarted engine gets a new one."""

    def __init__(
        self, port: int, api_key: str | None, stall_s: float, idle_probe_s: float, clock: Callable[[], float]
    ) -> None:
        self._port = port
        self._headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {api_key}"} if api_key else {}
        )
        self._idle_probe_s = idle_probe_s
        self._clock = clock
        self._progress = ForwardProgress(stall_s)
        self._probe: threading.Thread | None = None
        self._outcomes: queue.SimpleQueue[bool | None] = queue.SimpleQueue()  # answered, failed, or silent (None)
        self._model: str | None = None
        self._dead_looks = 0
        self.ready = False  # answered a one-token request once
        self.answering = False  # at the last look

    def look(self) -> None:
        """One round: health, figures, and a probe where one is due. Errors of the engine are findings, not raised."""
        status, _ = self._get("/health")
        self.answering = status == http.client.OK
        self._dead_looks = self._dead_looks + 1 if status == http.client.SERVICE_UNAVAILABLE else 0
        if self.answering:
            self._read_figures()
        while not self._outcomes.empty():
            self._take(self._outcomes.get())
        if self._probe is not None and self._probe.is_alive():
            return
        due = self._progress.quiet_for_s(self._clock()) >= self._idle_probe_s if self.ready else self.answering
        if due and self._find_model():
            self._progress.probe_started(self._clock())
            self._probe = threading.Thread(target=self._ask_for_one_token, daemon=True)
            self._probe.start()

    def verdict(self) -> str | None:
        """Why the engine has to be ended; None while it may run. Before it is ready only the start's limit counts."""
        if not self.ready:
            return None
        if self._dead_looks >= DEAD_LOOKS:
            return f"its /health said 503 {DEAD_LOOKS} times in a row"
        if self._progress.hung(self._clock()):
            return f"no forward progress for {self._progress.stalled_for_s(self._clock()):.0f} s"
        return None

    def _read_figures(self) -> None:
        status, page = self._get("/metrics")
        figures = read_engine_metrics(page.decode("utf-8", "replace")) if status == http.client.OK else None
        if figures is not None and figures.tokens is not None:
            self._progress.observe(Sample(self._clock(), figures.running, figures.waiting, figures.tokens))

    def _find_model(self) -> bool:
        if self._model is None:
            status, body = self._get("/v1/models")
            with contextlib.suppress(ValueError, KeyError, IndexError, TypeError):
                self._model = str(json.loads(body)["data"][0]["id"]) if status == http.client.OK else None
        return self._model is not None

    def _take(self, outcome: bool | None) -> None:
        if outcome:
            self.ready = True
            self._progress.probe_answered(self._clock())
        elif outcome is False:
            self._progress.probe_failed()

    def _ask_for_one_token(self) -> None:
        stall_s = self._progress.stall_s
        status, _ = self._post("/v1/completions", {"prompt": "Hi", "max_tokens": 1, "temperature": 0}, stall_s)
        if status in (400, 404, 405):  # a model that only embeds
            status, _ = self._post("/v1/embeddings", {"input": "Hi"}, stall_s)
        self._outcomes.put(None if status is None else 0 < status < 500)

    def _get(self, path: str) -> tuple[int | None, bytes]:
        return self._request("GET", path, None, TIMEOUT_S)

    def _post(self, path: str, fields: dict[str, Any], timeout_s: float) -> tuple[int | None, bytes]:
        return self._request("POST", path, json.dumps({"model": self._model, **fields}), timeout_s)

    def _request(self, method: str, path: str, body: str | None, timeout_s: float) -> tuple[int | None, bytes]:
        """Status and body; status None for silence, 0 where there was no connection or no HTTP."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=timeout_s)
        try:
            connection.request(method, path, body, self._headers)
            response = connection.getresponse()
            return response.status, response.read()
        except TimeoutError:
            return None, b""
        except (OSError, http.client.HTTPException):
            return 0, b""
        finally:
            connection.close()
