"""What fits: KV cache tokens, requests of the present kind, headroom, and what runs out first."""

from __future__ import annotations

from scripts.dashboards import _looks as looks
from scripts.dashboards._board import Board
from scripts.dashboards._gpu import gpu_memory
from scripts.dashboards._panels import (
    BLUE,
    GREEN,
    ORANGE,
    RED,
    YELLOW,
    Column,
    Look,
    Query,
    bars,
    graph,
    listing,
    note,
    number,
)
from scripts.dashboards._queries import RATE
from scripts.dashboards._runbooks import link
from scripts.dashboards._shared import queued_tokens

SIZES = (512, 1024, 2048, 4096, 8192)
# A request's mean size in the time shown: what admission reckons with is an estimate, this is what it became.
_PROMPT = (
    "sum(increase(vllm:request_prompt_tokens_sum[$__range]))"
    " / (sum(increase(vllm:request_prompt_tokens_count[$__range])) > 0)"
)
_ANSWER = (
    "sum(increase(vllm:request_generation_tokens_sum[$__range]))"
    " / (sum(increase(vllm:request_generation_tokens_count[$__range])) > 0)"
)
_POOL = "(sum(gateway_capacity_tokens) > 0)"


def board() -> Board:
    board = Board(
        "vllm-capacity",
        "Capacity",
        "What would fit: the KV cache in tokens and in requests, how much of it is used, and what runs out first.",
        since="now-6h",
    )
    _fits(board)
    _used(board)
    _limits(board)
    _machine(board)
    return board


def _fits(board: Board) -> None:
    board.row("What fits")
    pool = number(
        1,
        "KV cache",
        "Tokens that all ready engines hold at once, as they tell it. max-model-len does not change it; "
        "gpu-memory-utilization and an fp8 KV cache do.",
        Query(_POOL),
        look=Look("short", 1, no_value="no engine"),
    )
    longest = number(
        2,
        "Longest requests",
        "How many requests of max_model_len tokens fit at once, all engines together, as each told it at its start.",
        Query("vllm:cache_config_info"),
        look=Look("short", 1, no_value="not told"),
        label="kv_cache_max_concurrency",
        total=True,
    )
    mean = number(
        3,
        "Mean request",
        "Prompt and answer of the requests that ended in the time shown.",
        Query(f"({_PROMPT}) + ({_ANSWER})"),
        look=Look("suffix:tok", 0, no_value="idle"),
    )
    present = number(
        4,
        "Requests of that size",
        "How many of them the KV cache holds at once. A shared prefix takes its blocks once, so more may fit.",
        Query(f"floor({_POOL} / (({_PROMPT}) + ({_ANSWER})))"),
        look=Look("short", 0, no_value="idle"),
    )
    free = number(
        5,
        "Room at the fullest moment",
        "What running requests left of the KV cache at the highest point of the time shown.",
        Query("1 - max(max_over_time(vllm:gpu_cache_usage_ratio[$__range]))"),
        look=Look(
            "percentunit", 0, steps=((None, ORANGE), (0.1, YELLOW), (0.3, GREEN)), maximum=1, no_value="no engine"
        ),
        runbook=link("EngineKvPressure"),
    )
    peak = number(
        6,
        "Fastest five minutes",
        "Generated tokens a second, the most of the time shown.",
        Query("max(max_over_time(model:generation_tokens:rate5m[$__range]))"),
        look=Look("suffix:tok/s", 0, no_value="idle"),
    )
    board.line(4, (4, pool), (4, longest), (4, mean), (4, present), (4, free), (4, peak))
    fits = bars(
        7,
        "Requests that fit, by size",
        "The KV cache divided by the size of a request, prompt and answer together, in tokens. Above max_model_len no "
        "request is taken, and max-num-seqs may allow fewer.",
        *(Query(f"floor({_POOL} / {size})", f"{size} tokens") for size in SIZES),
        look=Look("short", 0, no_value="No engine"),
    )
    engines = listing(
        8,
        "Engines",
        "What each made of its profile and its card: the KV cache in blocks and tokens, and how many requests of "
        "max_model_len it holds.",
        Query("vllm:cache_config_info"),
        columns=(
            Column("instance", "Replica", width=150),
            Column("num_gpu_blocks", "Blocks", looks.COUNT, number=True),
            Column("block_size", "Block", looks.COUNT, number=True),
            Column("kv_cache_size_tokens", "Tokens", looks.COUNT, number=True),
            Column("kv_cache_max_concurrency", "Longest", looks.PLAIN, number=True),
            Column("cache_dtype", "KV type"),
        ),
        look=Look("none", no_value="No engine"),
    )
    more = note(
        9,
        "To hold more",
        "The ways to more room, with the least harmful first.",
        "Only when requests wait or are preempted; a full cache alone is healthy.\n\n"
        "1. `gpu-memory-utilization` up, if nothing else needs the card\n"
        "2. `kv-cache-dtype: fp8` holds twice the tokens; check the answers\n"
        "3. `max-num-seqs` down: fewer at once, fewer preempted\n"
        "4. another replica\n\n"
        "`make plan` reckons each before it is tried.",
    )
    board.line(8, (8, fits), (9, engines), (7, more))


