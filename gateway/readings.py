"""From metrics pages to facts. Pure: samples of one moment make a reading, readings of one window make `Facts`.

It does not matter where the samples come from: this process's own registry, a page that was scraped, or Prometheus.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

from prometheus_client.parser import text_string_to_metric_families

from gateway.engine_metrics import MOST_TOKENS
from gateway.facts import FULL, EngineFacts, Facts, GatewayFacts


class Sampled(Protocol):
    """A sample as prometheus_client has it."""

    @property
    def name(self) -> str: ...
    @property
    def labels(self) -> Mapping[str, str]: ...
    @property
    def value(self) -> float: ...


class Sample(NamedTuple):
    name: str
    labels: Mapping[str, str]
    value: float


# New names before old ones; a release that exports both means the same by both.
_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
_QUERIES = ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total")
_HITS = ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total")
_CPU = "process_cpu_seconds_total"
_STARTED = "process_start_time_seconds"
_CONFIG = "vllm:cache_config_info"
_ENGINE_SUMS = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:num_preemptions_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
    *_QUERIES,
    *_HITS,
    _CPU,
    _STARTED,
)
ENGINE_SERIES = frozenset({*_ENGINE_SUMS, *_USAGE, _CONFIG})

# What is read of the gateway's own page: series -> the label it is kept apart by, "" for none.
_GATEWAY_BY = {
    "gateway_requests_total": "tenant",
    "gateway_tokens_total": "tenant",
    "gateway_deadline_shed_total": "",
    "gateway_queue_seconds_sum": "",
    "gateway_queue_seconds_count": "",
    "gateway_queued_requests": "",
    "gateway_in_flight_requests": "",
    "gateway_in_flight_tokens": "",
    "gateway_capacity_tokens": "",
    "gateway_microbatch_wait_seconds_sum": "",
    "gateway_microbatch_wait_seconds_count": "",
    "gateway_merged_requests_total": "",
    "gateway_time_to_first_token_seconds_count": "",
    "gateway_replica_ready": "replica",
    "gateway_replica_drained": "replica",
    "gateway_replica_stalled_seconds": "replica",
    "gateway_setting": "name",
}
_PREFIX, _SHED = "gateway_prefix_tokens_total", "gateway_shed_total"
GATEWAY_SERIES = frozenset({*_GATEWAY_BY, _PREFIX, _SHED})

Key = tuple[str, ...]
Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class EngineReading:
    values: Mapping[str, float]
    config: Mapping[str, str] = field(default_factory=dict)
    stats: bool = True


@dataclass(frozen=True, slots=True)
class Reading:
    """One moment. Engines by host:port; one that is missing could not be read."""

    at_s: float
    engines: Mapping[str, EngineReading]
    gateway: Mapping[Key, float] | None = None


def samples_of(page: str, wanted: frozenset[str]) -> Iterator[Sampled]:
    """The wanted samples of a page of text. Raises ValueError for a line that can't be read."""
    # Only these lines are parsed: a whole page costs milliseconds.
    lines = [line for line in page.splitlines() if line.partition("{")[0].partition(" ")[0] in wanted]
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        yield from family.samples


def read_engine(samples: Iterable[Sampled]) -> EngineReading:
    """Several engines behind one port are summed; usage is then the fullest one's, and a pool all of theirs."""
    values: dict[str, float] = defaultdict(float)
    configs: list[Mapping[str, str]] = []
    for sample in samples:
        if sample.name == _CONFIG:
            configs.append(sample.labels)
        elif not math.isfinite(sample.value):
            continue
        elif sample.name in _USAGE:
            values[sample.name] = max(values[sample.name], sample.value)
        elif sample.name in _ENGINE_SUMS:
            values[sample.name] += sample.value
    config = dict(configs[0]) if configs else {}
    for key in ("kv_cache_size_tokens", "num_gpu_blocks"):
        if all(labels.get(key, "").isdecimal() for labels in configs) and configs:
            config[key] = str(sum(int(labels[key]) for labels in configs))
    if _QUERIES[0] not in values and config.get("block_size", "").isdecimal():
        for name in {_QUERIES[1], _HITS[1]} & values.keys():  # releases with these names alone (0.7, 0.8) count blocks
            values[name] *= int(config["block_size"])
    return EngineReading(dict(values), config, any(name.startswith("vllm:") for name in values))


