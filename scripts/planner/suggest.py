"""A profile that fits, derived from one that may not."""

from collections.abc import Callable
from dataclasses import replace

from scripts.planner.memory import Plan
from scripts.planner.settings import Settings

_STEP = 0.01
_LOWEST = 0.5


def suggest(plan: Plan, again: Callable[[Settings], Plan]) -> Plan | None:
    """The nearest plan without problems: less of the card, then a shorter context, then an fp8 cache. None = none.

    again: plans the same model and card with other settings.
    """
    for kv_dtype in dict.fromkeys((plan.settings.kv_cache_dtype, "fp8")):
        trial = again(replace(plan.settings, kv_cache_dtype=kv_dtype))
        while trial.outside < trial.outside_need and trial.settings.utilization - _STEP >= _LOWEST:
            lower = round(trial.settings.utilization - _STEP, 2)
            trial = again(replace(trial.settings, utilization=lower))
        fits = trial.largest_max_model_len // 16 * 16
        if fits < trial.settings.max_model_len and fits >= 16:
            trial = again(replace(trial.settings, max_model_len=fits))
        if not trial.problems:
            return trial
    return None


def profile_text(plan: Plan) -> str:
    """The plan's settings as a vLLM config file."""
    name = plan.model.name
    lines = [
        f"model: /models/{name}/current",
        f"served-model-name: {name}",
        f"gpu-memory-utilization: {plan.settings.utilization:g}",
        f"max-model-len: {plan.settings.max_model_len}",
    ]
    if plan.settings.kv_cache_dtype != "auto":
        lines.append(f"kv-cache-dtype: {plan.settings.kv_cache_dtype}")
    lines.append("enable-prompt-tokens-details: true")
    return "\n".join(lines)
