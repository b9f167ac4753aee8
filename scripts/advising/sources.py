"""Readings for a window: out of Prometheus, or scraped from the gateway's admin page and the engines' own."""

from __future__ import annotations

import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import httpx

from gateway.readings import (
    ENGINE_SERIES,
    GATEWAY_SERIES,
    EngineReading,
    Reading,
    Sample,
    place,
    read_engine,
    read_gateway,
    samples_of,
)
from scripts.advising import SourceError

POINTS = 30  # readings of one window out of Prometheus
LEAST_STEP_S = 1.0
INTERVAL_S = 1.0  # between two scrapes
_HELPERS = frozenset(name for name in ENGINE_SERIES if name.startswith("process_"))


def from_prometheus(client: httpx.Client, url: str, window_s: float, end_s: float | None = None) -> list[Reading]:
    """Raises SourceError: no Prometheus there, or none of our series in it."""
    end_s = time.time() if end_s is None else end_s
    step_s = max(LEAST_STEP_S, window_s / POINTS)
    names = "|".join(sorted(re.escape(name) for name in ENGINE_SERIES | GATEWAY_SERIES))
    params = {
        "query": f'{{__name__=~"{names}"}}',
        "start": f"{end_s - window_s:.3f}",
        "end": f"{end_s:.3f}",
        "step": f"{step_s:g}",
    }
    try:
        answer = client.post(f"{url.rstrip('/')}/api/v1/query_range", data=params)
        document = answer.json()
        found = document["data"]["result"]
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise SourceError(f"no Prometheus answers at {url}: {error or type(error).__name__}") from None
    except (ValueError, KeyError, TypeError):
        raise SourceError(f"no Prometheus answers at {url}: what came is no query's result") from None
    readings = _by_time(found)
    if not readings:
        raise SourceError(
            f"{url} has no series of a gateway or an engine in the last {window_s:g} s: does it scrape them?"
        )
    return readings


def _by_time(result: Sequence[Mapping[str, Any]]) -> list[Reading]:
    """Each instant's samples as one reading. Several gateways are summed; `process_` series count for engines only."""
    engines = {entry["metric"].get("instance") for entry in result if entry["metric"]["__name__"].startswith("vllm:")}
    ours: dict[float, list[Sample]] = defaultdict(list)
    theirs: dict[float, dict[str, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    for entry in result:
        labels: dict[str, str] = entry["metric"]
        name, instance = labels["__name__"], labels.get("instance", "")
        if name in _HELPERS and instance not in engines:
            continue
        for at, text in entry["values"]:
            sample = Sample(name, labels, float(text))
            if math.isfinite(sample.value):
                (ours[at] if name.startswith("gateway_") else theirs[at][instance]).append(sample)
    return [
        Reading(
            at,
            {instance: read_engine(samples) for instance, samples in theirs.get(at, {}).items()},
            read_gateway(ours[at]) if at in ours else None,
        )
        for at in sorted({*ours, *theirs})
    ]


def from_pages(
    client: httpx.Client,
    admin: str | None,
    engines: Sequence[str],
    window_s: float,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Reading]:
    """Scrapes every second for the window. Without `engines`, those that the gateway names are tried.

    Raises SourceError where the first look finds neither a gateway nor an engine.
    """
    readings: list[Reading] = []
    begin = time.monotonic()
    while not readings or time.monotonic() - begin < window_s:
        if readings:
            sleep(INTERVAL_S)
        own = _page(client, admin) if admin else None
        gateway = None if own is None else _gateway(own)
        urls = engines or sorted(key[1] for key in gateway or {} if key[0] == "gateway_replica_ready")
        told = {place(url): reading for url in urls if (reading := _engine(_page(client, url))) is not None}
        if not readings and gateway is None and not told:
            tried = [url for url in (admin, *urls) if url]
            raise SourceError(f"nothing to read at {' or '.join(tried)}: is the stack up? (--help names the addresses)")
        readings.append(Reading(time.monotonic(), told, gateway))
    return readings


def _page(client: httpx.Client, url: str) -> str | None:
    try:
        answer = client.get(f"{url.rstrip('/')}/metrics")
    except (httpx.HTTPError, httpx.InvalidURL):
        return None
    return answer.text if answer.status_code == httpx.codes.OK else None


def _gateway(page: str) -> dict[tuple[str, ...], float] | None:
    """None for a page that is not our gateway's."""
    try:
        values = read_gateway(samples_of(page, GATEWAY_SERIES))
    except ValueError:
        return None
    return values if any(key[0] == "gateway_setting" for key in values) else None


def _engine(page: str | None) -> EngineReading | None:
    try:
        return None if page is None else read_engine(samples_of(page, ENGINE_SERIES))
    except ValueError:
        return None


def answers_as_prometheus(client: httpx.Client, url: str) -> bool:
    try:
        return bool(client.get(f"{url.rstrip('/')}/api/v1/status/buildinfo").json().get("status") == "success")
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, AttributeError):
        return False


def seconds(readings: Iterable[Reading]) -> float:
    at = [reading.at_s for reading in readings]
    return at[-1] - at[0]
