"""An engine's /metrics page, whatever its version, in one form. Pure; vLLM 0.6 to 0.33.

- usage      `kv_cache_usage_perc` (from 0.9), before `gpu_cache_usage_perc`
- prefix     counters `prefix_cache_*_total` (from 0.9, tokens), before `gpu_prefix_cache_*_total` (V1; blocks up to
             0.8, tokens later); V0 has a gauge `gpu_prefix_cache_hit_rate` alone, -1 where prefix caching is off
- blocks     V1 of 0.8 reports num_gpu_blocks="None": they are known to another of its processes
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from scripts.checks.proof import ProofError

USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
QUERIES = ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total")
HITS = ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total")
HIT_RATE = "vllm:gpu_prefix_cache_hit_rate"
CONFIG = "vllm:cache_config_info"


@dataclass(frozen=True)
class Scrape:
    """None: this release does not say. Several engines behind one port are summed; `usage` is then their mean.

    blocks and tokens are the pool's, of all engines. hit_rate: V0's gauge, -1 = prefix caching is off.
    """

    engines: int
    running: float
    waiting: float
    usage: float | None
    usage_name: str | None
    queries: float | None
    hits: float | None
    hits_name: str | None
    hit_rate: float | None
    block_size: int | None
    blocks: int | None
    tokens: int | None
    cache_dtype: str | None
    prefix_caching: bool | None
    pool_bytes: int | None
    speculative: bool

    @property
    def idle(self) -> bool:
        return self.running == 0 and self.waiting == 0


def parse_scrape(page: str, where: str = "the page") -> Scrape:
    """Raises ProofError for a page that is not a vLLM engine's."""
    try:
        samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    except ValueError as error:
        raise ProofError(f"{where} is no metrics page: {error}") from None
    by_name: dict[str, list[Sample]] = {}
    for sample in samples:
        by_name.setdefault(sample.name, []).append(sample)
    if not any(name.startswith("vllm:") for name in by_name):
        raise ProofError(
            f"{where} is not a vLLM engine's page (no vllm: series): give the engine's own address, and start it "
            "without --disable-log-stats"
        )
    configs = [sample.labels for sample in by_name.get(CONFIG, [])]
    usage_name, usage = _first(by_name, USAGE)
    _, queries = _first(by_name, QUERIES)
    hits_name, hits = _first(by_name, HITS)
    caching = {labels.get("enable_prefix_caching") for labels in configs} & {"True", "False"}
    return Scrape(
        engines=max(len(usage), 1),
        running=_sum(by_name.get("vllm:num_requests_running", [])),
        waiting=_sum(by_name.get("vllm:num_requests_waiting", [])),
        usage=_sum(usage) / len(usage) if usage else None,
        usage_name=usage_name,
        queries=_sum(queries) if queries else None,
        hits=_sum(hits) if hits else None,
        hits_name=hits_name,
        hit_rate=by_name[HIT_RATE][0].value if HIT_RATE in by_name else None,
        block_size=_int(configs[0], "block_size") if configs else None,
        blocks=_total(configs, "num_gpu_blocks"),
        tokens=_total(configs, "kv_cache_size_tokens"),
        cache_dtype=configs[0].get("cache_dtype") if configs else None,
        prefix_caching=None if not caching else caching == {"True"},
        pool_bytes=_total(configs, "kv_cache_memory_bytes"),
        speculative=any(name.startswith("vllm:spec_decode") for name in by_name),
    )


def _first(by_name: Mapping[str, list[Sample]], names: Iterable[str]) -> tuple[str | None, list[Sample]]:
    """New or old: a release that exports both means the same by both."""
    return next(((name, by_name[name]) for name in names if name in by_name), (None, []))


def _sum(samples: Iterable[Sample]) -> float:
    return sum(sample.value for sample in samples)


def _int(labels: Mapping[str, str], key: str) -> int | None:
    text = labels.get(key, "")
    return int(text) if text.isdecimal() else None


def _total(configs: list[dict[str, str]], key: str) -> int | None:
    numbers = [_int(labels, key) for labels in configs]
    known = [number for number in numbers if number is not None]
    return sum(known) if known and len(known) == len(numbers) else None
