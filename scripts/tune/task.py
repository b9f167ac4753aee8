"""What is tuned, within which bounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from scripts.tune.probe import Setup


@dataclass(frozen=True)
class Task:
    """`profile` is as it is now; `candidates` maps a flag to what may stand in its place."""

    setup: Setup
    profile: dict[str, Any]
    candidates: dict[str, list[Any]]
    budget_s: float  # for all of it: the search ends so that what comes after it still fits
    trials: int  # at most
    repeats: int
    gain: float  # times the current profile's best repeat that a new one's worst must beat
    soak_s: float
    seed: int
    planned_kv_tokens: int | None  # as the memory plan has it
    say: Callable[[str], None]
