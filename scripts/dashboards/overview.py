"""The first page for whoever is on call: are the promises kept, and if not, where to look next."""

from __future__ import annotations

from scripts.dashboards._board import Board
from scripts.dashboards._gpu import gpu_row
from scripts.dashboards._panels import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    RED,
    YELLOW,
    Column,
    Look,
    Query,
    graph,
    listing,
    number,
)
from scripts.dashboards._runbooks import UID, link
from scripts.dashboards._shared import (
    failed_calls,
    first_token,
    hit_ratio,
    preemptions,
    queued_requests,
    refused,
    requests_by_status,
    running_and_waiting,
    tokens,
    wait_for_admission,
)
from scripts.dashboards._slo import Slo
from scripts.rules import INFERENCE

SEVERITY = Look("none", words={"critical": ("critical", RED), "warning": ("warning", ORANGE)})
ADVICE = {
    "engine_absent": "No engine answers",
    "engine_hung": "An engine makes no progress",
    "stats_off": "The engine exports no figures",
    "kv_pressure": "The KV cache is too small for this load",
    "engine_slots": "The engine's batch is full (max-num-seqs)",
    "prefix_off": "Prefix caching is off",
    "prefix_misses": "Prompts miss the prefix cache",
    "api_server_bound": "The API server limits streaming, not the card",
    "gateway_queue": "Requests wait in the gateway's queue",
    "deadline_sheds": "Clients' deadlines are shorter than the wait",
    "tenant_hog": "One key takes most of the capacity",
    "idle_window": "The micro-batching window gains nothing",
}


def board(slo: Slo) -> Board:
    board = Board(
        "vllm-overview",
        "Overview",
        "For the person on call. Read downward: promises, what fires, traffic, queue, engine, card. The promises are "
        "in configs/slo.yaml.",
    )
    _promises(board, slo)
    _now(board)
    _traffic(board, slo)
    _queue(board)
    _engine(board, slo)
    gpu_row(board, 50)
    return board


def _promises(board: Board, slo: Slo) -> None:
    allowed = 1 - slo.availability
    board.row("Promises")
    answered = number(
        1,
        "Answered",
        f"Share of the last hour's requests that were the service's to answer. Promised: {slo.availability:.2%}. "
        "Clients' own faults, their keys' limits and clients that left don't count.",
        Query("1 - slo:errors:ratio_rate1h"),
        look=Look("percentunit", 2, steps=((None, RED), (slo.availability, GREEN)), maximum=1, no_value="idle"),
        runbook=link("SloErrorBudgetBurnFast"),
    )
    budget = number(
        2,
        "Budget left, 3 days",
        "What is left of the failures that the promise allows in three days. Below 0 the promise is broken.",
        Query(f"1 - slo:errors:ratio_rate3d / {allowed:.6g}"),
        look=Look(
            "percentunit", 0, steps=((None, RED), (0.1, YELLOW), (0.5, GREEN)), minimum=None, maximum=1, no_value="idle"
        ),
        runbook=link("SloErrorBudgetBurnSlow"),
    )
    burn = number(
        3,
        "Burn rate",
        "How fast the budget went in the last hour: 1 uses it up exactly in its time, 14.4 uses 2 % of a month's in "
        "an hour and pages.",
        Query(f"slo:errors:ratio_rate1h / {allowed:.6g}"),
        look=Look("suffix:x", 1, steps=((None, GREEN), (1, YELLOW), (14.4, RED)), no_value="idle"),
        runbook=link("SloErrorBudgetBurnFast"),
    )
    first = number(
        4,
        f"TTFT ≤ {slo.ttft_limit_s:g} s",
        f"Share of the last five minutes' streams whose first token came within {slo.ttft_limit_s:g} s. Promised: "
        f"{slo.ttft_share:.0%}.",
        Query('slo:within_limit:ratio_rate5m{slo="ttft"}'),
        look=Look("percentunit", 1, steps=((None, RED), (slo.ttft_share, GREEN)), maximum=1, no_value="no streams"),
        runbook=link("TtftSloMissed"),
    )
    between = number(
        5,
        f"ITL ≤ {slo.itl_limit_s * 1000:g} ms",
        f"Share of the last five minutes' gaps between tokens that were shorter. Promised: {slo.itl_share:.0%}.",
        Query('slo:within_limit:ratio_rate5m{slo="itl"}'),
        look=Look("percentunit", 1, steps=((None, RED), (slo.itl_share, GREEN)), maximum=1, no_value="no streams"),
        runbook=link("ItlSloMissed"),
    )
    good = number(
        6,
        "Goodput",
        "Answers a second of the last five minutes that can have kept both promises; an upper bound.",
        Query("slo:goodput:rate5m"),
        look=Look("reqps", no_value="idle"),
        trend=True,
    )
    up = number(
        7,
        "Engines",
        "Engines that take requests, of those listed. Not ready with a healthy /health is a hung engine.",
        Query("gateway:replicas_ready:ratio"),
        look=Look("percentunit", 0, steps=((None, RED), (0.01, YELLOW), (1, GREEN)), maximum=1, no_value="none listed"),
        runbook=link("GatewayReplicaNotReady"),
    )
    board.line(4, (3, answered), (4, budget), (3, burn), (4, first), (4, between), (3, good), (3, up))


