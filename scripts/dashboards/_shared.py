"""Panels that several dashboards show alike."""

from __future__ import annotations

from scripts.dashboards import _looks as looks
from scripts.dashboards._panels import BLUE, ORANGE, RED, Look, Query, graph
from scripts.dashboards._queries import RATE
from scripts.dashboards._runbooks import link
from scripts.dashboards._sdk import dashboard


def queued_requests(id_: int) -> dashboard.Panel:
    return graph(
        id_,
        "Queued and in flight",
        "Requests waiting for admission, and admitted ones that have not ended. Nothing queued reaches an engine.",
        Query("sum(gateway_in_flight_requests)", "in flight", BLUE),
        Query("sum(gateway_queued_requests)", "queued", ORANGE),
        look=looks.COUNT,
        runbook=link("GatewayQueueSaturated"),
    )


def queued_tokens(id_: int) -> dashboard.Panel:
    return graph(
        id_,
        "Tokens against capacity",
        "Admission counts tokens: each request's prompt estimate plus its max_tokens, so it may be full while the KV "
        "cache is not. At the dashed line the next one waits. The capacity is the engines' KV cache, unless a setting "
        "says less.",
        Query("sum(gateway_in_flight_tokens)", "in flight", BLUE),
        Query("sum(gateway_queued_tokens)", "queued", ORANGE),
        Query("sum(gateway_capacity_tokens)", "capacity", RED, dashed=True),
        look=looks.TOKENS,
        runbook=link("GatewayQueueSaturated"),
    )


def refused(id_: int) -> dashboard.Panel:
    return graph(
        id_,
        "Refused by cause",
        "429 and 503 before any engine saw the request. key_*: the key's own limits. no_engine: nothing was ready. The "
        "others are overload.",
        Query(f"sum by (cause) (rate(gateway_shed_total{RATE}))", "{{cause}}"),
        look=Look("reqps", no_value="Nothing has been refused"),
        stacked=True,
        fixed=looks.REFUSALS,
        runbook=link("GatewayShedding"),
    )
