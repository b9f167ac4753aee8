"""Prometheus's and Alertmanager's HTTP interfaces, as far as the proof asks them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import httpx

POLL_S = 0.2
T = TypeVar("T")


class LateError(Exception):
    """Something expected did not come in time; the message says what."""


def until(condition: Callable[[], T | None], what: str, limit_s: float) -> T:
    """Polls for a true value and returns it. Raises LateError."""
    end = time.monotonic() + limit_s
    while not (value := condition()):
        if time.monotonic() > end:
            raise LateError(f"not seen within {limit_s:g} s: {what}")
        time.sleep(POLL_S)
    return value


class Prometheus:
    """One server."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._client = httpx.Client(base_url=url, timeout=20, trust_env=False)

    def get(self, path: str, **params: Any) -> Any:
        answer = self._client.get(f"/api/v1/{path}", params=params)
        if answer.status_code != httpx.codes.OK:
            raise httpx.HTTPStatusError(answer.text[:300], request=answer.request, response=answer)
        return answer.json()["data"]

    def ready(self) -> bool:
        try:
            return self._client.get("/-/ready").status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def reload(self) -> bool:
        """Whether the configuration was taken."""
        return self._client.post("/-/reload").status_code == httpx.codes.OK

    def instant(self, expression: str) -> list[dict[str, Any]]:
        result: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return result

    def value(self, expression: str) -> float | None:
        """The first series' value now."""
        found = self.instant(expression)
        return float(found[0]["value"][1]) if found else None

    def returned(self, expression: str, start: float, end: float, step: float = 1) -> bool:
        """Whether the expression gave a number at any step."""
        step = max(step, (end - start) / 10_000)
        result = self.get("query_range", query=expression, start=start, end=end, step=step)["result"]
        return any(not math.isnan(float(value)) for series in result for _, value in series["values"])

    def series(self, start: float, end: float) -> dict[str, list[Mapping[str, str]]]:
        """Everything that was scraped or recorded: name -> label sets."""
        found: dict[str, list[Mapping[str, str]]] = {}
        for labels in self.get("series", **{"match[]": '{__name__=~".+"}'}, start=start, end=end):
            found.setdefault(labels.pop("__name__"), []).append(labels)
        return found

    def firing(self, alertname: str) -> list[Mapping[str, str]]:
        """Label sets of the alert's firing instances."""
        alerts = self.get("alerts")["alerts"]
        return [a["labels"] for a in alerts if a["state"] == "firing" and a["labels"]["alertname"] == alertname]


class Alertmanager:
    """One server."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=20, trust_env=False)

    def ready(self) -> bool:
        try:
            return self._client.get("/-/ready").status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def inhibited(self, name: str, meant: Callable[[Mapping[str, str]], bool]) -> list[str]:
        """Names of the alerts that keep back the alert `name` with the labels meant; empty where nothing does."""
        alerts = self._client.get("/api/v2/alerts").raise_for_status().json()
        names = {alert["fingerprint"]: alert["labels"]["alertname"] for alert in alerts}
        kept = [alert for alert in alerts if alert["labels"]["alertname"] == name and meant(alert["labels"])]
        return sorted({names[by] for alert in kept for by in alert["status"]["inhibitedBy"] if by in names})
