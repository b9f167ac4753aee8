"""The stack's secrets: files in secrets/, made once, never in .env, on a command line or in an image.

    secrets/keys.json                       digests of the clients' keys (`make keys`); the gateway sees this directory
    secrets/private/admin_token             for drain and /status on the gateway's admin port
    secrets/private/engine_api_key          what the engine asks the gateway for
    secrets/private/grafana_admin_password

Containers run as users of their own, so the files are readable by everybody; private/ lets only its owner in. Docker
binds each file by itself, past that directory. keys.json can't be bound so: `make keys` replaces it, and a bound file
stays the old one. The gateway sees its directory, whose mode is therefore 711 and not 700: others may go through to a
name they know, and find digests, but not look around.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from scripts._compose import ROOT

LOAD_KEY = "load_api_key"  # the demo load's own; made only where that profile is on
NAMES = ("admin_token", "engine_api_key", "grafana_admin_password")
FIRST_KEY, LOAD_NAME = "default", "load"


FOLDER_MODE, PRIVATE_MODE = 0o711, 0o700


class SecretsError(Exception):
    """The secrets can't be made or used; the message is one line."""


@dataclass(frozen=True)
class Plan:
    """What is missing."""

    folder: Path
    missing: tuple[str, ...]
    first_key: bool
    load_key: bool = False


def folder(environ: Mapping[str, str]) -> Path:
    return ROOT / Path(environ.get("SECRETS_DIR") or "secrets").expanduser()


def plan(where: Path, load: bool = False) -> Plan:
    """Looks; changes nothing. Raises SecretsError for a secret that is there and empty, or that others may read."""
    private = where / "private"
    if private.is_dir() and stat.S_IMODE(private.stat().st_mode) & 0o077:
        raise SecretsError(f"{private} lets others in: chmod 700 {private}")
    if where.is_dir() and not stat.S_IMODE(where.stat().st_mode) & 0o001:
        raise SecretsError(f"{where} keeps the gateway's user out: chmod 711 {where}")
    missing = tuple(name for name in NAMES if not (private / name).exists())
    for name in set(NAMES) - set(missing):
        path = private / name
        if not path.is_file() or not path.stat().st_size:
            raise SecretsError(f"{path} is empty: write one line into it, or remove it and one is made")
    return Plan(where, missing, not (where / "keys.json").exists(), load and not (private / LOAD_KEY).exists())


def make(chosen: Plan) -> str | None:
    """Writes what is missing; the first API key if one was made: it is nowhere else. Raises SecretsError, OSError."""
    private = chosen.folder / "private"
    make_folder(chosen.folder)
    private.mkdir(mode=PRIVATE_MODE, exist_ok=True)
    for name in chosen.missing:
        _write(private / name, secrets.token_urlsafe(32))
    keys = chosen.folder / "keys.json"
    first = _key("add", FIRST_KEY, keys) if chosen.first_key else None
    if chosen.load_key:
        known = f'"{LOAD_NAME}"' in keys.read_text(encoding="utf-8")
        _write(private / LOAD_KEY, _key("rotate" if known else "add", LOAD_NAME, keys))
    return first


def make_folder(path: Path) -> None:
    """The directory of keys.json where it is not there yet; one that is there keeps its mode. Raises OSError."""
    if not path.is_dir():
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(FOLDER_MODE)  # whatever the umask is


def _write(path: Path, secret: str) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "w") as file:
        file.write(secret + "\n")
    path.chmod(0o644)


def _key(action: str, name: str, path: Path) -> str:
    command = [sys.executable, "-m", "scripts.keys", action, name, "--json", "--file", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SecretsError(done.stderr.strip() or "make keys failed")
    return str(json.loads(done.stdout)["key"])
