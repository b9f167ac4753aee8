"""The gateway and its micro-batching: what clients see, who waits, what merging saves, what the replicas do."""

from __future__ import annotations

from scripts.dashboards import _looks as looks
from scripts.dashboards._board import Board, Choice
from scripts.dashboards._panels import (
    BLUE,
    GREEN,
    RED,
    YELLOW,
    Column,
    Look,
    Query,
    graph,
    listing,
    number,
)
from scripts.dashboards._queries import RATE, mean, quantiles
from scripts.dashboards._runbooks import link
from scripts.dashboards._shared import (
    failed_calls,
    first_token,
    queued_requests,
    queued_tokens,
    refused,
    requests_by_status,
    wait_for_admission,
)
from scripts.dashboards._slo import Slo

ROUTE = 'route=~"$route"'


def board(slo: Slo) -> Board:
    board = Board(
        "vllm-gateway",
        "Gateway and micro-batching",
        "What clients see, who waits for admission, what merging saves, and what the replicas do.",
        choices=(Choice("route", "route", "gateway_request_seconds_count", "Route", everything="/v1/.*"),),
    )
    _traffic(board, slo)
    _admission(board)
    _batching(board)
    _replicas(board)
    _inside(board)
    return board


def _traffic(board: Board, slo: Slo) -> None:
    board.row("Traffic and latency, as clients see them")
    latency = graph(
        2,
        "Request latency",
        "From a request's arrival to the end of its answer, streamed or not. Long answers take long: look at the "
        "time to the first token as well.",
        *quantiles("gateway_request_seconds", f"{{{ROUTE}}}"),
        look=looks.SECONDS,
    )
    between = graph(
        4,
        "Time between tokens",
        f"Time between two reads of a stream with content, each divided by its events. Dashed: the promise, "
        f"{slo.itl_limit_s * 1000:g} ms for {slo.itl_share:.0%}.",
        *quantiles("gateway_inter_token_latency_seconds"),
        look=Look("s", steps=((None, GREEN), (slo.itl_limit_s, RED))),
        lines=True,
        runbook=link("ItlSloMissed"),
    )
    routes = graph(
        5,
        "Requests by route",
        "Finished requests a second by the path they asked for.",
        Query(f"sum by (route) (rate(gateway_requests_total{{{ROUTE}}}{RATE}))", "{{route}}"),
        look=looks.RATE,
        stacked=True,
    )
    left = graph(
        6,
        "Clients that left",
        "Requests whose client closed the connection before the answer's end, by what the request was then doing.",
        Query(f"sum by (phase) (rate(gateway_cancelled_total{RATE}))", "{{phase}}"),
        look=Look("reqps", no_value="No client has left early"),
        stacked=True,
        fixed=looks.PHASES,
    )
    chosen = f"{{{ROUTE}}}"
    board.line(8, (8, requests_by_status(1, chosen)), (8, latency), (8, first_token(3, slo, chosen)))
    board.line(8, (8, between), (8, routes), (8, left))


def _admission(board: Board) -> None:
    board.row("Admission: who waits, who is refused")
    taken = graph(
        14,
        "Capacity taken, by model",
        "Each model has a queue and a capacity of its own, those that share an engine together: the sum may have room "
        "while one model is full.",
        Query(
            "sum by (model) (gateway_pool_in_flight_tokens) / (sum by (model) (gateway_pool_capacity_tokens) > 0)",
            "{{model}}",
        ),
        look=looks.SHARE,
        runbook=link("GatewayQueueSaturated"),
    )
    queued = graph(
        15,
        "Tokens queued, by model",
        "Prompt estimates plus max_tokens of the requests that wait for a model.",
        Query("sum by (model) (gateway_pool_queued_tokens)", "{{model}}"),
        look=looks.TOKENS,
        stacked=True,
        runbook=link("GatewayQueueSaturated"),
    )
    settings = listing(
        45,
        "Settings in force",
        "The settings that decide who waits (docs/settings.md). Without capacity_tokens it is what the engines tell.",
        Query('max by (name) (gateway_setting) unless max by (name) (gateway_setting{name="capacity_tokens"}) == 0'),
        columns=(Column("name", "Setting"), Column("Value", "Value", Look("none"))),
        look=Look("none"),
    )
    board.line(8, (6, queued_requests(10)), (6, queued_tokens(11)), (6, wait_for_admission(12)), (6, refused(13)))
    board.line(9, (8, taken), (8, queued), (8, settings))


