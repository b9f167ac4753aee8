"""What configs/slo.yaml promises, against what clients got."""

from __future__ import annotations

from scripts.rules import INFERENCE, Component, Record
from scripts.rules.components._slo_alerts import ALERTS

_GATEWAY = "gateway; all of them together"
_OVERLOAD = 'gateway_shed_total{cause!~"key_.*|no_engine"}'
_BROKEN = """gateway_upstream_failures_total{
    cause=~"broken_stream|timeout_in_stream|unreadable_stream|engine_error_event|deadline"
  }"""
LONG_WINDOWS = ("30m", "1h", "6h", "3d")


def _requests(status: str) -> str:
    return f'gateway_requests_total{{\n    {INFERENCE},\n    status=~"{status}"\n  }}'


def _sum(*series: str) -> str:
    return "\n+\n".join(f"(sum(increase({one}[5m])) or vector(0))" for one in series)


def _errors(window: str) -> Record:
    return Record(
        f"slo:errors:ratio_rate{window}",
        f"""
clamp_max(
  sum_over_time(slo:failures:increase5m[{window}])
    / (sum_over_time(slo:requests:increase5m[{window}]) > 0),
  1
)""",
        f"Share of the requests of the last {window} that were not answered.",
        "0 to 1",
        _GATEWAY,
        "Absent while idle. From the two series above, so that days cost no more than one series each.",
    )


def _within(promise: str, metric: str, what: str) -> Record:
    return Record(
        "slo:within_limit:ratio_rate5m",
        f"""
sum(rate({metric}_bucket{{le="@{promise}_le@"}}[5m]))
/
(sum(rate({metric}_count[5m])) > 0)""",
        f"Share of the last five minutes' {what} that kept the limit of configs/slo.yaml.",
        "0 to 1",
        "gateway; label slo",
        "Absent while nothing streams.",
        {"slo": promise},
    )


RECORDS: tuple[Record, ...] = (
    Record(
        "slo:requests:increase5m",
        _sum(_requests("2..|5.."), _OVERLOAD),
        "Requests of the last five minutes that were the service's to answer.",
        "requests",
        _GATEWAY,
        "Clients' own faults, refusals by a key's limits, clients that left: not in it. 0, not absent, while idle.",
    ),
    Record(
        "slo:failures:increase5m",
        _sum(_requests("5.."), _OVERLOAD, _BROKEN),
        "Those of them that got no answer or a broken one: 5xx, refused for want of room, streams that broke.",
        "requests",
        _GATEWAY,
        "0, not absent, while there is nothing to count.",
    ),
    Record(
        "slo:errors:ratio_rate5m",
        "clamp_max(slo:failures:increase5m / (slo:requests:increase5m > 0), 1)",
        "Share of the requests of the last five minutes that were not answered.",
        "0 to 1",
        _GATEWAY,
        "Absent while idle.",
    ),
    *map(_errors, LONG_WINDOWS),
    _within("ttft", "gateway_time_to_first_token_seconds", "streams"),
    _within("itl", "gateway_inter_token_latency_seconds", "gaps between tokens"),
    Record(
        "slo:answers:rate5m",
        f"""
clamp_min(
  sum(rate({_requests("2..")}[5m]))
  -
  (sum(rate({_BROKEN}[5m])) or vector(0)),
  0
)""",
        "Answers a second that reached their end.",
        "requests/s",
        _GATEWAY,
    ),
    Record(
        "slo:goodput:rate5m",
        """
slo:answers:rate5m
* (min(slo:within_limit:ratio_rate5m) or vector(1))""",
        "Answers a second that can have kept the promises: times the smaller of the two shares.",
        "requests/s",
        _GATEWAY,
        "An upper bound: histograms can't say whether one answer kept both promises. Where nothing streams it is all "
        "answers.",
    ),
)

COMPONENT = Component("slo", "What configs/slo.yaml promises, against what clients got.", (*RECORDS, *ALERTS))
