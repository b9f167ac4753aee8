"""What must be there before anything is tuned: profile, model, engine, card. Reasons are one line each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from scripts.bench import conditions
from scripts.bench.engine import Launcher
from scripts.checks.nvidia import SmiError, read_smi
from scripts.checks.probes import Probes
from scripts.planner import PlanError
from scripts.planner.catalog import directory, find_model
from scripts.planner.gpus import find_gpu, load_gpus
from scripts.planner.memory import plan_cpu, plan_gpu
from scripts.planner.settings import apply_profile, checked, default_settings


def card_of(profile: str) -> str | None:
    """The card that a profile's file name says (`<model>.<card>[.fp8kv].yaml`), `cpu` among them."""
    known = {*load_gpus(), "cpu"}
    return next((part for part in profile.removesuffix(".yaml").split(".")[1:] if part in known), None)


def platform_of(profile: str, probes: Probes | None = None) -> str:
    """`cpu` or `gpu`, as the file's name says; where it says nothing, `gpu` where a driver answers."""
    card = card_of(profile)
    if card is not None:
        return "cpu" if card == "cpu" else "gpu"
    try:
        return "gpu" if read_smi(probes or Probes()) else "cpu"
    except SmiError:
        return "gpu"


def model_of(profile: Mapping[str, Any]) -> str | None:
    """The directory here of the model that a profile names as a container sees it (/models/NAME[/current])."""
    named = str(profile.get("model", ""))
    found = directory(named.removeprefix("/models/").removesuffix("/current")) if named else None
    if found is None or (found / "config.json").is_file():
        return str(found) if found else None
    return str(found / "current")


def planned_kv_tokens(path: Path, profile: Mapping[str, Any], model: str, platform: str) -> int | None:
    """The KV cache that the memory plan expects, in tokens; None for what the planner does not know."""
    card = "cpu" if platform == "cpu" else card_of(path.name)
    try:
        shape, weights = find_model(model)
        gpu = None if card == "cpu" else find_gpu(str(card), load_gpus())
        settings = checked(apply_profile(default_settings(shape, gpu), profile, shape), shape, cpu=gpu is None)
        plan = plan_cpu(shape, settings, weights) if gpu is None else plan_gpu(shape, gpu, settings, weights, 0)
        return plan.capacity().tokens
    except PlanError:
        return None


def problems(
    profile: Path, model: str | None, launcher: Launcher, platform: str, probes: Probes, *, any_card: bool
) -> Iterator[str]:
    """Everything that stands in the way. `any_card`: the card need not be the one in the profile's name."""
    if model is None:
        yield f"{profile.name} names no model that is here: docs/models.md says how to get one, or give --model DIR"
    elif (missing := conditions.model_missing(model)) is not None:
        yield missing
    if (missing := conditions.engine_missing(launcher)) is not None:
        yield missing
    if platform == "gpu":
        yield from _card(profile, probes, any_card=any_card)


def _card(profile: Path, probes: Probes, *, any_card: bool) -> Iterator[str]:
    try:
        smi = read_smi(probes)
    except SmiError as error:
        yield f"nvidia-smi: {error}"
        return
    wanted = card_of(profile.name)
    if smi is None or not smi.cards:
        what = f"{profile.name} is for {_article(wanted)}" if wanted else "--platform gpu"
        yield f"{what}, and no NVIDIA card answers here; --platform cpu tunes it for this processor"
        return
    here = [_key(card.name) for card in smi.cards]
    if wanted is not None and wanted not in here and not any_card:
        names = ", ".join(card.name for card in smi.cards)
        yield f"{profile.name} is for {_article(wanted)}, and here is {names}: a copy named for it, or --platform gpu"
    holders = [holder.name for card in smi.cards for holder in card.holders if holder.name.startswith("VLLM::")]
    if holders:
        yield f"an engine is on the card already ({', '.join(sorted(set(holders)))}): make down first"


def _article(card: str) -> str:
    return f"a card of the kind {card}"


def _key(name: str) -> str:
    try:
        return find_gpu(name, load_gpus()).key
    except PlanError:
        return name
