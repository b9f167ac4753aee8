"""What the node exporter tells, where one runs."""

from __future__ import annotations

from scripts.rules import Alert, Component, Record

_REAL = 'fstype!~"tmpfs|ramfs|overlay|squashfs|iso9660|fuse.*|autofs"'

RECORDS: tuple[Record, ...] = (
    Record(
        "host:filesystem_avail:ratio",
        f"""
min by (instance, mountpoint, device) (
  node_filesystem_avail_bytes{{{_REAL}}}
  /
  (node_filesystem_size_bytes{{{_REAL}}} > 0)
)""",
        "Share of a file system that is still free to use.",
        "0 to 1",
        "node exporter; by instance, mountpoint and device",
        "In a container the exporter sees the host only where the host's root is bound into it.",
    ),
    Record(
        "host:memory_available:ratio",
        "node_memory_MemAvailable_bytes / node_memory_MemTotal_bytes",
        "Share of the memory that programs could still get.",
        "0 to 1",
        "node exporter; by instance",
        "A container's own limit may be lower: this is the host's.",
    ),
)

_DISK = "{{ $labels.mountpoint }} on {{ $labels.instance }}"

ALERTS: tuple[Alert, ...] = (
    Alert(
        "HostDiskFilling",
        "host:filesystem_avail:ratio < 0.1",
        "warning",
        f"{{{{ $value | humanizePercentage }}}} of {_DISK} is free",
        "`df -h`, then `docker system df`. Old images (`docker image prune`), old models (`make models`), Prometheus's "
        "retention (PROMETHEUS_KEEP, PROMETHEUS_SIZE in .env) are what grows here.",
        "10m",
    ),
    Alert(
        "HostDiskFull",
        "host:filesystem_avail:ratio < 0.03",
        "critical",
        f"{{{{ $value | humanizePercentage }}}} of {_DISK} is free",
        "At 0 Prometheus stops, logs and the usage ledger are lost. Free space now: `docker image prune`, then old "
        "models (`make models`). Nothing restarts by itself for this.",
        "5m",
    ),
    Alert(
        "HostMemoryLow",
        "host:memory_available:ratio < 0.05",
        "warning",
        "{{ $value | humanizePercentage }} of the memory of {{ $labels.instance }} is left",
        "Next the kernel kills the largest process, which is the engine. `docker stats --no-stream` says who has it. "
        "Limits are ENGINE_MEMORY, GATEWAY_MEMORY, PROMETHEUS_MEMORY in .env.",
        "5m",
    ),
    Alert(
        "HostOomKill",
        "increase(node_vmstat_oom_kill[10m]) > 0",
        "warning",
        "The kernel of {{ $labels.instance }} killed a process for want of memory",
        "`dmesg | grep -i 'killed process'` names it. In a container's limit → raise that limit in .env; on the whole "
        "host → something else took the memory.",
        "",
        "Counts containers at their own limit as well.",
    ),
)

COMPONENT = Component("host", "What the node exporter tells, where one runs.", (*RECORDS, *ALERTS))
