"""What the engine and the card say during a measurement: counters before and after, the rest once a second."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

# Two spellings where releases differ; the first that is there counts.
COUNTERS = {
    "prefix_queries": ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
    "prefix_hits": ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
    "preemptions": ("vllm:num_preemptions_total",),
    "prompt_tokens": ("vllm:prompt_tokens_total",),
    "generation_tokens": ("vllm:generation_tokens_total",),
    "ttft_sum": ("vllm:time_to_first_token_seconds_sum",),
    "ttft_count": ("vllm:time_to_first_token_seconds_count",),
}
GAUGES = {
    "kv_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "running": ("vllm:num_requests_running",),
    "waiting": ("vllm:num_requests_waiting",),
}
CARD = ("utilization.gpu", "memory.used", "power.draw", "temperature.gpu")  # nvidia-smi: %, MiB, W, C


def sums(page: str) -> dict[str, float]:
    """Samples of a metrics page by name, summed over their labels (engine ranks, API servers)."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def pick(samples: Mapping[str, float], names: Mapping[str, tuple[str, ...]]) -> dict[str, float]:
    """Our name to value, for those that the engine exports."""
    return {ours: samples[name] for ours, spellings in names.items() for name in reversed(spellings) if name in samples}


def until_idle(engine: str, limit_s: float) -> int:
    """Requests of others that the engine still works on after `limit_s`: 0 once it is idle. Raises httpx's errors."""
    until = time.monotonic() + limit_s
    while True:
        found = pick(sums(httpx.get(f"{engine}/metrics", timeout=30).raise_for_status().text), GAUGES)
        busy = int(found.get("running", 0) + found.get("waiting", 0))
        if not busy or time.monotonic() > until:
            return busy
        time.sleep(0.2)


def started(engine: str) -> float | None:
    """When the server's process began, s since 1970; None where it does not say. Raises httpx's errors."""
    page = httpx.get(f"{engine}/metrics", timeout=30).raise_for_status().text
    return sums(page).get("process_start_time_seconds")


@dataclass
class Watch:
    """Use as a context manager around a measurement; `report` afterwards."""

    engine: str
    every_s: float = 1.0
    series: list[dict[str, float]] = field(default_factory=list)
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)

    def __enter__(self) -> Self:
        self._stop = threading.Event()
        self._smi = shutil.which("nvidia-smi")
        self.before = pick(sums(self._page()), COUNTERS)
        self._begin = time.monotonic()
        self._thread = threading.Thread(target=self._loop, name="watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        with contextlib.suppress(httpx.HTTPError):  # a dead engine is the measurement's finding, not ours
            self.after = pick(sums(self._page()), COUNTERS)

    def _page(self) -> str:
        return httpx.get(f"{self.engine}/metrics", timeout=30).raise_for_status().text

    def _loop(self) -> None:
        while not self._stop.wait(self.every_s):
            point = {"s": round(time.monotonic() - self._begin, 2)}
            with contextlib.suppress(httpx.HTTPError):
                samples = sums(self._page())
                point |= pick(samples, GAUGES) | self._hits(pick(samples, COUNTERS))
            if self._smi:
                point |= _card(self._smi)
            self.series.append(point)

    def _hits(self, now: Mapping[str, float]) -> dict[str, float]:
        """The prefix cache's hit ratio since the measurement began; empty before the first prompt."""
        asked, hits = (now.get(n, 0) - self.before.get(n, 0) for n in ("prefix_queries", "prefix_hits"))
        return {"hit_ratio": hits / asked} if asked > 0 else {}

    def report(self) -> dict[str, Any]:
        """Deltas of the counters, the gauges' series and extremes, the card's means (None without a card)."""
        delta = {name: self.after[name] - value for name, value in self.before.items() if name in self.after}
        usage = [point["kv_usage"] for point in self.series if "kv_usage" in point]
        queries = delta.get("prefix_queries", 0)
        firsts = delta.get("ttft_count", 0)
        card = {name: [point[name] for point in self.series if name in point] for name in CARD}
        return {
            **{name: delta.get(name) for name in ("preemptions", "prompt_tokens", "generation_tokens")},
            "prefix_hit_ratio": delta.get("prefix_hits", 0) / queries if queries else None,
            "ttft_mean_ms": delta["ttft_sum"] / firsts * 1000 if firsts else None,
            "kv_usage_peak": max(usage, default=None),
            "kv_usage_mean": sum(usage) / len(usage) if usage else None,
            "running_peak": max((point.get("running", 0) for point in self.series), default=None),
            "waiting_peak": max((point.get("waiting", 0) for point in self.series), default=None),
            "series": self.series,
            "card": {name: sum(values) / len(values) for name, values in card.items() if values} or None,
        }


def _card(program: str) -> dict[str, float]:
    """The first card's figures; empty where the program has none to give."""
    query = [program, f"--query-gpu={','.join(CARD)}", "--format=csv,noheader,nounits", "-i", "0"]
    try:
        line = subprocess.run(query, capture_output=True, text=True, timeout=5, check=True).stdout
        return dict(zip(CARD, map(float, line.split(",")), strict=True))
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}
