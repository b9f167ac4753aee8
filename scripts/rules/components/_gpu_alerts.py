"""Alerts on the cards. No profiling fields: a GeForce has none."""

from __future__ import annotations

from scripts.rules import Alert

_CARD = "GPU {{ $labels.gpu }} ({{ $labels.modelName }})"

ALERTS: tuple[Alert, ...] = (
    Alert(
        "GpuTooHot",
        "DCGM_FI_DEV_GPU_TEMP > 85",
        "warning",
        f"{_CARD} has {{{{ $value }}}} °C",
        "From about here on cards slow themselves down. `nvidia-smi -q -d PERFORMANCE` says whether it does. Look at "
        "fans, filters and the room; `nvidia-smi -pl` with a lower power limit costs little speed.",
        "5m",
    ),
    Alert(
        "GpuXid",
        """
DCGM_FI_DEV_XID_ERRORS > 0
and
changes(DCGM_FI_DEV_XID_ERRORS[1h]) > 0""",
        "critical",
        f"{_CARD} reported Xid {{{{ $value }}}}",
        "13, 31, 43, 45: the program's fault, most often healed by its restart. 48, 63, 64, 94, 95: memory. 74: "
        "NVLink. 79, 119, 120: the card or its firmware is gone, reboot the machine. `dmesg | grep Xid` has the whole "
        "line.",
        "",
        "The field keeps the last code until the exporter restarts, so the alert asks whether it came within the hour.",
    ),
    Alert(
        "GpuMemoryFull",
        "gpu:memory_used:ratio > 0.98",
        "warning",
        f"{_CARD} has {{{{ $value | humanizePercentage }}}} of its memory in use",
        "The engine takes its share at the start and grows no more: something else came. `nvidia-smi` lists it. End "
        "it, or lower gpu-memory-utilization so that both fit (`make plan`); otherwise the engine's next peak fails.",
        "10m",
    ),
)