def read_gateway(samples: Iterable[Sampled]) -> dict[Key, float]:
    values: dict[Key, float] = defaultdict(float)
    for sample in samples:
        labels = sample.labels
        if sample.name == _PREFIX:
            values[_PREFIX, labels["tenant"], labels["outcome"]] += sample.value
        elif sample.name == _SHED:
            values[_SHED, labels["tenant"], labels["cause"]] += sample.value
        elif (by := _GATEWAY_BY.get(sample.name)) is not None:
            values[(sample.name, labels.get(by, "")) if by else (sample.name,)] += sample.value
    return dict(values)


def place(url: str) -> str:
    """host:port of a base URL: what Prometheus calls an instance."""
    return url.partition("://")[2].partition("/")[0] or url


def facts(readings: Sequence[Reading]) -> Facts:
    """Readings in the order of time, at least one. What fell in between began anew: a restart, not a loss."""
    first, last = readings[0], readings[-1]
    gateways = [reading.gateway for reading in readings if reading.gateway is not None]
    gateway = _gateway(gateways) if last.gateway is not None else None
    names = sorted({name for reading in readings for name in reading.engines} | _replicas(gateways))
    engines = tuple(_engine(name, readings, gateways) for name in names)
    return Facts(last.at_s - first.at_s, gateway, engines)


def _gain(values: Sequence[float]) -> float:
    return sum(after - before if after >= before else after for before, after in itertools.pairwise(values))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _replicas(gateways: Sequence[Mapping[Key, float]]) -> set[str]:
    return {place(key[1]) for values in gateways[-1:] for key in values if key[0] == "gateway_replica_ready"}


def _began_anew(gateways: Sequence[Mapping[Key, float]]) -> bool:
    """Whether the gateway restarted within the window: then every pair of readings counts, at many times the cost."""
    counts = [values.get(("gateway_queue_seconds_count",), 0.0) for values in gateways]
    return any(after < before for before, after in itertools.pairwise(counts))


def _gateway(gateways: Sequence[Mapping[Key, float]]) -> GatewayFacts:
    first, last = gateways[0], gateways[-1]
    anew = _began_anew(gateways)

    def gain_of(key: Key) -> float:
        """A series that was not there yet stood at 0."""
        if anew:
            return _gain([values.get(key, 0.0) for values in gateways])
        return last[key] - first.get(key, 0.0)

    def gained(name: str, part: int = 1) -> dict[str, float]:
        """Gains of one series by the label at `part`."""
        found: dict[str, float] = defaultdict(float)
        for key in last:
            if key[0] == name and (gain := gain_of(key)):
                found[key[part] if part < len(key) else ""] += gain
        return dict(found)

    def total(name: str) -> float:
        return sum(gained(name).values())

    def gauge(name: str) -> list[float]:
        return [values.get((name,), 0.0) for values in gateways]

    prefix: dict[str, dict[str, float]] = defaultdict(dict)
    for key in last:
        if key[0] == _PREFIX and (gain := gain_of(key)):
            prefix[key[1]][key[2]] = gain
    queued = gauge("gateway_queued_requests")
    return GatewayFacts(
        requests=gained("gateway_requests_total"),
        tokens=gained("gateway_tokens_total"),
        shed=gained(_SHED, 2),
        shed_of=gained(_SHED),
        deadline_shed=total("gateway_deadline_shed_total"),
        queue_waits=total("gateway_queue_seconds_count"),
        queue_wait_s=total("gateway_queue_seconds_sum"),
        queued_mean=_mean(queued),
        queued_max=max(queued),
        in_flight_max=max(gauge("gateway_in_flight_requests")),
        in_flight_tokens_max=max(gauge("gateway_in_flight_tokens")),
        capacity_tokens=gauge("gateway_capacity_tokens")[-1],
        window_waits=total("gateway_microbatch_wait_seconds_count"),
        window_wait_s=total("gateway_microbatch_wait_seconds_sum"),
        merged=total("gateway_merged_requests_total"),
        streams=total("gateway_time_to_first_token_seconds_count"),
        prefix=dict(prefix),
        settings={key[1]: value for key, value in last.items() if key[0] == "gateway_setting"},
    )


