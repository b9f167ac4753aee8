"""Panels that several dashboards show alike. `selector`: what of the series the dashboard has chosen, in braces."""

from __future__ import annotations

from scripts.dashboards import _looks as looks
from scripts.dashboards._panels import BLUE, GREEN, ORANGE, PURPLE, RED, YELLOW, Look, Query, graph
from scripts.dashboards._queries import RATE, quantiles
from scripts.dashboards._runbooks import link
from scripts.dashboards._sdk import dashboard
from scripts.dashboards._slo import Slo


def requests_by_status(id_: int, selector: str) -> dashboard.Panel:
    return graph(
        id_,
        "Requests by status",
        "Finished requests a second. 429 and 503 were refused before an engine saw anything; 499 is a client that "
        "left.",
        Query(f"sum by (status) (rate(gateway_requests_total{selector}{RATE}))", "{{status}}"),
        look=Look("reqps", no_value="No requests"),
        stacked=True,
        fixed=looks.STATUSES,
        runbook=link("GatewayShedding"),
    )


def first_token(id_: int, slo: Slo, selector: str = "") -> dashboard.Panel:
    return graph(
        id_,
        "Time to first token",
        f"Streams: from arrival to the first event with content, the wait for admission included. Dashed: the promise, "
        f"{slo.ttft_limit_s:g} s for {slo.ttft_share:.0%}.",
        *quantiles("gateway_time_to_first_token_seconds", selector),
        look=Look("s", steps=((None, GREEN), (slo.ttft_limit_s, RED)), no_value="No streams"),
        lines=True,
        runbook=link("TtftSloMissed"),
    )


def tokens(id_: int, selector: str = "") -> dashboard.Panel:
    return graph(
        id_,
        "Tokens",
        "Prompt tokens include cached ones and are counted when a prefill ends, so a long prompt arrives at once.",
        Query(f"sum(rate(vllm:prompt_tokens_total{selector}{RATE}))", "prompt", PURPLE),
        Query(f"sum(rate(vllm:generation_tokens_total{selector}{RATE}))", "generated", GREEN),
        look=looks.TOKENS_RATE,
    )


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
        "says less; there is none until an engine has told it.",
        Query("sum(gateway_in_flight_tokens)", "in flight", BLUE),
        Query("sum(gateway_queued_tokens)", "queued", ORANGE),
        Query("sum(gateway_capacity_tokens) > 0", "capacity", RED, dashed=True),
        look=looks.TOKENS,
        runbook=link("GatewayQueueSaturated"),
    )


def wait_for_admission(id_: int) -> dashboard.Panel:
    return graph(
        id_,
        "Wait for admission",
        "From arrival to admission. Refused requests are not in it: they are told at once.",
        *quantiles("gateway_queue_seconds"),
        look=Look("s", no_value="Nothing was admitted"),
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


def failed_calls(id_: int, runbook: str) -> dashboard.Panel:
    return graph(
        id_,
        "Failed engine calls",
        "By cause. Sent again: elsewhere, because the engine had seen nothing of them; these need not have cost a "
        "client anything.",
        Query(
            f"sum by (cause) (rate(gateway_upstream_failures_total{RATE}))"
            " and sum by (cause) (increase(gateway_upstream_failures_total[$__range])) > 0",
            "{{cause}}",
        ),
        Query(f"sum(rate(gateway_upstream_retries_total{RATE}))", "sent again", GREEN),
        look=looks.EVENTS,
        fixed=looks.FAILURES,
        runbook=link(runbook),
    )


def running_and_waiting(id_: int, selector: str = "") -> dashboard.Panel:
    return graph(
        id_,
        "Running and waiting",
        "Running: in the engines' batches. Waiting: taken and not scheduled; the gateway's own queue comes before it.",
        Query(f"sum(vllm:num_requests_running{selector})", "running", BLUE),
        Query(f"sum(vllm:num_requests_waiting{selector})", "waiting", ORANGE),
        look=looks.COUNT,
        runbook=link("EngineKvPressure"),
    )


def hit_ratio(id_: int, slo: Slo, selector: str = "") -> dashboard.Panel:
    return graph(
        id_,
        "Prefix cache hit ratio",
        f"Hits over looked-up prompt tokens, five minutes; absent while idle. Dashed: {slo.prefix_hit_ratio:.0%}, "
        "where prompts share a beginning. Prompts shorter than a block can't hit.",
        Query(f"vllm:cache_hit_ratio{selector}", "{{model_name}}"),
        look=Look(
            "percentunit", steps=((None, RED), (slo.prefix_hit_ratio, GREEN)), maximum=1, no_value="Idle, or off"
        ),
        lines=True,
        runbook=link("EngineLowHitRatio"),
    )


def preemptions(id_: int, selector: str = "") -> dashboard.Panel:
    return graph(
        id_,
        "Preemptions",
        "Requests that lost their KV blocks to others and are computed again. Counted when one resumes, so a wave "
        "shows after it is over.",
        Query(f"sum by (instance) (rate(vllm:num_preemptions_total{selector}{RATE}))", "{{instance}}"),
        look=Look("cps", steps=((None, GREEN), (0.001, YELLOW)), no_value="No engine"),
        soft_max=0.1,
        runbook=link("EnginePreemptions"),
    )
