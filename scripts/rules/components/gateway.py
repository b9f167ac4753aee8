"""What the gateway tells: what clients saw, admission, micro-batching, and where the time went."""

from __future__ import annotations

from scripts.rules import INFERENCE, Component, Record, quantiles
from scripts.rules.components._gateway_alerts import ALERTS

_GATEWAY = "gateway; all of them together"
_FIRST_OF_ITS_KIND = "A series begins with its first event, and a rate needs two samples: the very first is not seen."
_SPLIT = (
    "Means of what ended in the last five minutes; absent while nothing did. Merged and coalesced requests share "
    "engine time, and clients that left are in the gateway's mean alone: a picture, not an account."
)


def _percentiles(what: str, says: str, pitfall: str = "") -> list[Record]:
    expr = f"histogram_quantile(@q@, sum by (le) (rate(gateway_{what}_bucket[5m]))) >= 0"
    return list(quantiles(f"gateway:{what}:{{}}_5m", expr, says, "seconds", _GATEWAY, pitfall))


def _mean(name: str) -> str:
    return f"sum(rate({name}_sum[5m]))\n/\n(sum(rate({name}_count[5m])) > 0)"


RECORDS: tuple[Record, ...] = (
    Record(
        "gateway:requests:rate5m",
        f"""
sum by (route, status) (
  rate(gateway_requests_total{{{INFERENCE}}}[5m])
)""",
        "Requests for inference a second that ended, by route and status.",
        "requests/s",
        "gateway; by route and status",
        f"499: the client left. A stream that broke later keeps its 200. {_FIRST_OF_ITS_KIND}",
    ),
    Record(
        "gateway:tokens:rate5m",
        "sum by (tenant, kind) (rate(gateway_tokens_total[5m]))",
        "Tokens a second by tenant and kind (prompt, generation), as the engines' usage counts them.",
        "tokens/s",
        "gateway; by tenant and kind",
        f"Counted when a request ends, and for everyone who shared a coalesced answer. {_FIRST_OF_ITS_KIND}",
    ),
    *_percentiles("request_seconds", "{} of the requests had ended within this time of their arrival."),
    *_percentiles(
        "time_to_first_token_seconds",
        "{} of the streams had their first content within this time of their arrival.",
        "Streams only; the wait for admission is in it.",
    ),
    *_percentiles(
        "inter_token_latency_seconds",
        "{} of the gaps between two tokens of a stream were shorter.",
        "Tokens that came in one read share its time.",
    ),
    *_percentiles(
        "queue_seconds",
        "{} of the admitted requests had waited no longer for admission.",
        "Refused requests are not in it.",
    ),
    Record(
        "gateway:shed_requests:rate5m",
        "sum by (cause) (rate(gateway_shed_total[5m]))",
        "Requests a second that were refused before an engine saw them, by cause.",
        "requests/s",
        "gateway; by cause",
        "key_*: the key's own limits. no_engine: nothing was ready. The rest is overload: queue_full, pushed_out, "
        f"predicted_wait, waited_too_long. {_FIRST_OF_ITS_KIND}",
    ),
    Record(
        "gateway:overload_shed:ratio_rate5m",
        """
sum(gateway:shed_requests:rate5m{cause!~"key_.*|no_engine"})
/
(sum(gateway:requests:rate5m) > 0)""",
        "Share of the requests for inference that were refused for want of room.",
        "0 to 1",
        _GATEWAY,
        "Absent while nothing was ever refused, or nothing arrives.",
    ),
    Record(
        "gateway:upstream_failures:rate5m",
        "sum by (cause) (rate(gateway_upstream_failures_total[5m]))",
        "Engine calls a second that failed, by cause.",
        "calls/s",
        "gateway; by cause",
        f"unreachable was tried again elsewhere and need not have cost a client anything. {_FIRST_OF_ITS_KIND}",
    ),
    Record(
        "gateway:replicas_ready:ratio",
        """
(sum(gateway_replica_ready) or sum(gateway_replicas) * 0)
/
(sum(gateway_replicas) > 0)""",
        "Share of the listed engines that take requests.",
        "0 to 1",
        _GATEWAY,
        "Absent where none is listed. An open circuit does not count: such an engine is ready, and left out.",
    ),
    Record(
        "gateway:microbatch_prompts:mean5m",
        _mean("gateway_microbatch_prompts"),
        "Mean number of prompts in a merged call.",
        "prompts",
        _GATEWAY,
        "Merged calls only: what went alone is not in it. Absent while nothing merges.",
    ),
    Record(
        "gateway:microbatch_wait_seconds:mean5m",
        _mean("gateway_microbatch_wait_seconds"),
        "Mean time a batchable request waited for company.",
        "seconds",
        _GATEWAY,
        "Those that found none are in it. Absent while none waits.",
    ),
    Record(
        "gateway:microbatch_wait_seconds:p95_5m",
        "histogram_quantile(0.95, sum by (le) (rate(gateway_microbatch_wait_seconds_bucket[5m]))) >= 0",
        "95 % of the batchable requests waited no longer for company.",
        "seconds",
        _GATEWAY,
        "batching.window_ms bounds it, give or take the event loop.",
    ),
    Record(
        "gateway:merged_requests:rate5m",
        "sum(rate(gateway_merged_requests_total[5m]))",
        "Requests a second that were answered from a merged call.",
        "requests/s",
        _GATEWAY,
    ),
    Record(
        "gateway:coalesced_requests:rate5m",
        "sum(rate(gateway_coalesced_requests_total[5m]))",
        "Requests a second that shared the engine call of an identical one.",
        "requests/s",
        _GATEWAY,
    ),
    Record(
        "gateway:engine_calls_saved:rate5m",
        """
clamp_min(
  gateway:merged_requests:rate5m - sum(rate(gateway_microbatch_prompts_count[5m])),
  0
) + gateway:coalesced_requests:rate5m""",
        "Engine calls a second that merging and coalescing made unnecessary.",
        "calls/s",
        _GATEWAY,
        "A merged call that was taken apart again saved nothing; it is subtracted. Fewer calls, not fewer tokens.",
    ),
    Record(
        "gateway:engine_calls_saved:ratio_rate5m",
        'gateway:engine_calls_saved:rate5m / (sum(gateway:requests:rate5m{status="200"}) > 0)',
        "The same as a share of the answered requests.",
        "0 to 1",
        _GATEWAY,
    ),
    Record(
        "stack:request_seconds:mean5m",
        _mean("gateway_request_seconds"),
        "Where a request's time goes: all of it, as the client sees it.",
        "seconds",
        "gateway; label part",
        _SPLIT,
        {"part": "total"},
    ),
    Record(
        "stack:request_seconds:mean5m",
        _mean("gateway_queue_seconds"),
        "Of that, waiting for admission in the gateway.",
        "seconds",
        "gateway; label part",
        _SPLIT,
        {"part": "gateway queue"},
    ),
    Record(
        "stack:request_seconds:mean5m",
        _mean("vllm:e2e_request_latency_seconds"),
        "Of that, in the engines: their queue, prefill and decode.",
        "seconds",
        "vLLM; label part",
        _SPLIT,
        {"part": "engine"},
    ),
    Record(
        "stack:request_seconds:mean5m",
        """
clamp_min(
  stack:request_seconds:mean5m{part="total"}
    - on () stack:request_seconds:mean5m{part="gateway queue"}
    - on () stack:request_seconds:mean5m{part="engine"},
  0
)""",
        "The rest: the gateway's own work, the micro-batching window, the engines' API server, the wire.",
        "seconds",
        "gateway and vLLM; label part",
        _SPLIT,
        {"part": "rest"},
    ),
)

COMPONENT = Component("gateway", "What the gateway tells.", (*RECORDS, *ALERTS))