def _batching(board: Board) -> None:
    board.row("Micro-batching: what merging saves")
    size = graph(
        20,
        "Prompts in a merged call",
        "Short completions that arrive together go to the engine as one call. This is the mean, over the calls that "
        "merged at least two.",
        Query(mean("gateway_microbatch_prompts"), "mean"),
        look=Look("short", 1, no_value="No call has merged"),
    )
    wait = graph(
        21,
        "Wait for company",
        "What the window costs a batchable request; batching.window_ms bounds it. Nobody waits while the replica has "
        "nothing of ours in flight.",
        Query(mean("gateway_microbatch_wait_seconds"), "mean"),
        *quantiles("gateway_microbatch_wait_seconds")[1:2],
        look=Look("s", no_value="No request was batchable"),
    )
    saved = graph(
        22,
        "Engine calls saved",
        "Calls a second that were not needed: merged into another, or shared with an identical request in flight. "
        "Means of five minutes: a merged call counts when it leaves, what it saved when it is answered.",
        Query("gateway:engine_calls_saved:rate5m", "saved"),
        Query("gateway:coalesced_requests:rate5m", "of them coalesced"),
        look=looks.RATE,
    )
    share = number(
        23,
        "Calls saved",
        "Engine calls that merging and coalescing made unnecessary, as a share of the requests answered in five "
        "minutes.",
        Query("gateway:engine_calls_saved:ratio_rate5m"),
        look=Look("percentunit", 1, maximum=1, no_value="idle"),
        trend=True,
    )
    split = listing(
        24,
        "Taken apart again",
        "Merged calls, since the start, that were sent again one by one: refused by the engine, unreachable, or "
        "without a usable account of each client's tokens. Their clients noticed nothing but time.",
        Query("sum by (cause) (gateway_microbatch_splits_total)"),
        columns=(Column("cause", "Cause"), Column("Value", "Calls", looks.MISHAPS, coloured=True, width=70)),
        look=Look("short", 0, no_value="No merged call was taken apart"),
    )
    board.line(8, (6, size), (6, wait), (5, saved), (3, share), (4, split))