def _used(board: Board) -> None:
    board.row("What is used")
    held = graph(
        11,
        "KV cache held by running requests",
        "In tokens, against what there is.",
        Query(f"avg(vllm:gpu_cache_usage_ratio) * {_POOL}", "held", BLUE),
        Query(_POOL, "capacity", RED, dashed=True),
        look=looks.TOKENS,
        runbook=link("EngineKvPressure"),
    )
    rate = graph(
        12,
        "Throughput and concurrency",
        "Generated tokens a second (left), and the requests that run (right), means of the same time: when the second "
        "grows and the first does not, the engine is at its end.",
        Query(f"sum(rate(vllm:generation_tokens_total{RATE}))", "generated", GREEN),
        Query("avg_over_time(sum(vllm:num_requests_running)[$__rate_interval:])", "running", BLUE, unit="short"),
        look=looks.TOKENS_RATE,
    )
    board.line(8, (8, queued_tokens(10)), (8, held), (8, rate))


def _limits(board: Board) -> None:
    board.row("What ran out, in the time shown")
    waiting = number(
        20,
        "Time with a queue in the engine",
        "Share of the time in which an engine had requests waiting: batch or KV cache were full.",
        Query("avg_over_time((sum(vllm:num_requests_waiting) > bool 0)[$__range:15s])"),
        look=Look(
            "percentunit", 0, steps=((None, GREEN), (0.1, YELLOW), (0.5, ORANGE)), maximum=1, no_value="no engine"
        ),
    )
    queue = number(
        21,
        "Time with a queue at the gateway",
        "Share of the time in which requests waited for admission.",
        Query("avg_over_time((sum(gateway_queued_requests) > bool 0)[$__range:15s])"),
        look=Look(
            "percentunit", 0, steps=((None, GREEN), (0.1, YELLOW), (0.5, ORANGE)), maximum=1, no_value="no gateway"
        ),
        runbook=link("GatewayQueueSaturated"),
    )
    preempted = number(
        22,
        "Preemptions",
        "Requests that lost their KV blocks to others and were computed again.",
        Query("sum(increase(vllm:num_preemptions_total[$__range]))"),
        look=looks.MISHAPS,
        runbook=link("EnginePreemptions"),
    )
    shed = number(
        23,
        "Refused for want of room",
        "Requests that overload turned away; the keys' own limits are not in it.",
        Query('sum(increase(gateway_shed_total{cause!~"key_.*|no_engine"}[$__range])) or vector(0)'),
        look=looks.MISHAPS,
        runbook=link("GatewayShedding"),
    )
    board.line(4, (6, waiting), (6, queue), (6, preempted), (6, shed))


def _machine(board: Board) -> None:
    board.row("The machine, where the exporters run")
    memory = graph(
        30,
        "Memory available",
        "Share of the host's memory that programs could still get.",
        Query("host:memory_available:ratio", "{{instance}}"),
        look=Look("percentunit", maximum=1, no_value="No node exporter"),
        runbook=link("HostMemoryLow"),
    )
    disk = graph(
        31,
        "Disk free",
        "Share of each file system that is free to use. Models, caches and Prometheus's data fill them.",
        Query("host:filesystem_avail:ratio", "{{mountpoint}}"),
        look=Look("percentunit", maximum=1, no_value="No node exporter"),
        runbook=link("HostDiskFilling"),
    )
    card = gpu_memory(32, "What is not the engine's share is what gpu-memory-utilization could still take.")
    board.line(7, (8, memory), (8, disk), (8, card))
