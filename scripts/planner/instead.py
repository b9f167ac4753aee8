"""What fits a card where the model asked about does not: shipped profiles first, then a shape that ships."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from scripts.planner import PlanError
from scripts.planner.catalog import SHAPES, find_model
from scripts.planner.gpus import Gpu
from scripts.planner.memory import Part, Plan, plan_gpu
from scripts.planner.model import Model
from scripts.planner.settings import PROFILES, Settings, apply_profile, default_settings, read_profile
from scripts.planner.suggest import suggest

_QUANTIZED = "-awq"


@dataclass(frozen=True)
class Instead:
    """profiles: names of configs/engine, of the same model first. shape: the same model quantized, with no profile."""

    profiles: tuple[str, ...]
    shape: str | None

    def line(self, gpu: Gpu) -> str:
        """What to take, with the command that shows its plan."""
        if self.profiles:
            return f"what fits this card: {', '.join(self.profiles)} (make plan PROFILE={self.profiles[0]})"
        if self.shape:
            return f"what fits this card: {self.shape} (make plan MODEL={self.shape} GPU={gpu.key})"
        return "take a smaller or a quantized model, or a larger card"


def instead(plan: Plan, gpu: Gpu) -> Instead:
    """Each is planned for the same card, with what other programs hold of it."""
    wanted = plan.model.name + _QUANTIZED
    profiles = sorted(stem for stem in _profiles(gpu) if _fits(gpu, plan.used_by_others, PROFILES / f"{stem}.yaml"))
    if own := [stem for stem in profiles if stem.split(".")[0] == wanted]:
        return Instead(tuple(own), None)
    if (SHAPES / f"{wanted}.json").is_file() and _fits(gpu, plan.used_by_others, wanted):
        return Instead((), wanted)
    return Instead(tuple(profiles), None)


def _profiles(gpu: Gpu) -> Iterator[str]:
    return (path.stem for path in PROFILES.glob("*.yaml") if gpu.key in path.stem.split(".")[1:])


def _fits(gpu: Gpu, used: int, what: Path | str) -> bool:
    """what: a profile's file, as it is; or a model's name, with whatever settings."""
    profile = read_profile(what) if isinstance(what, Path) else {"model": what}
    try:
        model, weights = find_model(str(profile.get("model", "")).removesuffix("/current").rsplit("/", 1)[-1])
        settings = apply_profile(default_settings(model, gpu), profile, model)
        again = partial(_plan, model, gpu, weights, used)
        found = again(settings)
        return not found.problems or (isinstance(what, str) and suggest(found, again) is not None)
    except PlanError:
        return False


def _plan(model: Model, gpu: Gpu, weights: Part, used: int, settings: Settings) -> Plan:
    return plan_gpu(model, gpu, settings, weights, used)
