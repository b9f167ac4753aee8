"""What the engine container's environment says, and the command line it makes (__main__.py lists the variables)."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

PROFILES = Path(os.environ.get("ENGINE_PROFILES", "/configs/engine"))


class ConfigError(Exception):
    """A setting can't be used; the message is one line."""


@dataclass(frozen=True)
class Config:
    """What the environment says."""

    command: tuple[str, ...]
    api_key: str | None
    stall_s: float
    idle_probe_s: float
    start_s: float
    max_starts: int
    port: int


def read_config(env: dict[str, str]) -> Config:
    """Raises ConfigError naming the variable, what it says and what was expected."""
    profile = env.get("ENGINE_PROFILE", "")
    known = sorted(path.stem for path in PROFILES.glob("*.yaml"))
    if not re.fullmatch(r"[\w.-]+", profile) or profile not in known:
        raise ConfigError(f"ENGINE_PROFILE = {profile!r}: expected one of {', '.join(known) or f'{PROFILES} (empty)'}")
    if shutil.which("vllm") is None:
        raise ConfigError(f"PATH = {env.get('PATH', '')!r}: expected the program vllm on it")
    port = int(_number(env, "ENGINE_PORT", 8000))
    arguments = ["--config", str(PROFILES / f"{profile}.yaml"), "--host", "0.0.0.0", "--port", str(port)]  # noqa: S104
    return Config(
        command=("vllm", "serve", *arguments, *shlex.split(env.get("ENGINE_ARGS", ""))),
        api_key=_secret(env.get("ENGINE_API_KEY_FILE", "")),
        stall_s=_number(env, "ENGINE_STALL_S", 60),
        idle_probe_s=_number(env, "ENGINE_IDLE_PROBE_S", 30),
        start_s=_number(env, "ENGINE_START_S", 1800),
        max_starts=int(_number(env, "ENGINE_MAX_STARTS", 3)),
        port=port,
    )


def _number(env: dict[str, str], name: str, default: float) -> float:
    text = env.get(name) or str(default)
    with contextlib.suppress(ValueError):
        if 0 < float(text) < 1e6:
            return float(text)
    raise ConfigError(f"{name} = {text!r}: expected a number above 0")


def _secret(path: str) -> str | None:
    if not path:
        return None
    try:
        return Path(path).read_text(encoding="ascii").strip() or None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"ENGINE_API_KEY_FILE = {path!r}: expected a readable file with one ASCII key") from error
