"""Every metric of the gateway: names, labels, buckets. Labels never carry a request, a prompt or a secret.

With several workers each one's values lie in files of one directory, and any worker's page is made of all of them
(metricfiles.py). How gauges come together is said where they are defined, and means nothing to a single process.
"""

from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from gateway import __version__
from gateway.metricfiles import MetricFiles

Together = Literal["livesum", "livemax", "livemin"]
# How the workers' gauges become the gateway's. All of them are of the living: what a dead worker held it holds no more.
TOGETHER: Together = "livesum"  # parts of one amount
ANYWHERE: Together = "livemax"  # alike in all, or a fault that one worker sees is one
EVERYWHERE: Together = "livemin"  # holds once it holds for every worker

# The largest finite bucket lies above timeouts.total_s's default, or a p99 would be pinned to the top.
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1200)
_SHORT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.4, 0.8, 1.6, 5, 20, 60, 120)
_WINDOW_SECONDS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.012, 0.015, 0.02, 0.03, 0.06, 0.25, 1)

_FAILURES = (
    *("unreachable", "UpstreamUnreachable", "UpstreamTimeout", "UpstreamFailed", "engine_5xx", "engine_error_event"),
    *("broken_stream", "timeout_in_stream", "unreadable_stream", "deadline", "shutdown"),
)


def _at_zero(series: Counter, causes: tuple[str, ...]) -> None:
    """Exported from the start: `increase` does not see the first event of a series that begins with it."""
    for cause in causes:
        series.labels(cause)


