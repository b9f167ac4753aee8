"""The small model for `make up-cpu`: from the user's cache into MODELS_DIR, where a container can see it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from scripts import model_fetch
from scripts._compose import ROOT


@dataclass(frozen=True)
class Plan:
    """`source` None: nothing is to be copied. `problem`: why nothing can be, with the way out."""

    target: Path
    source: Path | None = None
    problem: str = ""


def plan(environ: Mapping[str, str]) -> Plan:
    """Looks at MODELS_DIR and at the cache that `make model` fills; changes nothing."""
    target = ROOT / Path(environ.get("MODELS_DIR") or "models").expanduser() / model_fetch.NAME
    if not model_fetch.plan(target).fetch:
        return Plan(target)
    cached = model_fetch.model_dir(environ)
    if cached != target and not model_fetch.plan(cached).fetch:
        return Plan(target, cached)
    return Plan(target, problem=f"the small model is not in {target.parent}, nor in the cache: make model, then again")


def copy(chosen: Plan) -> None:
    """Whole or not at all. Raises OSError."""
    if chosen.source is None:
        return
    part = chosen.target.with_name(f".{chosen.target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.parent.mkdir(parents=True, exist_ok=True)
    try:
        shutil.copytree(chosen.source, part)
        shutil.rmtree(chosen.target, ignore_errors=True)
        part.rename(chosen.target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
