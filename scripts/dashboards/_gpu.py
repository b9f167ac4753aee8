"""The card, where DCGM's exporter runs: a row that two dashboards share."""

from __future__ import annotations

from scripts.dashboards._board import Board
from scripts.dashboards._panels import GREEN, ORANGE, RED, Look, Query, graph
from scripts.dashboards._runbooks import link
from scripts.dashboards._sdk import dashboard

NONE = "No GPU exporter"


def gpu_row(board: Board, first_id: int) -> None:
    board.row("GPU")
    busy = graph(
        first_id,
        "GPU busy",
        "Share of the time in which any kernel ran. 100 % says nothing about how much of the card it used.",
        Query("DCGM_FI_DEV_GPU_UTIL / 100", "GPU {{gpu}}"),
        look=Look("percentunit", maximum=1, no_value=NONE),
    )
    memory = gpu_memory(
        first_id + 1,
        "The engine takes its whole share at the start: this says nothing about load, and much about what else runs "
        "there.",
    )
    power = graph(
        first_id + 2,
        "Power",
        "Of each card, as its sensor tells.",
        Query("DCGM_FI_DEV_POWER_USAGE", "GPU {{gpu}}"),
        look=Look("watt", 0, no_value=NONE),
    )
    heat = graph(
        first_id + 3,
        "Temperature",
        "Of each card's die. Cards slow down by themselves when it is too much.",
        Query("DCGM_FI_DEV_GPU_TEMP", "GPU {{gpu}}"),
        look=Look("celsius", 0, steps=((None, GREEN), (83, ORANGE), (90, RED)), no_value=NONE),
        lines=True,
        runbook=link("GpuTooHot"),
    )
    energy = graph(
        first_id + 4,
        "Tokens for a joule",
        "Generated tokens for each joule the cards took, whatever else ran on them included; over five minutes.",
        Query("gpu:generation_tokens_per_joule:ratio_rate5m", "tokens/J"),
        look=Look("short", 2, no_value=NONE),
    )
    board.line(7, (5, busy), (5, memory), (5, power), (5, heat), (4, energy))


def gpu_memory(id_: int, description: str) -> dashboard.Panel:
    return graph(
        id_,
        "GPU memory",
        description,
        Query("gpu:memory_used:ratio", "GPU {{gpu}}"),
        look=Look("percentunit", maximum=1, no_value=NONE),
        runbook=link("GpuMemoryFull"),
    )
