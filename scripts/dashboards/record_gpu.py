"""Record a card's readings through its driver, in the names of NVIDIA's DCGM exporter; for previews without a card.

    python -m scripts.dashboards.record_gpu --seconds 240 > scripts/dashboards/data/gpu.json

The file says which card and driver it was, and has a row of readings every five seconds. Exit code 1: no driver here.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from typing import Any

EVERY_S = 5
# Name in the exporter's page -> what multiplies the driver's reading to give the exporter's unit.
FIELDS = {
    "DCGM_FI_DEV_GPU_UTIL": 1,  # %
    "DCGM_FI_DEV_FB_USED": 1 / 2**20,  # MiB
    "DCGM_FI_DEV_FB_FREE": 1 / 2**20,
    "DCGM_FI_DEV_GPU_TEMP": 1,  # °C
    "DCGM_FI_DEV_POWER_USAGE": 1 / 1000,  # W
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": 1,  # mJ
    "DCGM_FI_DEV_SM_CLOCK": 1,  # MHz
}


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class Card:
    """The first card. Raises OSError where there is no driver, RuntimeError where it refuses."""

    def __init__(self) -> None:
        self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self._call("nvmlInit_v2")
        self._handle = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByIndex_v2", 0, ctypes.byref(self._handle))

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._nvml, name)(*arguments):
            raise RuntimeError(f"{name} gave {code}")

    def _read(self, name: str, into: Any, *arguments: Any) -> Any:
        self._call(name, self._handle, *arguments, ctypes.byref(into))
        return into

    def name(self) -> str:
        buffer = ctypes.create_string_buffer(96)
        self._call("nvmlDeviceGetName", self._handle, buffer, 96)
        return buffer.value.decode()

    def driver(self) -> str:
        buffer = ctypes.create_string_buffer(96)
        self._call("nvmlSystemGetDriverVersion", buffer, 96)
        return buffer.value.decode()

    def readings(self) -> list[float]:
        """In the order and units of FIELDS."""
        memory = self._read("nvmlDeviceGetMemoryInfo", _Memory())
        raw = (
            self._read("nvmlDeviceGetUtilizationRates", _Utilization()).gpu,
            memory.used,
            memory.free,
            self._read("nvmlDeviceGetTemperature", ctypes.c_uint(), 0).value,
            self._read("nvmlDeviceGetPowerUsage", ctypes.c_uint()).value,
            self._read("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong()).value,
            self._read("nvmlDeviceGetClockInfo", ctypes.c_uint(), 1).value,
        )
        return [round(value * factor, 3) for value, factor in zip(raw, FIELDS.values(), strict=True)]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.dashboards.record_gpu",
        description="Record a card's readings, in the DCGM exporter's names.",
    )
    parser.add_argument("--seconds", type=float, default=240, help="how long (default %(default)s)")
    args = parser.parse_args(argv)
    try:
        card = Card()
    except (OSError, RuntimeError) as error:
        print(f"record_gpu: no NVIDIA driver answers here: {error}", file=sys.stderr)
        return 1
    rows = []
    for _ in range(round(args.seconds / EVERY_S)):
        rows.append(card.readings())
        time.sleep(EVERY_S)
    head = json.dumps({"card": card.name(), "driver": card.driver(), "every_s": EVERY_S, "fields": list(FIELDS)})
    print(head[:-1] + ', "rows": [\n' + ",\n".join(map(json.dumps, rows)) + "\n]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
