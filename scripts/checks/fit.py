"""The memory plan of what is going to run; the arithmetic is scripts/planner's."""

from __future__ import annotations

from dataclasses import replace

from scripts.checks.subject import Subject
from scripts.planner import PlanError
from scripts.planner.catalog import find_model
from scripts.planner.gpus import Gpu
from scripts.planner.memory import Part, Plan, plan_cpu, plan_gpu
from scripts.planner.model import Model
from scripts.planner.numbers import GIB, positive_float
from scripts.planner.settings import apply_profile, checked, default_settings


def find(subject: Subject) -> tuple[Model, Part]:
    """The model's shape and weights: its directory's, or those of a shape that ships. Raises PlanError."""
    wanted = subject.model_name
    if subject.model_dir is not None and subject.model_dir.is_dir():
        wanted = str(subject.model_dir)
    return find_model(wanted, subject.environ)


def plan(subject: Subject, gpu: Gpu | None, used_by_others: int = 0) -> Plan:
    """gpu None: the CPU build. Raises PlanError for what the planner does not know, and for a profile it refuses."""
    if subject.problem:
        raise PlanError(subject.problem)
    model, weights = find(subject)
    settings = checked(apply_profile(default_settings(model, gpu), subject.profile, model), model, cpu=gpu is None)
    if gpu is not None:
        return plan_gpu(model, gpu, settings, weights, used_by_others)
    pool = subject.environ.get("VLLM_CPU_KVCACHE_SPACE")
    if settings.kv_cache_bytes is None and pool:
        bytes_ = round(positive_float(pool, "VLLM_CPU_KVCACHE_SPACE") * GIB)
        settings = replace(settings, kv_cache_bytes=bytes_)
    return plan_cpu(model, settings, weights)
