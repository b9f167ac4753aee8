"""Reading engines' /metrics pages, old and new."""

import pytest

from gateway.engine_metrics import EngineFigures, read_engine_metrics

NEW = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 5.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 5.0
# TYPE vllm:prompt_tokens counter
vllm:prompt_tokens_total{engine="0",model_name="m"} 100.0
vllm:prompt_tokens_created{engine="0",model_name="m"} 1.7e+09
vllm:prompt_tokens_cached_total{engine="0",model_name="m"} 7.0
vllm:generation_tokens_total{engine="0",model_name="m"} 40.0
vllm:cache_config_info{block_size="16",engine="0",kv_cache_size_tokens="1048576",num_gpu_blocks="9"} 1.0
process_start_time_seconds 1.7e+09
"""


def test_the_figures_of_a_current_engine() -> None:
    assert read_engine_metrics(NEW) == EngineFigures(3, 5, 140, 1048576, block_size=16, started_s=1.7e9)


def test_capacity_of_an_engine_that_tells_blocks_only() -> None:
    page = 'vllm:cache_config_info{block_size="32",num_gpu_blocks="1000"} 1.0'
    assert read_engine_metrics(page).capacity_tokens == 32_000


@pytest.mark.parametrize("labels", ['kv_cache_size_tokens="None"', 'block_size="16",num_gpu_blocks="None"', ""])
def test_a_capacity_not_told_is_none(labels: str) -> None:
    assert read_engine_metrics(f"vllm:cache_config_info{{{labels}}} 1.0").capacity_tokens is None


def test_several_engines_behind_one_port_are_summed() -> None:
    page = NEW + NEW.replace('engine="0"', 'engine="1"')
    assert read_engine_metrics(page) == EngineFigures(6, 10, 280, 2097152, block_size=16, started_s=1.7e9)


@pytest.mark.parametrize(
    "page",
    [
        "",
        "<!DOCTYPE html><html><body>vllm:num_requests_running</body></html>",
        "python_gc_objects_collected_total 5\n",
        'vllm:num_requests_running{engine="0 garbage',
        "vllm:generation_tokens_total nonsense",
        'vllm:num_requests_running{engine="0"} NaN',
    ],
)
def test_a_page_without_figures_says_nothing(page: str) -> None:
    assert read_engine_metrics(page) == EngineFigures()
