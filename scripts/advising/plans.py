"""What the memory planner says to advice about the KV pool: tokens at a higher utilization, and in an fp8 cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gateway.advice_engine import MOST_UTILIZATION
from gateway.findings import Finding
from scripts.planner import PlanError
from scripts.planner.catalog import find_model
from scripts.planner.gpus import find_gpu, load_gpus
from scripts.planner.memory import plan_gpu
from scripts.planner.settings import PROFILES, Settings, apply_profile, default_settings, read_profile


def planned(findings: Sequence[Finding], profile: str) -> list[Finding]:
    """The findings, with the profile's own numbers where more pool is advised. Raises PlanError."""
    if not any(_wants_pool(finding) for finding in findings):
        return list(findings)
    sizes = pool_sizes(profile)
    said = "; ".join(f"{what}: {tokens:,} tokens" for what, tokens in sizes.items())
    return [
        replace(
            finding,
            change=f"{finding.change} By the memory plan of {profile}: {said}.",
            numbers={**finding.numbers, "planned_pool_tokens": sizes},
        )
        if _wants_pool(finding)
        else finding
        for finding in findings
    ]


def _wants_pool(finding: Finding) -> bool:
    return finding.kind == "kv_pressure" or (
        finding.kind == "prefix_misses" and finding.numbers.get("cause") == "evicted"
    )


def pool_sizes(profile: str) -> dict[str, int]:
    """Tokens of the KV pool as the profile has it, and with either change. A plan with problems is left out."""
    path = PROFILES / f"{profile}.yaml"
    if not path.is_file():
        raise PlanError(f"{path} does not exist: give a profile of configs/engine by its name")
    settings_in_file = read_profile(path)
    card = next((part for part in path.stem.split(".")[1:] if part in load_gpus()), None)
    if card is None:
        raise PlanError(f"{profile} names no card of configs/gpus.yaml, and a CPU's pool is what it is set to")
    gpu = find_gpu(card, load_gpus())
    model, weights = find_model(str(settings_in_file.get("model", "")).removesuffix("/current").rsplit("/", 1)[-1])
    now = apply_profile(default_settings(model, gpu), settings_in_file, model)
    higher = min(MOST_UTILIZATION, round(now.utilization + 0.03, 2))
    trials: dict[str, Settings] = {f"now, at {now.utilization:g}": now}
    if higher > now.utilization:
        trials[f"at {higher:g}"] = replace(now, utilization=higher)
    if now.kv_cache_dtype == "auto":
        trials["with an fp8 cache"] = replace(now, kv_cache_dtype="fp8")
    plans = {what: plan_gpu(model, gpu, settings, weights) for what, settings in trials.items()}
    return {what: plan.capacity().tokens for what, plan in plans.items() if not plan.problems or what.startswith("now")}
