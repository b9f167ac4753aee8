"""What the real engine's metrics say: the names this project reads exist, and they move as it believes."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from scripts import demo
from tests.engine.conftest import Stack, until

ROOT = Path(demo.ROOT)
# Where code reads series. Rules and dashboards are asked live, query by query, by `make prove-observability`.
READERS = ("gateway/*.py", "scripts/_*.py")
# Names that other vLLM releases export and 0.32.0 does not.
OTHER_RELEASES = frozenset(
    {"vllm:gpu_cache_usage_perc", "vllm:gpu_prefix_cache_hits_total", "vllm:gpu_prefix_cache_queries_total"}
)


def test_every_engine_series_that_the_project_reads_exists(stack: Stack) -> None:
    stack.completion("Hello", max_tokens=2)
    page = stack.engine.get("/metrics").text
    live = {sample.name for family in text_string_to_metric_families(page) for sample in family.samples}
    read = {
        name
        for pattern in READERS
        for path in ROOT.glob(pattern)
        for name in re.findall(r"vllm:[a-z_]+[a-z]", path.read_text(encoding="utf-8"))
    }
    assert len(read) >= 4, "the search itself is broken"
    assert not read - live - OTHER_RELEASES
    assert not OTHER_RELEASES & live, "0.32.0 does export these: they are no names of other releases"


def test_a_repeated_prefix_hits_the_prefix_cache_and_the_client_sees_it(stack: Stack) -> None:
    shared = "The committee met on the first Monday of the month to hear reports about the harbour. " * 8
    first = stack.completion(shared + "The first speaker said", max_tokens=4).json()["usage"]
    hits, queries = (stack.engine_metric(f"vllm:prefix_cache_{what}_total") for what in ("hits", "queries"))
    second = stack.completion(shared + "Then the mayor said", max_tokens=4).json()["usage"]
    cached = second["prompt_tokens_details"]["cached_tokens"]
    # Whole blocks of 32 tokens; the two prompts share all but their last words.
    assert second["prompt_tokens"] - 32 - 8 <= cached < second["prompt_tokens"]
    assert cached % 32 == 0
    assert stack.engine_metric("vllm:prefix_cache_hits_total") - hits == cached
    assert stack.engine_metric("vllm:prefix_cache_queries_total") - queries == second["prompt_tokens"]
    assert first["prompt_tokens"] > 100


def test_a_client_that_leaves_a_stream_frees_the_engine(stack: Stack) -> None:
    stack.idle()
    before = stack.engine_metric("vllm:generation_tokens_total")
    request = {"model": stack.model, "prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True}
    with stack.http.stream("POST", "/v1/completions", json={**request, "stream": True}) as response:
        chunks = response.iter_raw()
        for _ in range(3):
            next(chunks)
        assert stack.engine_metric("vllm:num_requests_running") == 1
    until(lambda: stack.engine_metric("vllm:num_requests_running") == 0, "the engine gave up", 5)
    assert stack.engine_metric("vllm:generation_tokens_total") - before < 750
    until(lambda: stack.gateway_metric("gateway_in_flight_requests") == 0, "the gateway gave up too", 5)


def test_a_client_that_leaves_before_a_whole_answer_frees_the_engine(stack: Stack) -> None:
    stack.idle()
    request = {"model": stack.model, "prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True}
    with httpx.Client(base_url=stack.url, timeout=1.5, trust_env=False) as client:
        try:
            client.post("/v1/completions", json=request)
        except httpx.ReadTimeout:
            pass
        else:
            raise AssertionError("1500 tokens in 1.5 s?")
    until(lambda: stack.engine_metric("vllm:num_requests_running") == 0, "the engine gave up", 5)
    until(lambda: stack.gateway_metric("gateway_in_flight_requests") == 0, "the gateway gave up too", 5)


def test_the_gateway_learns_the_engines_capacity_from_its_metrics(stack: Stack) -> None:
    info = re.search(r'kv_cache_size_tokens="(\d+)"', stack.engine.get("/metrics").text)
    assert info is not None
    assert stack.gateway_metric("gateway_capacity_tokens") == float(info[1])