def _engine(name: str, readings: Sequence[Reading], gateways: Sequence[Mapping[Key, float]]) -> EngineFacts:
    pages = [(r.at_s, r.engines[name]) for r in readings if name in r.engines]
    seen = name in readings[-1].engines
    ready, drained, stalled_s = _as_replica(name, gateways)
    if not pages:
        return EngineFacts(name, seen=False, ready=ready, drained=drained, stalled_s=stalled_s)
    last, config = pages[-1][1], pages[-1][1].config

    def series(*names: str) -> list[float] | None:
        chosen = next((n for n in names if n in last.values), None)
        return None if chosen is None else [page.values[chosen] for _, page in pages if chosen in page.values]

    def gained(*names: str) -> float:
        return _gain(series(*names) or [0.0])

    def optional(*names: str) -> float | None:
        return None if series(*names) is None else gained(*names)

    running = series("vllm:num_requests_running") or [0.0]
    waiting = series("vllm:num_requests_waiting") or [0.0]
    usage = series(*_USAGE)
    together = list(zip(waiting, usage or (), strict=False))
    started = series(_STARTED) or []
    prompts = series("vllm:prompt_tokens_total") or []
    elapsed_s = pages[-1][0] - pages[0][0]
    cpu = series(_CPU)
    return EngineFacts(
        name,
        seen=seen,
        stats=last.stats,
        ready=ready,
        drained=drained,
        stalled_s=stalled_s,
        running_mean=_mean(running),
        running_max=max(running),
        waiting_mean=_mean(waiting),
        pressed_share=_mean([float(value > 0 and held >= FULL) for value, held in together]),
        held_share=_mean([float(value > 0 and held < FULL) for value, held in together]),
        usage_mean=None if usage is None else _mean(usage),
        usage_max=None if usage is None else max(usage),
        preemptions=gained("vllm:num_preemptions_total"),
        prompt_tokens=_gain(prompts),
        generation_tokens=gained("vllm:generation_tokens_total"),
        requests=gained("vllm:request_success_total"),
        queries=optional(*_QUERIES),
        hits=optional(*_HITS),
        api_cores=None if cpu is None or elapsed_s <= 0 else _gain(cpu) / elapsed_s,
        restarted=len(set(started)) > 1 or any(b < a for a, b in itertools.pairwise(prompts)),
        block_size=_known(config, "block_size", int),
        pool_tokens=_pool_tokens(config),
        pool_bytes=_known(config, "kv_cache_memory_bytes", int),
        cache_dtype=config.get("cache_dtype"),
        utilization=_known(config, "gpu_memory_utilization", float),
        prefix_caching={"True": True, "False": False}.get(config.get("enable_prefix_caching", "")),
        blocks_override=_known(config, "num_gpu_blocks_override", int),
    )


def _as_replica(name: str, gateways: Sequence[Mapping[Key, float]]) -> tuple[bool | None, bool, float]:
    """Ready, drained by an order, and stalled seconds, as the gateway says at the window's end."""
    told = {
        key[0]: value
        for values in gateways[-1:]
        for key, value in values.items()
        if key[0].startswith("gateway_replica_") and place(key[1]) == name
    }
    ready = told.get("gateway_replica_ready")
    drained = told.get("gateway_replica_drained", 0.0) > 0
    return None if ready is None else ready > 0, drained, told.get("gateway_replica_stalled_seconds", 0.0)


def _pool_tokens(config: Mapping[str, str]) -> int | None:
    if (told := _known(config, "kv_cache_size_tokens", int)) is not None:
        return told
    blocks, size = _known(config, "num_gpu_blocks", int), _known(config, "block_size", int)
    return blocks * size if blocks and size else None


def _known(config: Mapping[str, str], key: str, kind: Callable[[str], Number]) -> Number | None:
    """None as well where it can't be true: advice is arithmetic on these."""
    try:
        value = kind(config.get(key, ""))
    except ValueError:
        return None
    return value if 0 <= value <= MOST_TOKENS else None
