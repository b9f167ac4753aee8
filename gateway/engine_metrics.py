"""What is read off an engine's /metrics page. Pure; vLLM 0.6 to 0.33."""

import math
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

MOST_TOKENS = 10**15  # of a KV cache, or a block of it: a figure above it is damage, and arithmetic would fail on it


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """`tokens` None: the page has no such counters (the engine's stats are off, or it is no vLLM)."""

    running: float = 0
    waiting: float = 0
    tokens: float | None = None
    capacity_tokens: int | None = None
    block_size: int | None = None  # tokens
    prefix_caching: bool = False
    started_s: float | None = None  # Unix time; several API servers don't tell it


_WANTED = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting{",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:cache_config_info",
    "process_start_time_seconds",
)


def read_engine_metrics(page: str) -> EngineFigures:
    """Pick the few figures out of a scrape; several engines behind one port are summed. Garbage is no figures."""
    # Parsing the whole page costs milliseconds of the event loop; five series do not.
    lines = "\n".join(line for line in page.splitlines() if line.startswith(_WANTED)) + "\n"
    running = waiting = tokens = 0.0
    seen_tokens = False
    capacity = 0
    block_size: int | None = None
    prefix_caching = False
    started_s: float | None = None
    try:
        for family in text_string_to_metric_families(lines):
            for sample in family.samples:
                if not math.isfinite(sample.value):
                    continue
                if sample.name == "vllm:num_requests_running":
                    running += sample.value
                elif sample.name == "vllm:num_requests_waiting":
                    waiting += sample.value
                elif sample.name in ("vllm:prompt_tokens_total", "vllm:generation_tokens_total"):
                    tokens += sample.value
                    seen_tokens = True
                elif sample.name == "vllm:cache_config_info":
                    capacity += _capacity(sample.labels)
                    block_size = _whole(sample.labels.get("block_size", "")) or block_size
                    prefix_caching = sample.labels.get("enable_prefix_caching") == "True"
                elif sample.name == "process_start_time_seconds":
                    started_s = sample.value
    except ValueError:  # the parser's word for a line it can't read
        return EngineFigures()
    seen = tokens if seen_tokens else None
    return EngineFigures(running, waiting, seen, capacity or None, block_size, prefix_caching, started_s)


def _capacity(labels: dict[str, str]) -> int:
    """KV cache size in tokens: told outright by newer versions, blocks times block size by all."""
    told = _whole(labels.get("kv_cache_size_tokens", ""))
    if told is None:
        told = (_whole(labels.get("num_gpu_blocks", "")) or 0) * (_whole(labels.get("block_size", "")) or 0)
    return told if told <= MOST_TOKENS else 0


def _whole(text: str) -> int | None:
    return number if text.isdecimal() and (number := int(text)) <= MOST_TOKENS else None
