"""What an engine's own figures say about its limits. Pure: facts in, findings out.

High KV usage is what a pool is for. It limits only where requests wait for it or are preempted, and then the remedy is
more pool or fewer requests in it, never a smaller pool.
"""

import math

from gateway.facts import EngineFacts, Facts
from gateway.findings import Finding, count, listed, percent
from gateway.wording import several

HIGH = 0.85  # the usage that guides warn of
WAITING = 0.2  # of the readings must show someone waiting
MOST_UTILIZATION = 0.95
# Of one core: the API server's Python runs on one at a time (its interpreter lock), and above this it is always late.
API_BUSY = 0.85
STALLED_S = 60.0  # where the gateway's own setting is not known


def presence(facts: Facts) -> list[Finding]:
    """Engines that are away, hung, or silent about themselves."""
    found = []
    stall_s = facts.gateway.settings.get("stall_s", STALLED_S) if facts.gateway else STALLED_S
    hung = [engine for engine in facts.engines if engine.stalled_s >= stall_s and engine.ready is not True]
    idle = [e for e in facts.engines if e not in hung and (e.ready is False or (e.ready is None and not e.seen))]
    if idle or not facts.engines:
        found.append(_absent(idle, len(facts.engines)))
    if hung:
        found.append(
            Finding(
                "engine_hung",
                f"An engine has work and makes no progress: {listed([engine.name for engine in hung])}.",
                f"No token for {count(max(engine.stalled_s for engine in hung))} s, whatever its /health says.",
                "Restart it: docker compose restart engine. Its container's watchdog does so by itself.",
                {"stalled_s": max(engine.stalled_s for engine in hung)},
            )
        )
    if blind := [engine for engine in facts.engines if engine.seen and not engine.stats]:
        found.append(
            Finding(
                "stats_off",
                f"The engine exports no figures of its own: {listed([engine.name for engine in blind])}.",
                "Its page has no vllm: series, so nothing about its cache, queue or pace can be judged.",
                "Take disable-log-stats out of the engine's profile; it saves nothing worth having.",
                {"engines": len(blind)},
            )
        )
    return found


def _absent(idle: list[EngineFacts], engines: int) -> Finding:
    """`idle` take no requests: they are away or loading, or were drained by an order, or there is none at all."""
    drained = sum(engine.drained for engine in idle)
    absent = len(idle) - drained
    names = [f"{engine.name} (drained)" if engine.drained else engine.name for engine in idle]
    changes = []
    if absent or not idle:
        changes.append(
            "See the engine's log (make logs SERVICE=engine) and `make doctor`; one that loads a model needs time."
        )
    if drained:
        changes.append("One that was drained stays so until it is ordered back (docs/replicas.md).")
    return Finding(
        "engine_absent",
        f"Not every engine takes requests: {listed(names) or 'no engine at all'}.",
        f"Of {several(engines, 'engine')} {absent} away or not warm yet, {drained} drained by an order.",
        " ".join(changes),
        {"absent": absent, "drained": drained, "engines": engines},
    )


def kv_cache(engine: EngineFacts) -> list[Finding]:
    """Pressure on the KV pool; or a full one that is as it should be."""
    usage = engine.usage_max
    if usage is None:
        return []
    if engine.pressed_share >= WAITING or engine.preemptions:
        return [_pressure(engine, usage)]
    if usage >= HIGH and engine.held_share < WAITING:
        return [
            Finding(
                "kv_full_healthy",
                f"The KV cache of {engine.name} is well used, and that is healthy.",
                f"Up to {percent(usage)} of its {_pool(engine)} in use; nothing waits for it, nothing was preempted.",
                "Nothing: leave gpu-memory-utilization as it is. Act when requests wait or are preempted.",
                {"usage_max": usage, "preemptions": 0},
            )
        ]
    return []


def _pressure(engine: EngineFacts, usage: float) -> Finding:
    wanted = engine.running_mean + engine.waiting_mean
    numbers: dict[str, float | None] = {
        "usage_max": usage,
        "waiting_mean": engine.waiting_mean,
        "preemptions": engine.preemptions,
        "pool_tokens": engine.pool_tokens,
        "request_tokens": engine.request_tokens,
    }
    factor = None
    if engine.pool_tokens and engine.request_tokens and wanted:
        factor = max(1.1, wanted * engine.request_tokens / engine.pool_tokens)
        numbers["pool_factor"] = factor
    changes = [*_more_pool(engine, factor, numbers), *_less_in_it(engine, numbers)]
    replicas = max(2, math.ceil(factor or 2))
    changes.append(f"add a replica ({replicas} engines hold what is asked for now)")
    numbers["replicas"] = replicas
    preempted = several(engine.preemptions, "preemption", count(engine.preemptions))
    return Finding(
        "kv_pressure",
        f"The KV cache of {engine.name} is too small for what runs at once.",
        f"{preempted}, {count(engine.waiting_mean)} requests "
        f"waiting on average, up to {percent(usage)} of its {_pool(engine)} in use.",
        "In this order: " + "; ".join(changes) + ".",
        numbers,
    )


