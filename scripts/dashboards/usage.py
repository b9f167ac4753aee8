"""Who uses the stack how much, a key at a time."""

from __future__ import annotations

from scripts.dashboards import _looks as looks
from scripts.dashboards._board import Board, Choice
from scripts.dashboards._panels import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    YELLOW,
    Column,
    Look,
    Query,
    bars,
    graph,
    listing,
    note,
)
from scripts.dashboards._queries import RATE
from scripts.dashboards._runbooks import link
from scripts.dashboards._sdk import dashboard

TENANT = 'tenant=~"$tenant"'
# Probes of /readyz and the like are nobody's usage.
ASKED = f'{TENANT}, route=~"/v1/.*"'
# What became of prompt tokens, in the order in which a reader asks: green was saved, the rest says why not.
OUTCOMES = {
    "hit": GREEN,
    "repeated": "light-green",
    "short": GREY,
    "tail": "light-blue",
    "first_seen": BLUE,
    "salted": PURPLE,
    "restarted": YELLOW,
    "elsewhere": ORANGE,
    "evicted": RED,
    "unknown": "dark-red",
}


def board() -> Board:
    board = Board(
        "vllm-usage",
        "Usage per key",
        "What each API key asks for, gets, is refused, and leaves in the prefix cache. A key is shown by its "
        "configured name, never by itself.",
        choices=(Choice("tenant", "tenant", "gateway_requests_total", "Key"),),
        since="now-6h",
    )
    _totals(board)
    _over_time(board)
    _prefix(board)
    return board


def _totals(board: Board) -> None:
    board.row("In the time shown")
    total = listing(
        1,
        "Per key",
        "Requests, tokens and refusals in the time shown, as the metrics have them: an estimate between scrapes, lost "
        "with Prometheus's data. The account to bill from is the ledger: `make usage`.",
        Query(f"sum by (tenant) (increase(gateway_requests_total{{{ASKED}}}[$__range]))"),
        Query(f'sum by (tenant) (increase(gateway_tokens_total{{{TENANT}, kind="prompt"}}[$__range]))'),
        Query(f'sum by (tenant) (increase(gateway_tokens_total{{{TENANT}, kind="generation"}}[$__range]))'),
        Query(f"sum by (tenant) (increase(gateway_shed_total{{{TENANT}}}[$__range]))"),
        Query(
            f'sum by (tenant) (increase(gateway_requests_total{{{ASKED}, status=~"5.."}}[$__range]))'
            f" / (sum by (tenant) (increase(gateway_requests_total{{{ASKED}}}[$__range])) > 0)"
        ),
        columns=(
            Column("tenant", "Key"),
            Column("Value #A", "Requests", looks.COUNT),
            Column("Value #B", "Prompt tokens", looks.COUNT),
            Column("Value #C", "Generated tokens", looks.COUNT),
            Column("Value #D", "Refused", Look("short", 0, steps=((None, GREY), (1, ORANGE))), coloured=True),
            Column("Value #E", "5xx share", Look("percentunit", 2, steps=((None, GREY), (0.005, RED))), coloured=True),
        ),
        look=Look("short", 0, no_value="No requests in the time shown"),
        sort=("Generated tokens", True),
    )
    share = bars(
        2,
        "Share of the generated tokens",
        "Admission is fair between keys by tokens: under load no key gets more than its share while others wait.",
        Query(
            f'sum by (tenant) (increase(gateway_tokens_total{{{TENANT}, kind="generation"}}[$__range]))'
            ' / on () group_left () (sum(increase(gateway_tokens_total{kind="generation"}[$__range])) > 0)',
            "{{tenant}}",
        ),
        look=Look("percentunit", 1, maximum=1, no_value="No tokens in the time shown"),
    )
    board.line(8, (15, total), (9, share))


def _over_time(board: Board) -> None:
    board.row("Over time")
    requests = graph(
        10,
        "Requests",
        "Finished requests a second by key.",
        Query(f"sum by (tenant) (rate(gateway_requests_total{{{ASKED}}}{RATE}))", "{{tenant}}"),
        look=looks.RATE,
        stacked=True,
    )
    generated = _tokens(
        11, "Generated tokens", "generation", "Counted when a request ends, so a long answer arrives at once."
    )
    prompt = _tokens(12, "Prompt tokens", "prompt", "Counted when a request ends, cached ones included.")
    shed = graph(
        13,
        "Refused, by key and cause",
        "key_*: the key's own limits, raised with `make keys`. The other causes are overload, shared fairly.",
        Query(f"sum by (tenant, cause) (rate(gateway_shed_total{{{TENANT}}}{RATE}))", "{{tenant}} {{cause}}"),
        look=Look("reqps", no_value="Nothing has been refused"),
        stacked=True,
        runbook=link("GatewayShedding"),
    )
    board.line(8, (12, requests), (12, generated))
    board.line(8, (12, prompt), (12, shed))


def _tokens(id_: int, title: str, kind: str, says: str) -> dashboard.Panel:
    return graph(
        id_,
        title,
        says,
        Query(f'sum by (tenant) (rate(gateway_tokens_total{{{TENANT}, kind="{kind}"}}{RATE}))', "{{tenant}}"),
        look=looks.TOKENS_RATE,
        stacked=True,
    )


def _prefix(board: Board) -> None:
    board.row("Prefix cache: whose prompts repeat, and why the others miss")
    outcomes = graph(
        20,
        "Prompt tokens by outcome",
        "What the prefix cache could make of each prompt token of the chosen keys (docs/advise.md).",
        Query(f"sum by (outcome) (rate(gateway_prefix_tokens_total{{{TENANT}}}{RATE}))", "{{outcome}}"),
        look=looks.TOKENS_RATE,
        stacked=True,
        fixed=OUTCOMES,
        runbook=link("EngineLowHitRatio"),
    )
    hits = bars(
        21,
        "Served from the cache, by key",
        "Share of a key's prompt tokens in the time shown that came from the prefix cache or, where no answer tells, "
        "repeated a known prefix.",
        Query(
            f'(sum by (tenant) (increase(gateway_prefix_tokens_total{{{TENANT}, outcome=~"hit|repeated"}}[$__range]))'
            f" or sum by (tenant) (increase(gateway_prefix_tokens_total{{{TENANT}}}[$__range])) * 0)"
            f" / (sum by (tenant) (increase(gateway_prefix_tokens_total{{{TENANT}}}[$__range])) > 0)",
            "{{tenant}}",
        ),
        look=Look("percentunit", 1, maximum=1, no_value="No prompts in the time shown"),
    )
    words = note(
        22,
        "Outcomes",
        "What the colours mean.",
        "- **hit**: came from the cache\n"
        "- **repeated**: known prefix, the answer does not tell\n"
        "- **short**, **tail**: less than one block, can't hit\n"
        "- **first_seen**: new to the gateway\n"
        "- **salted**, **elsewhere**, **restarted**: known, but under another salt, on another replica, before a "
        "restart\n"
        "- **evicted**: expected to hit, did not\n",
    )
    board.line(8, (11, outcomes), (7, hits), (6, words))
