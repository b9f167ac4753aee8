"""What measurements depend on beside their plan, and what must be there before any is made.

Figures of other flags, texts or versions are not this run's: `changed` tells them apart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from scripts.bench.engine import ROOT, Launcher
from scripts.checks.probes import run

PROBE = "import importlib.metadata as m; print(m.version('vllm'))"


def digest(text: str | bytes) -> str:
    """Twelve hex digits that stand for a text."""
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()[:12]


@cache
def engine_version(launcher: Launcher) -> str | None:
    """vLLM's version, or the image's id with its name; None where neither is there."""
    if launcher.image is None:
        ran = run([launcher.python, "-c", PROBE])
        return ran.out.strip() if ran is not None and ran.code == 0 else None
    ran = run(["docker", "image", "inspect", "--format", "{{.Id}}", launcher.image])
    return f"{launcher.image} {ran.out.strip()[:19]}" if ran is not None and ran.code == 0 else None


def generator_version(launcher: Launcher) -> str | None:
    """Of the load generator, `vllm bench serve`: the python's, whatever serves. None where it has no vLLM."""
    return engine_version(Launcher(launcher.python))


def generator_missing(launcher: Launcher) -> str | None:
    """Why streams can't be measured, in one line."""
    if generator_version(launcher) is not None:
        return None
    return f"streams are measured by vllm bench serve, and {launcher.python} has no vLLM: make .venv-engine/.installed"


def engine_missing(launcher: Launcher) -> str | None:
    """Why no engine can be started, in one line; None where one can."""
    if engine_version(launcher) is not None:
        return None
    if launcher.image is not None:
        return f"the image {launcher.image} is not here, or Docker does not answer: docker pull {launcher.image}"
    return f"{launcher.python} has no vLLM: make .venv-engine/.installed (on a CPU), or --image IMAGE, or --python"


def model_missing(model: str) -> str | None:
    """Why a directory is no model to serve, in one line; None where it is one."""
    folder = Path(model)
    if not folder.is_dir():
        return f"no model in {model}: there is no such directory (docs/models.md says how to get one)"
    if not (folder / "config.json").is_file():
        return f"no model in {model}: it has no config.json"
    return None


def model_identity(model: str) -> dict[str, Any]:
    """A checkpoint's path, a digest of its config, and its weight files' sizes in bytes together."""
    folder = Path(model)
    config = folder / "config.json"
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return {
        "path": str(folder.resolve()),
        "config": digest(config.read_bytes()) if config.is_file() else None,
        "weights": weights,
    }


def gateway_code() -> str:
    """A digest of the gateway's code and of its shipped settings."""
    files = [*sorted((ROOT / "gateway").rglob("*.py")), ROOT / "configs/gateway.yaml"]
    return digest("".join(digest(path.read_bytes()) for path in files))


def changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """`name: old → new` for everything that is not the same, sections with a dot in front of their parts."""
    before, after = dict(_flat(old)), dict(_flat(new))
    return [
        f"{name}: {_short(before.get(name))} → {_short(after.get(name))}"
        for name in [*before, *(name for name in after if name not in before)]
        if before.get(name) != after.get(name)
    ]


def by_name(found: Any) -> Any:
    """Lists of named parts as mappings, so that a difference is told by the part's name."""
    if isinstance(found, Mapping):
        return {name: by_name(value) for name, value in found.items()}
    if isinstance(found, Sequence) and found and all(isinstance(part, Mapping) and "name" in part for part in found):
        return {part["name"]: by_name({k: v for k, v in part.items() if k != "name"}) for part in found}
    return found


def _flat(found: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in found.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", list(value) if isinstance(value, tuple) else value


def _short(value: Any) -> str:
    if value is None:
        return "nothing"
    text = " ".join(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else str(value)
    return text or "nothing"
