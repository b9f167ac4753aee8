"""Alerts on the gateway."""

from __future__ import annotations

from scripts.rules import Alert

ALERTS: tuple[Alert, ...] = (
    Alert(
        "GatewayAbsent",
        'absent(up{job="gateway"} == 1)',
        "critical",
        "No gateway answers",
        "Clients get no connection. `make ps`, then `make logs SERVICE=gateway`: a setting it refuses is its last "
        "line. Docker restarts it by itself; `docker compose up -d gateway` does so now.",
        "1m",
    ),
    Alert(
        "GatewayNoReadyReplica",
        "sum(gateway_replica_ready) == 0",
        "critical",
        "The gateway has no engine it can use",
        "Clients get 503, though Prometheus may reach the engine. GET /readyz on the gateway says why: still warming "
        "up, a key the engine refuses (secrets/private/engine_api_key), another model, or hung.",
        "2m",
    ),
    Alert(
        "GatewayQueueSaturated",
        "gateway:queue_seconds:p95_5m > 5",
        "warning",
        "Requests wait {{ $value | humanizeDuration }} for admission (p95)",
        "More arrives than the engines finish. Which key, and how long its answers are: dashboard per-key usage. Add a "
        "replica, limit that key (`make keys`), or shorten max_tokens. A longer queue only makes clients wait longer.",
        "5m",
    ),
    Alert(
        "GatewayShedding",
        """
gateway:overload_shed:ratio_rate5m > 0.05
and on ()
sum(gateway:shed_requests:rate5m{cause!~"key_.*|no_engine"}) > 0.05""",
        "warning",
        "{{ $value | humanizePercentage }} of the requests are refused for want of room",
        "Those clients get 429 with a Retry-After. The causes: series gateway:shed_requests:rate5m. Add a replica, or "
        "limit the key that fills the queue. Raising admission.max_wait_s turns refusals into waits.",
        "5m",
    ),
    Alert(
        "GatewayKeysFileBad",
        "gateway_keys_file_bad == 1",
        "warning",
        "The keys file is unusable; the gateway goes on with the older keys",
        "Keys added or revoked since don't count. The gateway's log names line and reason (`docker compose logs "
        "gateway | grep keys`). Mend it with `make keys`, never by hand; a restart before that would stop the gateway.",
        "1m",
    ),
    Alert(
        "GatewayLedgerFailing",
        "increase(gateway_ledger_failures_total[5m]) > 0",
        "warning",
        "Usage can't be written to the ledger",
        "It is kept in memory and tried again; a restart now would lose it. The disk is full or read-only, or the "
        "file's owner is wrong: `docker compose logs gateway | grep ledger`, then `df -h` for the volume gateway-data.",
        "5m",
    ),
    Alert(
        "GatewayLogLinesDropped",
        "increase(gateway_log_lines_dropped_total[5m]) > 0",
        "warning",
        "The gateway's log lines are lost: nobody reads its stderr",
        "Requests are not affected. Docker's log driver stands still: a full disk under /var/lib/docker, or a remote "
        "driver that does not answer. Until it reads again, lines are missing from the log.",
        "1m",
    ),
)