def _replicas(board: Board) -> None:
    board.row("Replicas")
    ready = number(
        30,
        "Ready",
        "Whether each replica takes requests. Not ready with a healthy /health is an engine that makes no progress.",
        Query("min by (replica) (gateway_replica_ready)", "{{replica}}"),
        look=looks.READY,
        names=True,
        runbook=link("GatewayReplicaNotReady"),
    )
    calls = graph(
        31,
        "Calls open",
        "Calls to each engine that are open now. They should be alike: routing evens them out.",
        Query("sum by (replica) (gateway_upstream_calls)", "{{replica}}"),
        look=looks.COUNT,
    )
    stalled = graph(
        32,
        "Without progress",
        "Time since a replica last made progress though it had work. At timeouts.stall_s it counts as hung.",
        Query("max by (replica) (gateway_replica_stalled_seconds)", "{{replica}}"),
        Query('max(gateway_setting{name="stall_s"})', "hung from here on", RED, dashed=True),
        look=Look("s", 0),
        runbook=link("EngineHung"),
    )
    circuit = number(
        34,
        "Circuit",
        "Open: left out for a while because its calls failed. Half open: one request may try.",
        Query("max by (replica) (gateway_replica_circuit)", "{{replica}}"),
        look=looks.CIRCUIT,
        names=True,
        runbook=link("GatewayCircuitOpen"),
    )
    opened = graph(
        35,
        "Circuits opened",
        "How often each replica was left out: for a refused connection, for failures, or because a trial failed again.",
        Query(f"sum by (replica) (increase(gateway_replica_circuit_opened_total{RATE}))", "{{replica}}"),
        look=Look("short", 1),
        soft_max=1,
        runbook=link("GatewayCircuitOpen"),
    )
    share = graph(
        36,
        "Ready, of those listed",
        "Share of the engines in the gateway's list that take requests.",
        Query("gateway:replicas_ready:ratio", "ready", GREEN),
        look=Look("percentunit", maximum=1, no_value="No engine is listed"),
        runbook=link("GatewayReplicaNotReady"),
    )
    listed = number(
        37,
        "Listed",
        "Engines that settings, files and names list, ready or not.",
        Query("max(gateway_replicas)"),
        look=Look("short", 0, steps=((None, RED), (1, BLUE)), no_value="no gateway"),
        runbook=link("GatewayNoReadyReplica"),
    )
    stale = number(
        38,
        "Lists",
        "Targets files and names that engines are taken from: how many can't be used, so that what they said before "
        "stands. /status says which and why.",
        Query("max(gateway_discovery_sources_bad)"),
        look=Look("suffix: unusable", 0, steps=((None, GREEN), (1, RED)), words={"0": ("good", GREEN)}),
        runbook=link("GatewayReplicaListStale"),
    )
    board.line(8, (4, ready), (6, calls), (7, stalled), (7, failed_calls(33, "GatewayCircuitOpen")))
    board.line(8, (4, circuit), (7, opened), (7, share), (3, listed), (3, stale))


def _inside(board: Board) -> None:
    board.row("The gateway itself")
    keys = number(
        40,
        "Keys in force",
        "API keys, expired ones included; 0 with authentication disabled as well.",
        Query("max(gateway_keys)"),
        look=looks.COUNT,
    )
    bad = number(
        41,
        "Keys file",
        "Whether the keys file on disk can be used. If not, an older one is in force: `make keys ARGS=list` says why.",
        Query("max(gateway_keys_file_bad)"),
        look=Look("short", 0, steps=((None, GREEN), (1, RED)), words={"0": ("good", GREEN), "1": ("unusable", RED)}),
        runbook=link("GatewayKeysFileBad"),
    )
    pending = number(
        42,
        "Rows pending",
        "Usage ledger: rows that are counted and not on disk yet. They grow while the disk refuses them.",
        Query("max(gateway_ledger_pending_rows)"),
        look=Look("short", 0, steps=((None, GREEN), (10_000, YELLOW))),
        runbook=link("GatewayLedgerFailing"),
    )
    ledger = number(
        43,
        "Commits failed",
        "Of the usage ledger, since the start; each is tried again.",
        Query("sum(gateway_ledger_failures_total)"),
        look=looks.MISHAPS,
        runbook=link("GatewayLedgerFailing"),
    )
    logs = number(
        44,
        "Log lines dropped",
        "Since the start: stderr took none.",
        Query("sum(gateway_log_lines_dropped_total)"),
        look=looks.MISHAPS,
        runbook=link("GatewayLogLinesDropped"),
    )
    workers = number(
        46,
        "Workers",
        "Processes of the gateway that live. Settings in force says how many there shall be.",
        Query("sum(gateway_workers)"),
        look=Look("short", 0, no_value="no gateway"),
        runbook=link("GatewayCrashLoop"),
    )
    restarts = number(
        47,
        "Worker restarts",
        "Since the start: a worker ended and another took its place.",
        Query("sum(gateway_worker_restarts_total)"),
        look=looks.MISHAPS,
        runbook=link("GatewayCrashLoop"),
    )
    prefixes = number(
        48,
        "Prefixes known",
        "Leading parts of prompts that are remembered, as hashes: what routing and the explanation of misses go by.",
        Query("sum(gateway_prefix_entries)"),
        look=looks.COUNT,
    )
    board.line(4, *((3, each) for each in (workers, restarts, keys, bad, pending, ledger, logs, prefixes)))
