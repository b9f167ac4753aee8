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
ALERTS: tuple[Alert, ...] = ()

COMPONENT = Component("host", "What the node exporter tells, where one runs.", (*RECORDS, *ALERTS))
