"""What may be changed in a profile, and to what. Nothing here costs quality of answers unless it was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Flags = Mapping[str, Any]  # of a profile: name without dashes in front, value

# Values that the engine takes everywhere. Not here: gpu-memory-utilization (the card's owner decides), max-model-len
# (what clients may send), dtype and quantization (what they get).
_SPACE: dict[str, dict[str, list[Any]]] = {
    "gpu": {
        "max-num-seqs": [64, 128, 256, 512],
        "max-num-batched-tokens": [2048, 4096, 8192, 16384],
        "stream-interval": [1, 4, 8],
        "api-server-count": [1, 2],
    },
    "cpu": {
        "max-num-seqs": [8, 16, 32, 64],
        "max-num-batched-tokens": [512, 1024, 2048, 4096],
        "block-size": [32, 64, 128],
    },
}


def space(platform: str, *, kv_fp8: bool = False) -> dict[str, list[Any]]:
    """Flag to its candidates. `platform` is "gpu" or "cpu"; `kv_fp8` allows a KV cache in 8 bits, which rounds."""
    chosen = dict(_SPACE[platform])
    if kv_fp8:
        chosen["kv-cache-dtype"] = ["auto", "fp8"]
    return chosen


def price(changes: Flags) -> str:
    """What changes cost elsewhere, in one sentence; "" where it is nothing."""
    if int(changes.get("api-server-count", 1)) > 1:
        return "With more than one API server a stop cuts off the streams in flight: drain the engine before each."
    return ""


def changed(profile: Flags, trial: Flags) -> dict[str, Any]:
    """The flags of `trial` that `profile` does not set to the same value already."""
    return {name: value for name, value in trial.items() if profile.get(name) != value}


def fits(flags: Flags) -> bool:
    """The engine refuses a batch of fewer tokens than sequences."""
    tokens, sequences = flags.get("max-num-batched-tokens"), flags.get("max-num-seqs")
    return tokens is None or sequences is None or tokens >= sequences
