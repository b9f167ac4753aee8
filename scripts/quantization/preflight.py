"""Everything that can be known before a weight is loaded: one `Check` a question, with the setting to change."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from scripts.checks import Check, fail, judged, ok
from scripts.checks.model import template, tokenizer
from scripts.planner import PlanError
from scripts.planner.checkpoint import read_checkpoint
from scripts.planner.model import Model
from scripts.planner.numbers import GIB, gib
from scripts.quantization import estimate, producers
from scripts.quantization.config import GROUPS, Config
from scripts.quantization.source import Located, read_json


@dataclass(frozen=True)
class Machine:
    """Bytes. ram_free: what may still be taken, the container's limit counted in."""

    disk_free: int
    ram_free: int


def machine(models: Path) -> Machine:
    """This machine, now."""
    there = models
    while not there.exists():
        there = there.parent
    disk = psutil.disk_usage(str(there)).free
    return Machine(disk, min(psutil.virtual_memory().available, _cgroup_free()))


def _cgroup_free() -> int:
    """What the container's memory limit leaves; without one, no bound."""
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 1 << 62
    return max(int(limit) - used, 0) if limit.isdecimal() else 1 << 62


def rules(config: Config) -> list[Check]:
    """What the settings say for themselves."""
    weights = config.weights
    group = "weights.group_size"
    checks = [
        judged(
            weights.w_bit == 4,
            "weights.w_bit",
            "4",
            str(weights.w_bit),
            "set weights.w_bit: 4, the engine loads no other",
        ),
        judged(
            weights.group_size in GROUPS,
            group,
            "128, 64 or 32",
            str(weights.group_size),
            f"set {group}: 128, or 64 or 32 where a width of the model is no multiple of it",
        ),
        judged(
            weights.zero_point,
            "weights.zero_point",
            "true",
            str(weights.zero_point).lower(),
            "set weights.zero_point: true; without zero points the engine reads other weights than were written",
        ),
    ]
    if config.producer == "autoawq":
        version = "weights.version"
        fix = f"set {version}: GEMM, the one layout that the engine loads"
        checks.append(judged(weights.version.upper() == "GEMM", version, "GEMM", weights.version, fix))
    return checks


def model(raw: Mapping[str, Any], config: Config) -> list[Check]:
    """The source's config.json against producer and group."""
    kind = str(raw.get("model_type", "none"))
    expected = f"one of {', '.join(producers.MODEL_TYPES)}"
    fix = f"take a model of those families: {config.producer} is not known to do this one right"
    checks = [judged(kind in producers.MODEL_TYPES, "source.architecture", expected, kind, fix)]
    if raw.get("quantization_config"):
        method = str(dict(raw["quantization_config"]).get("quant_method", "unknown"))
        fix = "name the original in source.model; quantizing twice only adds the errors"
        return [*checks, fail("source.precision", "16-bit weights", f"{method}: it is quantized already", fix)]
    try:
        found = estimate.shape(raw)
    except PlanError as error:
        return [
            *checks,
            fail("source.config", "a config.json that describes the layers", str(error), "download it again"),
        ]
    return [*checks, widths(found, config.weights.group_size), *_window(raw, config)]


def _window(raw: Mapping[str, Any], config: Config) -> list[Check]:
    """AutoAWQ gives every layer and every part of the blocks the first one's mask; without one, that is right."""
    window = raw.get("sliding_window")
    if config.producer != "autoawq" or not isinstance(window, int) or raw.get("use_sliding_window") is False:
        return []
    name, found = "calibration.block_tokens", config.calibration.block_tokens
    fix = f"set {name} lower: within the model's sliding window no mask is needed, and AutoAWQ knows only one"
    return [judged(found < window, name, f"fewer than the window of {window}", str(found), fix)]


def widths(found: Model, group: int) -> Check:
    """Every input width is a whole number of groups, every output width of the producer's own steps (64)."""
    name = "weights.group_size"
    wide = estimate.widths(found)
    if group < 1:
        return fail(name, "a group above 0", str(group), f"set {name}: 128")
    wrong = {key: width for key, width in wide.items() if width % group}
    told = ", ".join(f"{key} {width}" for key, width in wide.items())
    if not wrong:
        return ok(name, f"a group that divides {told}", str(group))
    fitting = next((size for size in GROUPS if not any(width % size for width in wide.values())), None)
    fix = f"set {name}: {fitting}" if fitting else "no group the engine loads divides them: take another model"
    bad = ", ".join(f"{key} {width}" for key, width in wrong.items())
    return fail(name, f"a group that divides {told}", f"{group}, which does not divide {bad}", fix)


def directory(where: Path) -> list[Check]:
    """Weights whole, tokenizer and chat template there."""
    return [_weights(where), tokenizer(where), _required(template(where))]


def _weights(where: Path) -> Check:
    name, expected = "source.weights", "every safetensors file, whole"
    for path in where.glob("*.safetensors"):
        with path.open("rb") as file:
            if file.read(24).startswith(b"version https://git-lfs"):
                return fail(
                    name, expected, f"{path.name} is a Git LFS pointer, not weights", "git lfs pull, in that clone"
                )
    try:
        found = read_checkpoint(where)
    except PlanError as error:
        return fail(name, expected, str(error), "download the named files again")
    if found is None:
        return fail(name, expected, f"{where} holds no weights", "give a directory with *.safetensors, or a hub id")
    size = sum(tensor.size for tensor in found.tensors.values())
    return ok(
        name, expected, f"{found.files} file{'s' * (found.files != 1)}, {len(found.tensors)} tensors, {gib(size)}"
    )


def _required(found: Check) -> Check:
    """What the doctor only minds stops this job: it would calibrate on texts in no form the model is asked in."""
    if found.status != "warn":
        return found
    fix = "take an instruct model, or put its chat_template.jinja into the directory"
    return fail(found.name, found.expected, found.found.split(":")[0], fix)


def room(need: estimate.Need, here: Machine, config: Config, models: Path, where: Located) -> list[Check]:
    """Disk and host memory. The card's is judged in `vram`."""
    disk = need.disk + (need.weights_before if where.on_hub else 0)
    checks = [
        judged(
            disk <= here.disk_free,
            "room.disk",
            f"{gib(disk)} free in {models}",
            f"{gib(here.disk_free)} free",
            "free some, or set MODELS_DIR to a larger disk",
        ),
        judged(
            need.ram <= here.ram_free,
            "memory.ram",
            f"{gib(need.ram)} of free memory",
            f"{gib(here.ram_free)} free",
            "close other programs, or give the container more, or lower calibration.blocks (activations grow with it)",
        ),
    ]
    limit = config.memory.ram_gib
    if limit is not None:
        fix = f"set memory.ram_gib: {need.ram / GIB:.0f} or more, or lower calibration.blocks"
        checks.append(
            judged(need.ram <= limit * GIB, "memory.ram_gib", f"{gib(need.ram)} or more", f"{limit:g} GiB", fix)
        )
    return checks


def writable(models: Path, name: str) -> Check:
    """The result's place, before an hour of work asks for it."""
    there = models / name
    while not there.exists():
        there = there.parent
    expected = f"a MODELS_DIR this user may write ({models})"
    fix = f"chown it to uid {os.getuid()}, or set MODELS_DIR to a directory of yours"
    good = os.access(there, os.W_OK | os.X_OK)
    return judged(good, "room.models", expected, f"{there} is {'' if good else 'not '}writable", fix)


def refused(checks: Iterable[Check]) -> list[Check]:
    return [check for check in checks if check.status == "fail"]


def raw_config(where: Path) -> dict[str, Any]:
    return read_json(where / "config.json")
