"""Compares a plan with what a running engine reports of itself (vllm:cache_config_info)."""

from collections.abc import Mapping
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

from scripts.planner import PlanError

SERIES = "vllm:cache_config_info"


@dataclass(frozen=True)
class Report:
    """max_model_len: None where /v1/models wants a key. utilization: None on builds whose pool is set otherwise."""

    blocks: int
    block_size: int
    cache_dtype: str
    tokens: int
    utilization: float | None
    kv_cache_bytes: int | None
    max_model_len: int | None
    model: str | None


def fetch_report(url: str, client: httpx.Client) -> Report:
    """Raises PlanError for an unreachable server, or a page that is not a vLLM engine's."""
    base = url.rstrip("/").removesuffix("/metrics")
    labels = cache_labels(_get(client, f"{base}/metrics").text, base)
    entry = _served_model(client, base)
    block_size, blocks = _int(labels, "block_size"), _int(labels, "num_gpu_blocks")
    if block_size < 1 or blocks < 1:
        raise PlanError(
            f"{base}: the engine reports {blocks} blocks of {block_size} tokens, so there is no cache to check"
        )
    return Report(
        blocks=blocks,
        block_size=block_size,
        cache_dtype=labels.get("cache_dtype", "auto"),
        tokens=_int(labels, "kv_cache_size_tokens", blocks * block_size),
        utilization=_float(labels, "gpu_memory_utilization"),
        kv_cache_bytes=_optional_int(labels, "kv_cache_memory_bytes"),
        max_model_len=entry[1],
        model=entry[0],
    )


def cache_labels(page: str, where: str) -> Mapping[str, str]:
    """The labels of the first engine's cache configuration on a metrics page."""
    try:
        samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    except ValueError as error:
        raise PlanError(f"{where}/metrics is not a metrics page: {error}") from None
    for sample in samples:
        if sample.name == SERIES:
            return sample.labels
    if any(sample.name.startswith("vllm:") for sample in samples):
        raise PlanError(f"{where}/metrics has no {SERIES}: the engine is still starting, or is too old to report it")
    raise PlanError(
        f"{where}/metrics is not a vLLM engine's page (no vllm: series): give the engine's own address, and start it "
        "without --disable-log-stats"
    )


def _get(client: httpx.Client, url: str) -> httpx.Response:
    try:
        response = client.get(url)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise PlanError(f"{url} cannot be read: {error or type(error).__name__}") from None
    if response.status_code != httpx.codes.OK:
        raise PlanError(f"{url} answered {response.status_code}, expected 200")
    return response


def _served_model(client: httpx.Client, base: str) -> tuple[str | None, int | None]:
    """Name and context limit of the served model; (None, None) where the list is guarded by a key."""
    try:
        entry = client.get(f"{base}/v1/models").json()["data"][0]
        return str(entry["id"]), int(entry["max_model_len"])
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError):
        return None, None


def _int(labels: Mapping[str, str], key: str, fallback: int | None = None) -> int:
    found = _optional_int(labels, key)
    if found is None:
        found = fallback
    if found is None:
        raise PlanError(f"{SERIES} has no usable {key} ({labels.get(key)!r})")
    return found


def _optional_int(labels: Mapping[str, str], key: str) -> int | None:
    try:
        return int(labels[key])
    except (KeyError, ValueError):
        return None


def _float(labels: Mapping[str, str], key: str) -> float | None:
    try:
        return float(labels[key])
    except (KeyError, ValueError):
        return None