def _more_pool(engine: EngineFacts, factor: float | None, numbers: dict[str, float | None]) -> list[str]:
    found = []
    if engine.blocks_override:
        found.append(f"take num-gpu-blocks-override ({engine.blocks_override:,}) out of the profile")
    elif engine.pool_bytes:
        wanted = math.ceil(engine.pool_bytes * (factor or 1.5) / (1 << 20))
        numbers["kv_cache_mib"] = wanted
        found.append(f"raise kv-cache-memory-bytes from {engine.pool_bytes >> 20:,}M to {wanted:,}M, if it is there")
    elif engine.utilization is not None and engine.utilization < MOST_UTILIZATION:
        higher = min(MOST_UTILIZATION, engine.utilization + 0.03)
        numbers["gpu_memory_utilization"] = higher
        found.append(
            f"raise gpu-memory-utilization from {engine.utilization:g} to {higher:g} (make plan says if it fits)"
        )
    if engine.cache_dtype in ("auto", "bfloat16", "float16") and engine.pool_tokens:
        numbers["fp8_pool_tokens"] = 2 * engine.pool_tokens
        found.append(
            f"kv-cache-dtype fp8 where the card has a kernel: {2 * engine.pool_tokens:,} tokens in the same memory"
        )
    return found


def _less_in_it(engine: EngineFacts, numbers: dict[str, float | None]) -> list[str]:
    if not engine.pool_tokens or not engine.request_tokens:
        return ["lower max-num-seqs, so that what runs is not preempted"]
    fit = max(1, int(min(engine.pool_tokens / engine.request_tokens, engine.running_mean)))
    numbers["max_num_seqs"] = fit
    return [f"lower max-num-seqs to {fit}, since a request takes {count(engine.request_tokens)} tokens"]


def _pool(engine: EngineFacts) -> str:
    return f"{engine.pool_tokens:,} tokens" if engine.pool_tokens else "pool"


def slots(engine: EngineFacts) -> list[Finding]:
    """Requests wait in the engine although its KV pool has room."""
    if engine.usage_max is None or engine.held_share < max(WAITING, engine.pressed_share) or engine.preemptions:
        return []
    most = int(engine.running_max)
    numbers: dict[str, float | None] = {"running_max": most, "waiting_mean": engine.waiting_mean}
    numbers["usage_max"] = engine.usage_max
    room = most / engine.usage_max if engine.usage_max > 0 else 0.0
    numbers["fit"] = int(room)
    return [
        Finding(
            "engine_slots",
            f"{engine.name} runs no more requests at once than it is allowed to, and has room for more.",
            f"{count(engine.waiting_mean)} requests wait on average while at most {most} run and at most "
            f"{percent(engine.usage_max)} of the KV cache is in use.",
            f"Raise max-num-seqs above {most}: the cache holds about {int(room):,} such requests. If {most} is below "
            "max-num-seqs already, long prefills hold the others up: raise max-num-batched-tokens instead.",
            numbers,
        )
    ]


def api_server(engine: EngineFacts, facts: Facts) -> list[Finding]:
    """The API server's one Python core is full: tokens wait in it, not in the engine."""
    if engine.api_cores is None or engine.api_cores < API_BUSY or not engine.generation_tokens or facts.seconds <= 0:
        return []
    streams = facts.gateway.streams if facts.gateway else None
    per_s = engine.generation_tokens / facts.seconds
    second = "api-server-count: 2 (a stop then cuts off what is in flight: drain the engine first)"
    if streams == 0:
        change = f"Start it with {second}. Nothing is streamed, so stream-interval would change nothing."
    else:
        change = (
            f"Set stream-interval: 8 in its profile (an event of a stream then carries up to 8 tokens), or {second}. "
            "On an H200 with 256 chats in flight both gave 67 % more answers a second where prompts were short, 30 % "
            "where they were long and new."
        )
    return [
        Finding(
            "api_server_bound",
            f"The API server of {engine.name} limits, not the engine behind it.",
            f"Its process takes {engine.api_cores:.2f} cores, of the one Python can use, for {count(per_s)} tokens "
            "a second.",
            change,
            {"api_cores": engine.api_cores, "tokens_per_s": per_s, "streams": streams},
        )
    ]
