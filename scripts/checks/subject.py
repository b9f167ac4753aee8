"""What is going to run here: the demo or the stack, with which profile, which card and which model. Pure decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from scripts import demo, model_fetch
from scripts.checks.envfile import read_env, why_missing
from scripts.checks.probes import Probes
from scripts.planner import PlanError
from scripts.planner.gpus import load_gpus
from scripts.planner.settings import PROFILES, read_profile

Purpose = Literal["demo", "stack"]
CPU = "cpu"
_MOUNT = "/models/"  # where the profiles say the models are: MODELS_DIR, as the engine's container sees it


class SubjectError(Exception):
    """A command line that names nothing to check; the message is one line."""


@dataclass(frozen=True)
class Subject:
    """purpose: demo runs natively on the CPU, stack in containers. card: a key of gpus.yaml, `cpu`, or None.

    profile is empty where `problem` says why it can't be read. unset: why the stack's profile is only the demo's, where
    nobody named one. environ: the shell's over the .env file's, as compose
    has it, and with what compose must be told to say anything.
    """

    purpose: Purpose
    profile_path: Path
    profile: Mapping[str, Any]
    problem: str
    card: str | None
    model_dir: Path | None
    models_root: Path
    environ: Mapping[str, str]
    unset: str = ""

    @property
    def on_cpu(self) -> bool:
        return self.card == CPU

    @property
    def model_name(self) -> str:
        """The model's directory name, which is also the name of its shape where one ships."""
        return str(self.profile.get("model", "")).removesuffix("/current").rstrip("/").rsplit("/", 1)[-1]

    def describe(self) -> str:
        where = "the demo, on this host's CPU" if self.purpose == "demo" else "the stack, in containers"
        return f"{where}; profile {self.profile_path.stem}" + (f", the demo's: {self.unset}" if self.unset else "")


def decide(probes: Probes, purpose: str | None, profile: str | None, model: str | None) -> Subject:
    """`stack` where a .env says what to serve, else `demo`; every part can be overruled. Raises SubjectError."""
    env_file = read_env(probes.root)
    environ = {**(env_file.values if env_file else {}), **probes.environ}
    if purpose is None:
        purpose = "stack" if env_file is not None else "demo"
    assert purpose in ("demo", "stack")
    unset = ""
    if profile is None and purpose == "stack" and not environ.get("ENGINE_PROFILE"):
        unset = why_missing("ENGINE_PROFILE", env_file) if env_file else "there is no .env that names one"
    if profile is None:
        profile = (environ.get("ENGINE_PROFILE") if purpose == "stack" else None) or Path(demo.PROFILE).stem
    path = profile_path(profile)
    problem, found = "", {}
    try:
        found = read_profile(path)
    except PlanError as error:
        problem = str(error)
    card = _card(path)
    if purpose == "stack":
        environ["ENGINE_PROFILE"] = path.stem
        environ.setdefault("COMPOSE_PROFILES", "cpu" if card == CPU else "gpu")
    models_root = _absolute(probes.root, environ.get("MODELS_DIR") or "models")
    directory = _model_dir(str(model or found.get("model") or ""), models_root, environ)
    if model is not None and directory is None:
        raise SubjectError(f"--model {model!r}: no such directory")
    return Subject(
        purpose="demo" if purpose == "demo" else "stack",
        profile_path=path,
        profile=found,
        problem=problem,
        card=card,
        model_dir=directory,
        models_root=models_root,
        environ=environ,
        unset=unset,
    )


def profile_path(name: str) -> Path:
    path = Path(name)
    return path if path.suffix in (".yaml", ".yml") else PROFILES / f"{name}.yaml"


def _card(path: Path) -> str | None:
    """The card in <model>.<card>[.variant].yaml."""
    known = {*load_gpus(), CPU}
    return next((part for part in path.stem.split(".")[1:] if part in known), None)


def _absolute(root: Path, text: str) -> Path:
    path = Path(text).expanduser()
    return path if path.is_absolute() else root / path


def _model_dir(said: str, models_root: Path, environ: Mapping[str, str]) -> Path | None:
    """The directory on this host for what a profile or a person calls the model; None where it is not a path."""
    if said.startswith(_MOUNT):
        inside = models_root / said.removeprefix(_MOUNT)
        fetched = model_fetch.model_dir(environ)
        return fetched if not inside.exists() and inside.name == fetched.name else inside
    path = Path(said).expanduser()
    return path if said and path.is_dir() else None
