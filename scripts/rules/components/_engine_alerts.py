"""Alerts on the engines."""

from __future__ import annotations

from scripts.rules import Alert

_RANK = "{{ $labels.instance }} (engine {{ $labels.engine }})"

ALERTS: tuple[Alert, ...] = (
    Alert(
        "EngineAbsent",
        'absent(up{job="engine"} == 1)',
        "critical",
        "No engine answers",
        "Clients get 503. `make ps` says whether the engine's container runs, `make logs SERVICE=engine` why not; its "
        "supervisor restarts what ended. If it gave up, mend what the log names, then `docker compose restart engine`.",
        "2m",
        "No target, or none that is up.",
    ),
    Alert(
        "EngineHung",
        """
max by (replica) (
  gateway_replica_stalled_seconds >= on (instance) group_left () gateway_setting{name="stall_s"}
)
or
(
  sum by (instance, model_name) (min_over_time(vllm:num_requests_running[2m])) > 0
  and
  sum by (instance, model_name) (increase(vllm:prompt_tokens_total[2m]))
    + sum by (instance, model_name) (increase(vllm:generation_tokens_total[2m])) == 0
  unless on ()
  up{job="gateway"} == 1
)""",
        "critical",
        "Engine {{ or $labels.replica $labels.instance }} has work and computes nothing",
        "Its requests stand still though /health may say 200. The watchdog in its container restarts it after STALL_S; "
        "this alert means that it did not, or that it happens again: `docker compose restart engine`, and keep the log "
        "first (`docker compose logs engine`).",
        "1m",
        "Two witnesses: the gateway's watch, by its own stall_s; and the engine's counters while no gateway watches.",
    ),
    Alert(
        "EngineCrashLoop",
        """
resets(up{job="engine"}[30m]) >= 3
or
changes(process_start_time_seconds{job="engine"}[30m]) >= 3""",
        "critical",
        "Engine {{ $labels.instance }} started again {{ $value }} times in half an hour",
        "Each start loses the streams in flight. The last lines before a start say why (`make logs SERVICE=engine`): "
        "out of memory under load → lower gpu-memory-utilization or what else uses the card; CUDA or Xid → the card; "
        "killed → the host's memory (ENGINE_MEMORY).",
        "",
        "A fall of `up` is a crash; the start time catches those quicker than a scrape. With several API servers the "
        "page has no start time: then `up` alone.",
    ),
    Alert(
        "EngineKvPressure",
        """
vllm:gpu_cache_usage_ratio > 0.9
and on (instance, engine, model_name)
(vllm:num_requests_waiting > 0 or engine:preemptions:rate5m > 0)""",
        "warning",
        f"KV cache of {_RANK} is full and requests wait for it",
        "{{ $value | humanizePercentage }} in use. More room: raise gpu-memory-utilization, or kv-cache-dtype fp8. "
        "Less demand: lower max-num-seqs or max-model-len. Or add a replica. Lowering gpu-memory-utilization makes it "
        "worse.",
        "10m",
        "Usage alone is healthy.",
    ),
    Alert(
        "EngineKvPressure",
        """
vllm:gpu_cache_usage_ratio > 0.95
and on (instance, engine, model_name) vllm:num_requests_waiting >= 10
and on (instance, engine, model_name) engine:preemptions:rate5m > 0""",
        "critical",
        f"KV cache of {_RANK} is exhausted: requests queue and lose what was computed",
        "{{ $value | humanizePercentage }} in use. Now: lower max-num-seqs, or admission.capacity_tokens at the "
        "gateway. To last: raise gpu-memory-utilization, kv-cache-dtype fp8, or add a replica. Lowering "
        "gpu-memory-utilization makes it worse.",
        "10m",
    ),
    Alert(
        "EnginePreemptions",
        "engine:preemptions:rate5m > 0.05",
        "warning",
        f"{_RANK} preempts {{{{ $value | humanize }}}} requests a second",
        "Each loses its KV blocks and is computed again: answers stall in the middle. Lower max-num-seqs or "
        "max-model-len, raise gpu-memory-utilization, use kv-cache-dtype fp8, or add a replica.",
        "10m",
        "Three a minute. The counter moves when a request resumes.",
    ),
    Alert(
        "EngineLowHitRatio",
        """
vllm:cache_hit_ratio < @prefix_hit_ratio@
and on (model_name)
model:prompt_tokens:rate5m > 100""",
        "warning",
        "Prefix cache of {{ $labels.model_name }} answers {{ $value | humanizePercentage }} of the prompt tokens",
        "Under @prefix_hit_percent@ with real traffic. `make advise` says which share of the misses is what: prompts "
        "shorter than a block (smaller block-size), no common beginning (put the fixed part first), a cache_salt that "
        "differs, or evicted (more KV room). If your prompts share nothing, lower prefix_hit_ratio in "
        "configs/slo.yaml.",
        "30m",
        "Only with traffic: a few short prompts have an honest 0.",
    ),
    Alert(
        "EngineQueueSaturated",
        "model:request_queue_time_seconds:p95_5m > 5",
        "warning",
        "Requests wait {{ $value | humanizeDuration }} in the engines of {{ $labels.model_name }} (p95)",
        "The gateway lets in more than the engines schedule. KV cache full as well → see EngineKvPressure. Not full → "
        "raise max-num-seqs or max-num-batched-tokens. Both at their limit → add a replica.",
        "5m",
    ),
)
