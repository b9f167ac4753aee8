"""Whether the monitoring itself can be trusted."""

from __future__ import annotations

from scripts.rules import Alert, Component

# What the other rules need: (job, the names it has had, newest first). Those that are there from the first scrape on.
ALWAYS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("engine", ("vllm:num_requests_running",)),
    ("engine", ("vllm:num_requests_waiting",)),
    ("engine", ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")),
    ("engine", ("vllm:prompt_tokens_total",)),
    ("engine", ("vllm:generation_tokens_total",)),
    ("engine", ("vllm:num_preemptions_total",)),
    (
        "engine",
        ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total", "vllm:gpu_prefix_cache_hit_rate"),
    ),
    (
        "engine",
        ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total", "vllm:gpu_prefix_cache_hit_rate"),
    ),
    ("gateway", ("gateway_replicas",)),
    ("gateway", ("gateway_discovery_sources_bad",)),
    ("gateway", ("gateway_workers",)),
    ("gateway", ("gateway_worker_restarts_total",)),
    ("gateway", ("gateway_setting",)),
    ("gateway", ("gateway_queue_seconds_count",)),
    ("gateway", ("gateway_inter_token_latency_seconds_bucket",)),
    ("gateway", ("gateway_microbatch_prompts_count",)),
    ("gateway", ("gateway_keys_file_bad",)),
)
# Those that older engines show only once a token came out.
AFTER_A_TOKEN: tuple[tuple[str, ...], ...] = (
    ("vllm:request_success_total",),
    ("vllm:time_to_first_token_seconds_bucket",),
    ("vllm:inter_token_latency_seconds_bucket", "vllm:time_per_output_token_seconds_bucket"),
    ("vllm:e2e_request_latency_seconds_bucket",),
)
# Those that leave with the last engine of the list.
OF_A_REPLICA = ("gateway_replica_ready", "gateway_replica_stalled_seconds", "gateway_replica_circuit_opened_total")


def _gone(have: str, names: tuple[str, ...]) -> str:
    wanted = "\n    or ".join(names)
    return f"""label_replace(
  {have}
  unless on (instance) (
    {wanted}
  ),
  "series", "{names[0]}", "", ""
)"""


_RENAMED = "\nor\n".join(
    [
        *(_gone(f'up{{job="{job}"}} == 1', names) for job, names in ALWAYS),
        *(
            _gone('up{job="engine"} == 1 and on (instance) vllm:generation_tokens_total > 0', names)
            for names in AFTER_A_TOKEN
        ),
        *(_gone('up{job="gateway"} == 1 and on (instance) gateway_replicas > 0', (name,)) for name in OF_A_REPLICA),
    ]
)

ALERTS: tuple[Alert, ...] = (
    Alert(
        "Watchdog",
        "vector(1)",
        "none",
        "Alerting works",
        "Always fires. Let a dead-man's receiver expect it: when it stops coming, Prometheus, Alertmanager or the way "
        "out is broken. No action.",
    ),
    Alert(
        "ScrapeTargetDown",
        "up == 0",
        "warning",
        "{{ $labels.job }} at {{ $labels.instance }} can't be scraped",
        "Its metrics stand still, and rules over them are silent. `make ps`, then `make logs SERVICE=…`. Prometheus's "
        "page Status → Targets has the error.",
        "5m",
    ),
    Alert(
        "ScrapeTargetGone",
        """
max by (job) (max_over_time(up[1h])) == 1
unless on (job)
up""",
        "warning",
        "{{ $labels.job }} was scraped within the hour and is gone",
        "It is found by its name in the network, and the name is no more: its container was stopped. `make ps`. If "
        "that was meant, the alert ends within an hour.",
        "5m",
        "What is found by DNS vanishes when it stops, and is never down.",
    ),
    Alert(
        "MetricsRenamed",
        _RENAMED,
        "warning",
        "{{ $labels.instance }} is up and does not export {{ $labels.series }}",
        "Rules and panels over it are blind. All vllm: series gone → the engine runs with disable-log-stats: remove "
        "it. One gone → another engine version: run the pinned one, or add the new name in scripts/rules (`make "
        "rules`).",
        "5m",
    ),
    Alert(
        "PrometheusRulesFailing",
        "increase(prometheus_rule_evaluation_failures_total[5m]) > 0",
        "warning",
        "Prometheus can't evaluate rules of {{ $labels.rule_group }}",
        "Alerts of that file may be missing. Its page Status → Rules has the error; `promtool check rules "
        "configs/prometheus/rules/*.yml` and `make rules` find what is wrong with the files.",
        "5m",
    ),
    Alert(
        "ConfigReloadFailed",
        """
prometheus_config_last_reload_successful == 0
or
alertmanager_config_last_reload_successful == 0""",
        "warning",
        "{{ $labels.job }} goes on with its older configuration",
        "The file on disk is wrong; its log has the line. `promtool check config configs/prometheus/prometheus.yml`, "
        "`amtool check-config configs/alertmanager/alertmanager.yml`. A restart before that would stop it.",
        "5m",
    ),
    Alert(
        "AlertsNotDelivered",
        """
increase(alertmanager_notifications_failed_total[5m]) > 0
or
increase(prometheus_notifications_dropped_total[5m]) > 0""",
        "warning",
        "Alerts do not arrive: {{ $labels.job }} fails to send them",
        "You see this only where another way still works. `make logs SERVICE=alertmanager` names the receiver and the "
        "answer it got: an old token, a wrong address, no way out of the network.",
        "5m",
    ),
)

COMPONENT = Component("meta", "Whether the monitoring itself can be trusted.", ALERTS)
