"""What NVIDIA's DCGM exporter tells, without its profiling fields: a GeForce has none. No exporter, no series."""

from __future__ import annotations

from scripts.rules import Component, Record
from scripts.rules.components._gpu_alerts import ALERTS

_BOTH = "DCGM and vLLM; all cards and engines together"
_OTHERS = "Whatever else runs on the cards is in the energy."

RECORDS: tuple[Record, ...] = (
    Record(
        "gpu:memory_used:ratio",
        "DCGM_FI_DEV_FB_USED / (DCGM_FI_DEV_FB_USED + DCGM_FI_DEV_FB_FREE > 0)",
        "Share of a card's memory in use.",
        "0 to 1",
        "DCGM; one a card (instance, gpu, UUID, modelName)",
        "The engine takes its whole share at the start: this says nothing about load.",
    ),
    Record(
        "gpu:power:watts",
        "sum(rate(DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION[5m])) / 1000",
        "Mean power of all cards over five minutes, from their energy counters.",
        "watts",
        "DCGM; all cards together",
        "Cards before Volta have no such counter.",
    ),
    Record(
        "gpu:generation_tokens_per_joule:ratio_rate5m",
        "sum(rate(vllm:generation_tokens_total[5m])) / (gpu:power:watts > 0)",
        "Generated tokens for each joule the cards took.",
        "tokens/J",
        _BOTH,
        f"0 while idle, since idling takes energy. {_OTHERS}",
    ),
    Record(
        "gpu:joules_per_request:ratio_rate5m",
        "gpu:power:watts / (sum(rate(vllm:request_success_total[5m])) > 0)",
        "Energy the cards took for each request that ended.",
        "joules",
        _BOTH,
        f"Absent while nothing ends. {_OTHERS}",
    ),
)

COMPONENT = Component("gpu", "What NVIDIA's DCGM exporter tells; no profiling fields.", (*RECORDS, *ALERTS))
