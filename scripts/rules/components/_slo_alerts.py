"""Alerts on broken promises."""

from __future__ import annotations

from scripts.rules import Alert


def _burn(long: str, short: str, limit: str) -> str:
    return f"""(
  slo:errors:ratio_rate{long} > @{limit}@
  and slo:errors:ratio_rate{short} > @{limit}@
  and sum_over_time(slo:requests:increase5m[{long}])
    >= @minimum_requests@ * count_over_time(slo:requests:increase5m[{long}])
)"""


def _missed(name: str, promise: str, metric: str, what: str, do: str) -> Alert:
    return Alert(
        name,
        f"""
slo:within_limit:ratio_rate5m{{slo="{promise}"}} < @{promise}_share@
and on ()
sum(increase({metric}_count[5m])) >= @minimum_requests@""",
        "warning",
        f"Only {{{{ $value | humanizePercentage }}}} of {what} within @{promise}_s@ s",
        f"Promised: @{promise}_percent@. {do}",
        "10m",
    )


ALERTS: tuple[Alert, ...] = (
    Alert(
        "SloErrorBudgetBurnFast",
        f"{_burn('1h', '5m', 'fast_burn')}\nor\n{_burn('6h', '30m', 'steady_burn')}",
        "critical",
        "{{ $value | humanizePercentage }} of the requests get no answer",
        "At this pace the month's error budget (@availability@ answered) is gone in days. Which: series "
        "gateway:requests:rate5m by status, gateway:shed_requests:rate5m and gateway:upstream_failures:rate5m by "
        "cause. 503 → the engine; 429 → overload, see GatewayShedding; 502, 504 and broken streams → the engine's log.",
        "1m",
        "14.4 times the error budget within an hour, or 6 times within six. The long window says that it matters, the "
        "short one that it is still going on.",
    ),
    Alert(
        "SloErrorBudgetBurnSlow",
        _burn("3d", "6h", "error_budget"),
        "warning",
        "{{ $value | humanizePercentage }} of the requests of three days got no answer",
        "More than the error budget (@availability@ answered) allows, not enough to wake anybody. The same series by "
        "day; most often nightly restarts, or a busy hour that is refused.",
        "30m",
    ),
    _missed(
        "TtftSloMissed",
        "ttft",
        "gateway_time_to_first_token_seconds",
        "the streams had their first token",
        "stack:request_seconds:mean5m says where the time goes. Gateway queue → more room or less load. Engine → long "
        "prompts without prefix hits (EngineLowHitRatio), or too many at once: lower max-num-batched-tokens for a "
        "steadier prefill.",
    ),
    _missed(
        "ItlSloMissed",
        "itl",
        "gateway_inter_token_latency_seconds",
        "the gaps between tokens were",
        "The batch is too large for the card, long prefills get in between (lower max-num-batched-tokens), requests "
        "are preempted (EnginePreemptions), or the engine's API server is at its limit (stream-interval, "
        "api-server-count).",
    ),
)