class Metrics:
    """One registry with all of it; made once per process, handed to whoever counts."""

    def __init__(self, files: MetricFiles | None = None) -> None:
        """`files`: where the workers' values lie, if there are several."""
        registry = self.registry = CollectorRegistry()
        self._files = files
        gauge_class = Gauge if files is None else files.gauge_class

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"gateway_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str, mode: Together = ANYWHERE) -> Gauge:
            return gauge_class(f"gateway_{name}", text, labels, registry=registry, multiprocess_mode=mode)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"gateway_{name}", text, labels, registry=registry, buckets=buckets)

        gauge("build_info", "1; the label names the running version.", "version").labels(__version__).set(1)
        gauge(
            "workers",
            "Living processes of this gateway; setting workers wants so many.",
            mode=TOGETHER,
        ).set(1)
        self.worker_restarts = counter("worker_restarts_total", "Workers started again after one had ended.")
        # Requests, as clients saw them.
        self.requests = counter(
            "requests_total", "Finished requests by route, status and tenant.", "route", "status", "tenant"
        )
        self.request_seconds = histogram(
            "request_seconds", "From a request's arrival to the end of its answer.", _SECONDS, "route"
        )
        self.ttft_seconds = histogram(
            "time_to_first_token_seconds",
            "From arrival to the first event with content, streamed requests.",
            _SECONDS,
            "route",
        )
        self.itl_seconds = histogram(
            "inter_token_latency_seconds",
            "Between two reads of a stream with content, each divided by its events.",
            _SHORT_SECONDS,
        )
        self.tokens = counter("tokens_total", "Tokens as the engines' usage counts them.", "tenant", "kind")
        self.cancelled = counter("cancelled_total", "Requests whose client left before the answer's end.", "phase")
        # Admission.
        self.queue_seconds = histogram("queue_seconds", "From arrival to admission, admitted requests.", _SECONDS)
        self.queued_requests = gauge("queued_requests", "Requests waiting for admission.", mode=TOGETHER)
        self.queued_tokens = gauge("queued_tokens", "Their tokens: prompt estimates plus max_tokens.", mode=TOGETHER)
        self.in_flight_requests = gauge("in_flight_requests", "Admitted requests that have not ended.", mode=TOGETHER)
        self.in_flight_tokens = gauge(
            "in_flight_tokens", "Their tokens: prompt estimates, what they share once, plus max_tokens.", mode=TOGETHER
        )
        self.capacity_tokens = gauge(
            "capacity_tokens",
            "Tokens admitted at once; 0 while no engine has told its capacity.",
            mode=TOGETHER,
        )
        # The same by pool: a model and those that share an engine with it, under the first of their names.
        self.pool_capacity_tokens = gauge(
            "pool_capacity_tokens", "Tokens admitted at once, by pool.", "model", mode=TOGETHER
        )
        self.pool_in_flight_tokens = gauge(
            "pool_in_flight_tokens", "Tokens of admitted requests, by pool.", "model", mode=TOGETHER
        )
        self.pool_queued_tokens = gauge(
            "pool_queued_tokens", "Tokens of waiting requests, by pool.", "model", mode=TOGETHER
        )
        self.shed = counter(
            "shed_total", "Requests refused with 429 or 503 before they reached an engine.", "cause", "tenant"
        )
        self.deadline_shed = counter(
            "deadline_shed_total",
            "Of those refused for the predicted wait: those that only their own deadline forbade to wait.",
            "tenant",
        )
        # Micro-batching.
        self.batch_prompts = histogram(
            "microbatch_prompts", "Prompts in each merged call.", (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128)
        )
        self.batch_wait_seconds = histogram(
            "microbatch_wait_seconds", "Time a batchable request waited for company.", _WINDOW_SECONDS
        )
        self.merged = counter("merged_requests_total", "Requests answered from a merged call.")
        self.splits = counter("microbatch_splits_total", "Merged calls taken apart again, by cause.", "cause")
        _at_zero(self.splits, ("unreachable", "refused", "no_accounting"))
        self.coalesced = counter("coalesced_requests_total", "Requests that shared another's engine call.")
        # What the prefix cache could make of the prompts (prefixes.py says what the outcomes mean).
        self.prefix_tokens = counter(
            "prefix_tokens_total", "Prompt tokens of answered requests by their prefix's outcome.", "tenant", "outcome"
        )
        self.prefix_entries = gauge(
            "prefix_entries", "Leading parts of prompts that are remembered, as hashes.", mode=TOGETHER
        )
        # Engines.
        self.failures = counter("upstream_failures_total", "Engine calls that failed, by cause.", "cause")
        _at_zero(self.failures, _FAILURES)
        self.retries = counter("upstream_retries_total", "Calls sent again to an engine that had seen nothing of them.")
        self.upstream_calls = gauge("upstream_calls", "Calls to engines open now.", "replica", mode=TOGETHER)
        self.replicas = gauge("replicas", "Engines that settings, files and names list, ready or not.")
        self.replica_ready = gauge("replica_ready", "1 while a replica takes requests.", "replica", mode=EVERYWHERE)
        self.replica_drained = gauge(
            "replica_drained",
            "1 while a replica gets nothing new by an order (POST /drain).",
            "replica",
        )
        self.replica_circuit = gauge(
            "replica_circuit", "0 closed; 1 half open, one request may try; 2 open, left out for a while.", "replica"
        )
        self.circuit_opened = counter(
            "replica_circuit_opened_total", "Times that a replica was left out, by cause.", "replica", "cause"
        )
        self.replica_stalled_seconds = gauge(
            "replica_stalled_seconds", "Time without forward progress though there was work.", "replica"
        )
        self.discovery_failures = counter(
            "discovery_failures_total", "Looks for engines that failed; those known before stay.", "kind"
        )
        self.discovery_bad = gauge(
            "discovery_sources_bad", "Files and names that could not be used when last looked at."
        )
        # Advice (advisor.py), and the settings it goes by.
        self.advice = gauge("advice", "1 while this advice holds; /status has its words.", "kind", "severity")
        self.setting = gauge("setting", "Settings that limit: the unit is in the name, 0 is unset.", "name")
        # State that is read again while running.
        self.keys_reload_failures = counter("keys_reload_failures_total", "Changed keys files that could not be used.")
        self.keys_file_bad = gauge(
            "keys_file_bad", "1 while the keys file on disk is unusable and an older one is in force."
        )
        self.keys = gauge("keys", "Keys in force, expired ones included; 0 with auth disabled, too.")
        self.log_lines_dropped = counter(
            "log_lines_dropped_total", "Log lines that were not written because stderr took none."
        )
        # The usage ledger.
        self.ledger_failures = counter(
            "ledger_failures_total", "Commits of the usage ledger that failed; kept and tried again."
        )
        self.ledger_pending = gauge("ledger_pending_rows", "Rows of usage counted and not yet on disk.", mode=TOGETHER)

    def page(self) -> bytes:
        """The text exposition of all of it."""
        return generate_latest(self.registry if self._files is None else self._files.over(self.registry))

    def source(self, names: frozenset[str]) -> Collector:
        """Where the gateway's samples of these names are collected from; there may be others among them."""
        return self.registry.restricted_registry(names) if self._files is None else self._files.over(self.registry)

    def flush(self) -> None:
        """Have this worker's gauges say what is now: they are read from other processes."""
        if self._files is not None:
            self._files.flush()
