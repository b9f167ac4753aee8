"""The promises of configs/slo.yaml as dashboards need them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

FILE = Path("configs/slo.yaml")


@dataclass(frozen=True)
class Slo:
    availability: float
    ttft_limit_s: float
    ttft_share: float
    itl_limit_s: float
    itl_share: float
    prefix_hit_ratio: float


def read(file: Path = FILE) -> Slo:
    """Raises KeyError naming what is missing."""
    told = yaml.safe_load(file.read_text(encoding="utf-8"))
    return Slo(
        availability=told["availability"],
        ttft_limit_s=told["ttft"]["limit_s"],
        ttft_share=told["ttft"]["share"],
        itl_limit_s=told["itl"]["limit_s"],
        itl_share=told["itl"]["share"],
        prefix_hit_ratio=told["prefix_hit_ratio"],
    )
