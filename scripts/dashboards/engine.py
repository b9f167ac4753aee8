"""The engines from inside: requests, latency and where it goes, KV cache, prompts and answers, process and card."""

from __future__ import annotations

from scripts.dashboards import _looks as looks
from scripts.dashboards._board import Board, Choice
from scripts.dashboards._gpu import gpu_row
from scripts.dashboards._panels import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    Column,
    Look,
    Query,
    graph,
    listing,
    number,
)
from scripts.dashboards._queries import RATE, mean, quantiles
from scripts.dashboards._runbooks import link
from scripts.dashboards._shared import hit_ratio, preemptions, running_and_waiting, tokens
from scripts.dashboards._slo import Slo

ENGINE = 'instance=~"$instance", model_name=~"$model"'
CHOSEN = f"{{{ENGINE}}}"
MODEL = '{model_name=~"$model"}'
PARTS = {"gateway queue": ORANGE, "engine": BLUE, "rest": GREY}


def board(slo: Slo) -> Board:
    board = Board(
        "vllm-engine",
        "Engine",
        "vLLM from inside. Everything here is a replica's own page, new names or old (vLLM 0.6 to 0.33).",
        choices=(
            Choice("model", "model_name", "vllm:num_requests_running", "Model"),
            Choice("instance", "instance", "vllm:num_requests_running", "Replica"),
        ),
    )
    _requests(board)
    _latency(board)
    _cache(board, slo)
    _lengths(board)
    _process(board)
    gpu_row(board, 60)
    return board


def _requests(board: Board) -> None:
    board.row("Requests and tokens")
    reasons = graph(
        2,
        "Waiting, by reason",
        "capacity: no room in the batch or the KV cache. deferred: held back for a while, e.g. by a KV transfer.",
        Query(f"sum by (reason) (vllm:num_requests_waiting_by_reason{{{ENGINE}}})", "{{reason}}"),
        look=Look("short", 0, no_value="This engine does not tell reasons"),
        stacked=True,
        fixed=looks.WAITS,
        soft_max=5,
    )
    ended = graph(
        4,
        "Ended, by reason",
        "stop: the model's own end. length: max_tokens reached. Clients that left are never counted here.",
        Query(f"sum by (finished_reason) (rate(vllm:request_success_total{{{ENGINE}}}{RATE}))", "{{finished_reason}}"),
        look=looks.RATE,
        stacked=True,
        fixed=looks.ENDS,
    )
    board.line(8, (6, running_and_waiting(1, CHOSEN)), (6, reasons), (6, tokens(3, CHOSEN)), (6, ended))


def _latency(board: Board) -> None:
    board.row("Latency, as the engine sees it")
    first = graph(
        10,
        "Time to first token",
        "From reaching the engine to the first token; the gateway's queue is not in it.",
        *quantiles("vllm:time_to_first_token_seconds", CHOSEN),
        look=looks.SECONDS,
        runbook=link("TtftSloMissed"),
    )
    between = graph(
        11,
        "Time between tokens",
        "Inter-token latency of all answers. It rises with the batch, and when a long prefill is squeezed in.",
        *quantiles("vllm:inter_token_latency_seconds", CHOSEN, old="vllm:time_per_output_token_seconds"),
        look=looks.SECONDS,
        runbook=link("ItlSloMissed"),
    )
    whole = graph(
        12,
        "Whole request",
        "From reaching the engine to the last token.",
        *quantiles("vllm:e2e_request_latency_seconds", CHOSEN),
        look=looks.SECONDS,
    )
    queue = graph(
        13,
        "Wait to be scheduled",
        "In the engine's own queue. Near 0 while batch and KV cache have room.",
        *quantiles("vllm:request_queue_time_seconds", CHOSEN, old="vllm:time_in_queue_requests"),
        look=looks.SECONDS,
        runbook=link("EngineKvPressure"),
    )
    split = graph(
        14,
        "Where a request's time goes",
        "Means of five minutes: waiting in the gateway, in the engine, and the rest (the gateway's own work, the "
        "micro-batching window, the API server, the wire). A picture, not an account: merged requests share engine "
        "time.",
        Query('stack:request_seconds:mean5m{part!="total"}', "{{part}}"),
        look=Look("s", no_value="Nothing has ended in five minutes"),
        stacked=True,
        fixed=PARTS,
    )
    phases = graph(
        15,
        "Where the engine's time goes",
        "Means of what ended: queue, prefill, decode.",
        *(Query(mean(f"vllm:request_{part}_time_seconds", CHOSEN), part) for part in ("queue", "prefill", "decode")),
        look=Look("s", no_value="Nothing has ended"),
        stacked=True,
        fixed={"queue": ORANGE, "prefill": PURPLE, "decode": BLUE},
    )
    board.line(8, (6, first), (6, between), (6, whole), (6, queue))
    board.line(8, (12, split), (12, phases))