def _now(board: Board) -> None:
    board.row("Now")
    firing = listing(
        10,
        "Firing alerts",
        "What Prometheus holds to be true now, silenced or not. Each has a runbook.",
        Query(
            'max by (severity, alertname) ((time() - ALERTS_FOR_STATE{severity=~"critical|warning"})'
            ' and ignoring (alertstate) ALERTS{alertstate="firing", severity=~"critical|warning"})'
        ),
        columns=(
            Column("severity", "Severity", SEVERITY, width=110, coloured=True),
            Column("alertname", "Alert", link=f"/d/{UID}"),
            Column("Value", "For", Look("s", 0), width=110),
        ),
        look=Look("none", no_value="Nothing is firing"),
        sort=("Severity", False),
    )
    advice = listing(
        11,
        "Current advice",
        "What limits the stack now and is worth a change; `make advise` says by how much and what to do "
        "(docs/advise.md).",
        Query('gateway_advice{severity!="info"} == 1'),
        columns=(
            Column("severity", "Severity", SEVERITY, width=110, coloured=True),
            Column("kind", "What", Look("none", words={kind: (words, BLUE) for kind, words in ADVICE.items()})),
        ),
        look=Look("none", no_value="Nothing to change"),
        sort=("Severity", False),
    )
    board.line(7, (12, firing), (12, advice))


def _traffic(board: Board, slo: Slo) -> None:
    board.row("Traffic, errors, latency")
    errors = graph(
        21,
        "Not answered",
        "Share of the requests that were the service's to answer and got no answer, or a broken one. Dashed: what the "
        "promise allows.",
        Query("slo:errors:ratio_rate5m", "5 minutes", BLUE),
        Query("slo:errors:ratio_rate1h", "1 hour", PURPLE),
        look=Look("percentunit", steps=((None, GREEN), (1 - slo.availability, RED)), no_value="Idle"),
        lines=True,
        runbook=link("SloErrorBudgetBurnFast"),
    )
    asked = requests_by_status(20, f"{{{INFERENCE}}}")
    board.line(8, (6, asked), (6, errors), (6, first_token(22, slo)), (6, tokens(23)))


def _queue(board: Board) -> None:
    board.row("Queue")
    waited, failures = wait_for_admission(31), failed_calls(33, "EngineAbsent")
    board.line(8, (6, queued_requests(30)), (6, waited), (6, refused(32)), (6, failures))


def _engine(board: Board, slo: Slo) -> None:
    board.row("Engine")
    usage = graph(
        41,
        "KV cache usage",
        "Blocks that running requests hold. High is healthy; with requests waiting or preempted it is pressure.",
        Query("max by (instance) (vllm:gpu_cache_usage_ratio)", "{{instance}}"),
        look=Look("percentunit", maximum=1, no_value="No engine"),
        runbook=link("EngineKvPressure"),
    )
    board.line(8, (6, running_and_waiting(40)), (6, usage), (6, hit_ratio(42, slo)), (6, preemptions(43)))
