"""What the engines' own pages tell: vLLM 0.6 to 0.33, whose names differ (`new or old`)."""

from __future__ import annotations

from scripts.rules import Component, Record, quantiles
from scripts.rules.components._engine_alerts import ALERTS

_PER_ENGINE = "vLLM; one a data-parallel rank of a replica (instance, engine, model_name)"
_PER_MODEL = "vLLM; all replicas of a model together (model_name)"
_ABORTED = "An answer whose client left is in no histogram of the engine."


def _percentiles(what: str, bucket: str, old: str, says: str) -> list[Record]:
    """NaN, which a histogram without observations gives, is smaller than nothing: `>= 0` leaves it out."""

    def quantile(name: str) -> str:
        return f"histogram_quantile(@q@, sum by (model_name, le) (rate({name}[5m]))) >= 0"

    expr = f"({quantile(bucket)})\nor\n({quantile(old)})" if old else quantile(bucket)
    return list(quantiles(f"model:{what}:{{}}_5m", expr, says, "seconds", _PER_MODEL, _ABORTED))


# Idle is 0/0, and NaN is smaller than nothing: `<= 1.01` leaves it out together with what a restart makes impossible.
RECORDS: tuple[Record, ...] = (
    Record(
        "engine:prefix_cache_queries:rate5m",
        """
sum by (instance, engine, model_name) (
  rate(vllm:prefix_cache_queries_total[5m]) or rate(vllm:gpu_prefix_cache_queries_total[5m])
)""",
        "Prompt tokens a second that were looked up in the prefix cache.",
        "tokens/s (blocks/s on 0.7 and 0.8)",
        _PER_ENGINE,
        "0.32 does not count a preempted request again when it resumes.",
    ),
    Record(
        "engine:prefix_cache_hits:rate5m",
        """
sum by (instance, engine, model_name) (
  rate(vllm:prefix_cache_hits_total[5m]) or rate(vllm:gpu_prefix_cache_hits_total[5m])
)""",
        "Those of them that were found there, and so not computed.",
        "tokens/s (blocks/s on 0.7 and 0.8)",
        _PER_ENGINE,
    ),
    Record(
        "engine:cache_hit:ratio_rate5m",
        """
clamp_max(
  engine:prefix_cache_hits:rate5m / engine:prefix_cache_queries:rate5m <= 1.01,
  1
)""",
        "Share of the looked-up prompt tokens that one engine found in its prefix cache.",
        "0 to 1",
        _PER_ENGINE,
        "Absent while idle. Whole blocks only: a prompt shorter than one block can't hit.",
    ),
    Record(
        "vllm:cache_hit_ratio",
        """
clamp_max(
  sum by (model_name) (engine:prefix_cache_hits:rate5m)
    / sum by (model_name) (engine:prefix_cache_queries:rate5m)
  <= 1.01,
  1
)
or
avg by (model_name) (vllm:gpu_prefix_cache_hit_rate >= 0)
  and on (model_name) sum by (model_name) (rate(vllm:prompt_tokens_total[5m])) > 0""",
        "Prefix cache: hits over queries of the last five minutes, weighted by tokens.",
        "0 to 1",
        _PER_MODEL,
        "Absent while idle, and where the cache is off. A restart that outran the old counters gives more than 1, "
        "which is no ratio: absent as well. Version 0.6 exports a mean over its whole life instead of counters; -1 "
        "there means off. The V0 engine of 0.8 exports neither.",
    ),
    Record(
        "vllm:gpu_cache_usage_ratio",
        "max by (instance, engine, model_name) (vllm:kv_cache_usage_perc or vllm:gpu_cache_usage_perc)",
        "Share of the KV cache blocks that running requests hold.",
        "0 to 1",
        _PER_ENGINE,
        "Blocks that are cached and held by nobody don't count: near 0 when idle, though the cache may be full of "
        "prefixes. High is healthy; with requests waiting or preempted it is pressure.",
    ),
    Record(
        "model:requests_running:sum",
        "sum by (model_name) (vllm:num_requests_running)",
        "Requests in the engines' batches now.",
        "requests",
        _PER_MODEL,
    ),
    Record(
        "model:requests_waiting:sum",
        "sum by (model_name) (vllm:num_requests_waiting)",
        "Requests that the engines have taken and not scheduled.",
        "requests",
        _PER_MODEL,
        "The gateway's queue comes before it and is not in it: gateway_queued_requests.",
    ),
    Record(
        "model:prompt_tokens:rate5m",
        "sum by (model_name) (rate(vllm:prompt_tokens_total[5m]))",
        "Prompt tokens a second, cached ones included.",
        "tokens/s",
        _PER_MODEL,
        "Counted when the prefill ends: a long one arrives at once.",
    ),
    Record(
        "model:generation_tokens:rate5m",
        "sum by (model_name) (rate(vllm:generation_tokens_total[5m]))",
        "Generated tokens a second.",
        "tokens/s",
        _PER_MODEL,
    ),
    Record(
        "model:requests_finished:rate5m",
        "sum by (model_name, finished_reason) (rate(vllm:request_success_total[5m]))",
        "Requests a second that ended, by reason.",
        "requests/s",
        "vLLM; by model_name and finished_reason",
        "A merged call counts once a prompt. Clients that left are never counted as abort: gateway_cancelled_total.",
    ),
    Record(
        "model:generation_tokens_per_request:ratio_rate5m",
        "model:generation_tokens:rate5m / (sum by (model_name) (model:requests_finished:rate5m) > 0)",
        "Mean length of an answer.",
        "tokens",
        _PER_MODEL,
        "Absent while nothing ends. Tokens count as they come, requests when they end.",
    ),
    Record(
        "engine:preemptions:rate5m",
        "sum by (instance, engine, model_name) (rate(vllm:num_preemptions_total[5m]))",
        "Requests a second that lost their KV blocks to others.",
        "preemptions/s",
        _PER_ENGINE,
        "Counted when the request is scheduled again, so a wave of them shows after it is over.",
    ),
    *_percentiles(
        "time_to_first_token_seconds",
        "vllm:time_to_first_token_seconds_bucket",
        "",
        "{} of the requests had their first token within this time of reaching the engine.",
    ),
    *_percentiles(
        "inter_token_latency_seconds",
        "vllm:inter_token_latency_seconds_bucket",
        "vllm:time_per_output_token_seconds_bucket",
        "{} of the gaps between two tokens of an answer were shorter.",
    ),
    *_percentiles(
        "e2e_request_latency_seconds",
        "vllm:e2e_request_latency_seconds_bucket",
        "",
        "{} of the requests were finished within this time of reaching the engine.",
    ),
    *_percentiles(
        "request_queue_time_seconds",
        "vllm:request_queue_time_seconds_bucket",
        "vllm:time_in_queue_requests_bucket",
        "{} of the requests were scheduled within this time of reaching the engine.",
    ),
)

COMPONENT = Component("engine", "What the engines' own pages tell, vLLM 0.6 to 0.33.", (*RECORDS, *ALERTS))
