"""Alerts on the gateway."""

from __future__ import annotations

from scripts.rules import Alert

# A replica's address as the engine's own metrics have it, so that Alertmanager can tell that both speak of one engine.
_INSTANCE = '"instance", "$1", "replica", "https?://(.*)"'

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
        """
sum(gateway_replica_ready) == 0
or
sum(gateway_replicas) == 0""",
        "critical",
        "The gateway has no engine it can use",
        "Clients get 503, though Prometheus may reach the engine. GET /readyz on the gateway says why: still warming "
        "up, a key the engine refuses (secrets/private/engine_api_key), another model, hung, or none is listed.",
        "2m",
        "A list that is empty leaves no series of a replica.",
    ),
    Alert(
        "GatewayReplicaNotReady",
        f"""
label_replace(
  min by (replica) (gateway_replica_ready) == 0,
  {_INSTANCE}
)""",
        "warning",
        "Engine {{ $labels.replica }} takes no requests",
        "The others carry its share. `make replicas` has its state and why: down, hung, warming up, or "
        "drained by hand and forgotten. One that is gone for good belongs off the list it is on.",
        "15m",
        "Longer than a model takes to load, and than one that was taken off the list has to end its streams.",
    ),
    Alert(
        "GatewayCircuitOpen",
        f"""
label_replace(
  sum by (replica) (increase(gateway_replica_circuit_opened_total{{cause!="refused"}}[2m])) > 0,
  {_INSTANCE}
)""",
        "warning",
        "Calls to engine {{ $labels.replica }} fail again and again",
        "It calls itself healthy, so the gateway goes by its failures and leaves it out; an only one is asked all the "
        "same, and its clients get errors. `gateway:upstream_failures:rate5m` says how they fail, that engine's log "
        "why. Restart it, drain it, or take it off the list.",
        "5m",
        "Opened once and well again is no alert; an engine that is down or hung has its own.",
    ),
    Alert(
        "GatewayReplicaListStale",
        "gateway_discovery_sources_bad > 0",
        "warning",
        "{{ $value }} of the places that name engines can't be used",
        "The engines known before stay: new ones don't join, and a restart now would know none of them. `make "
        "replicas` says which and why: a targets file that is gone or malformed, a name that has no address.",
        "5m",
    ),
    Alert(
        "GatewayCrashLoop",
        """
changes(gateway_upstream_retries_created[30m])
  + on (instance) increase(gateway_worker_restarts_total[30m]) >= 3
or
sum by (instance) (gateway_workers)
  < on (instance) sum by (instance) (gateway_setting{name="workers"})""",
        "warning",
        "Processes of the gateway {{ $labels.instance }} end again and again",
        "Each end breaks the requests it had; while a worker is away its share of the limits is, too. `make logs "
        "SERVICE=gateway`: `a worker ended` says what of, the lines before it why. SIGKILL is memory (GATEWAY_MEMORY) "
        "or a loop that stood still.",
        "5m",
        "Three restarts, of all of it or of a worker; or a worker that can't be started at all.",
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
        "Keys added or revoked since don't count. `make keys ARGS=list` names place and reason, and writes nothing "
        "until the file is whole: put the last good one back, from a backup. A restart before that would stop the "
        "gateway.",
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