def _cache(board: Board, slo: Slo) -> None:
    board.row("KV cache and prefix cache")
    usage = graph(
        20,
        "KV cache usage",
        "Blocks that running requests hold. High is healthy; with requests waiting or preempted it is pressure. Cached "
        "blocks that nobody holds don't count.",
        Query(f"vllm:gpu_cache_usage_ratio{{{ENGINE}}}", "{{instance}} {{engine}}"),
        look=looks.SHARE,
        runbook=link("EngineKvPressure"),
    )
    source = graph(
        22,
        "Prompt tokens by source",
        "Computed here, found in the prefix cache, or fetched from elsewhere.",
        Query(
            f"sum by (source) (rate(vllm:prompt_tokens_by_source_total{{{ENGINE}}}{RATE})) > 0",
            "{{source}}",
        ),
        look=Look("suffix:tok/s", 0, no_value="This engine does not tell sources"),
        stacked=True,
        fixed={"local_compute": PURPLE, "local_cache_hit": GREEN},
    )
    board.line(8, (6, usage), (6, hit_ratio(21, slo, MODEL)), (6, source), (6, preemptions(23, CHOSEN)))


def _lengths(board: Board) -> None:
    board.row("What is asked")
    prompts = graph(
        30,
        "Prompt length",
        "Tokens of the prompts that ended.",
        *quantiles("vllm:request_prompt_tokens", CHOSEN),
        look=looks.COUNT,
    )
    answers = graph(
        31,
        "Answer length",
        "Tokens of the answers that ended.",
        *quantiles("vllm:request_generation_tokens", CHOSEN),
        look=looks.COUNT,
    )
    step = graph(
        32,
        "Tokens in a step",
        "How much work the engine does at once. Prefills make it large, decoding alone gives one token a request.",
        *quantiles("vllm:iteration_tokens_total", CHOSEN),
        look=looks.COUNT,
    )
    board.line(8, (8, prompts), (8, answers), (8, step))


def _process(board: Board) -> None:
    board.row("The engine itself")
    uptime = number(
        40,
        "Up since its counters began",
        "Time since the engine's counters started from 0, which they do at each start.",
        Query(f"min(time() - vllm:num_preemptions_created{{{ENGINE}}})"),
        look=Look("s", 0, no_value="not told"),
    )
    memory = graph(
        41,
        "Memory of the API server",
        "Resident memory of the process that serves /metrics. Not told with several API servers.",
        Query('process_resident_memory_bytes{job="engine", instance=~"$instance"}', "{{instance}}"),
        look=Look("bytes", 1, no_value="Not told with several API servers"),
    )
    cpu = graph(
        42,
        "Processor time of the API server",
        "Cores in use. At one core it is the limit of streaming, whatever the card could do.",
        Query(f'rate(process_cpu_seconds_total{{job="engine", instance=~"$instance"}}{RATE})', "{{instance}}"),
        look=Look("short", 2, no_value="Not told with several API servers"),
    )
    cache = listing(
        43,
        "Cache configuration",
        "What the engine made of its profile and the card (docs/verify.md).",
        Query('vllm:cache_config_info{instance=~"$instance"}'),
        columns=(
            Column("instance", "Replica", width=150),
            Column("block_size", "Block size"),
            Column("num_gpu_blocks", "Blocks"),
            Column("kv_cache_size_tokens", "Tokens"),
            Column("cache_dtype", "Type"),
            Column("enable_prefix_caching", "Prefixes"),
        ),
        look=Look("none"),
    )
    board.line(7, (4, uptime), (5, memory), (5, cpu), (10, cache))
