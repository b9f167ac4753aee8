"""Finds a model by directory or by name: downloaded ones first, then the shapes that ship with the planner."""

import difflib
import os
from collections.abc import Mapping
from pathlib import Path

from scripts.planner import PlanError
from scripts.planner.checkpoint import read_checkpoint, read_config, read_json_object
from scripts.planner.memory import Part
from scripts.planner.model import Model, parse_model
from scripts.planner.numbers import gib
from scripts.planner.weights import compute_weights

SHAPES = Path(__file__).parent / "shapes"
MISMATCH = 0.02


def find_model(wanted: str, environ: Mapping[str, str] = os.environ) -> tuple[Model, Part]:
    """The model and its weights as the plan's first part. Raises PlanError for a directory that is not whole."""
    found = directory(wanted, environ)
    if found is not None:
        return _from_directory(found, wanted)
    shape = SHAPES / f"{wanted}.json"
    if "/" in wanted or not shape.is_file():
        names = sorted(path.stem for path in SHAPES.glob("*.json"))
        near = difflib.get_close_matches(wanted.lower(), names, n=2, cutoff=0.6)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise PlanError(f"no model {wanted!r}: {hint}give a directory with a config.json, or one of {', '.join(names)}")
    model = parse_model(read_json_object(shape), wanted)
    return model, _computed(model, "no checkpoint read")


def directory(wanted: str, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Where a model lies: a path, or a name below MODELS_DIR or in the user's cache. None where it is not here."""
    path = Path(wanted).expanduser()
    if path.is_dir():
        return path
    if "/" in wanted:
        return None
    root = Path(environ.get("MODELS_DIR", "models"))
    cache = Path(environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "vllm-stack" / "models"
    for candidate in (root / wanted / "current", root / wanted, cache / wanted):
        if (candidate / "config.json").is_file():
            return candidate
    return None


def _from_directory(directory: Path, wanted: str) -> tuple[Model, Part]:
    model = parse_model(read_config(directory), wanted.rstrip("/").split("/")[-1])
    checkpoint = read_checkpoint(directory)
    if checkpoint is None:
        return model, _computed(model, f"{directory} holds no weights yet")
    size = checkpoint.loaded_bytes(model)
    expected = compute_weights(model).total
    if abs(size - expected) > MISMATCH * expected:
        raise PlanError(
            f"{directory}: the files hold {gib(size)} of weights, config.json describes {gib(expected)}: "
            "they are not of one model"
        )
    return model, Part(
        "weights", size, "read", f"{checkpoint.files} file{'s' * (checkpoint.files != 1)} of {directory}"
    )


def _computed(model: Model, why: str) -> Part:
    kind = model.quant.label if model.quant else model.dtype
    return Part("weights", compute_weights(model).total, "computed", f"{kind}, {why}")
