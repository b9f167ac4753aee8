"""The engine settings that move memory, and their defaults on a card."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from scripts.planner import PlanError
from scripts.planner.gpus import Gpu
from scripts.planner.model import Model
from scripts.planner.numbers import human_int, positive_float, positive_int

PROFILES = Path(__file__).parents[2] / "configs" / "engine"
GPU_BLOCK_SIZE = 16
CPU_BLOCK_SIZE = 128
GPU_BLOCK_STEP = 16
CPU_BLOCK_STEP = 32

_ONE_CARD = ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size")
_NOT_MODELLED = {
    "speculative-config": "a draft model's weights and cache",
    "enable-lora": "adapter slots",
    "cpu-offload-gb": "weights left in host memory",
    "quantization": "weights quantized while loading",
    "hf-overrides": "a changed model shape",
    "compilation-config": "other CUDA graphs",
    "performance-mode": "other batch defaults",
}


@dataclass(frozen=True)
class Settings:
    """utilization: share of the card the engine may take. kv_cache_bytes: the pool's size where it is given."""

    utilization: float
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    kv_cache_dtype: str = "auto"
    enforce_eager: bool = False
    attention_backend: str | None = None
    kv_cache_bytes: int | None = None


def default_settings(model: Model, gpu: Gpu | None) -> Settings:
    """vLLM 0.32's defaults for its API server; gpu None means the CPU build.

    The CPU build's sequence and batch limits move no memory that the planner counts, so the GPU's small ones stand in.
    """
    big = gpu is not None and gpu.big
    return Settings(
        utilization=0.92,
        max_model_len=model.max_positions,
        max_num_seqs=1024 if big else 256,
        max_num_batched_tokens=8192 if big else 2048,
        block_size=CPU_BLOCK_SIZE if gpu is None else GPU_BLOCK_SIZE,
    )


def checked(settings: Settings, model: Model, cpu: bool = False) -> Settings:
    """Refuses what the engine would refuse."""
    if not 0 < settings.utilization <= 1:
        raise PlanError(f"gpu-memory-utilization {settings.utilization} is not above 0 and up to 1")
    if settings.max_model_len > model.max_positions:
        raise PlanError(
            f"max-model-len {settings.max_model_len} is above the model's own limit of {model.max_positions}: "
            f"the engine refuses to start; write at most {model.max_positions}"
        )
    step = CPU_BLOCK_STEP if cpu else GPU_BLOCK_STEP
    if settings.block_size % step:
        where = "the CPU backend wants" if cpu else "every CUDA attention backend wants"
        raise PlanError(f"block-size {settings.block_size}: {where} a multiple of {step}")
    return settings


def profile_path(given: str) -> Path:
    """A profile's file: a path to one, or its name in configs/engine."""
    path = Path(given).expanduser()
    return path if path.suffix in (".yaml", ".yml") else PROFILES / f"{given}.yaml"


def read_profile(path: Path) -> dict[str, Any]:
    """A vLLM config file as a flat mapping with dashes in its keys."""
    if not path.is_file():
        shipped = sorted(p.stem for p in PROFILES.glob("*.yaml"))
        near = difflib.get_close_matches(path.stem.lower(), shipped, n=2, cutoff=0.6)
        hint = f"did you mean {' or '.join(near)}?" if near else f"shipped: {', '.join(shipped)}"
        raise PlanError(f"no profile {path}: {hint}")
    try:
        found = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise PlanError(f"{path} is not YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(found, dict):
        raise PlanError(f"{path} should hold `option: value` lines")
    return {str(key).replace("_", "-"): value for key, value in found.items()}


def apply_profile(settings: Settings, profile: Mapping[str, Any], model: Model) -> Settings:
    """The settings a profile gives, over `settings`. Raises PlanError for an option whose memory is not modelled."""
    for key in _ONE_CARD:
        if profile.get(key, 1) != 1:
            raise PlanError(f"{key}: {profile[key]} means more than one card, which the planner does not model")
    for key, reason in _NOT_MODELLED.items():
        if profile.get(key):
            raise PlanError(f"{key}: {profile[key]} means {reason}, which the planner does not model")
    if str(profile.get("dtype", "auto")) in ("float32", "float"):
        raise PlanError("dtype: float32 means weights cast to four bytes, which the planner does not model")
    changes: dict[str, Any] = {}
    for key in ("max-num-seqs", "max-num-batched-tokens", "block-size"):
        if key in profile:
            changes[key.replace("-", "_")] = positive_int(profile[key], key)
    if "max-model-len" in profile:
        length = profile["max-model-len"]
        auto = length == "auto" or human_int(length, "max-model-len") == -1
        changes["max_model_len"] = model.max_positions if auto else positive_int(length, "max-model-len")
    if "gpu-memory-utilization" in profile:
        changes["utilization"] = positive_float(profile["gpu-memory-utilization"], "gpu-memory-utilization")
    if "kv-cache-memory-bytes" in profile:
        changes["kv_cache_bytes"] = positive_int(profile["kv-cache-memory-bytes"], "kv-cache-memory-bytes")
    if "kv-cache-dtype" in profile:
        changes["kv_cache_dtype"] = str(profile["kv-cache-dtype"])
    if "attention-backend" in profile:
        changes["attention_backend"] = str(profile["attention-backend"]).upper()
    changes["enforce_eager"] = bool(profile.get("enforce-eager", settings.enforce_eager))
    return replace(settings, **changes)
