"""`make model NAME=...`: a model of your choice into MODELS_DIR, from the hub or from a directory.

    python -m scripts.model_fetch_named NAME [--as NAME] [--verify] [--dry-run] [--json]

NAME is org/model, org/model@revision (branch, tag or commit) or a directory. It appears whole, checked and with its
commit written down, or not at all; an interrupted download goes on with the same command. docs/models.md explains.
Exit codes: 0 it is there, 1 it is not (the message says why), 2 wrong usage, 130 or 143 interrupted.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from gateway.wording import several
from scripts import model_fetch
from scripts._children import Terminated, raise_on_termination
from scripts._command import Parser
from scripts.checks.envfile import read_env
from scripts.checks.probes import ROOT
from scripts.model_fetch_rules import RefusedError, Request, parse_request
from scripts.model_fetch_sources import (
    FromDirectory,
    FromHub,
    ModelError,
    Origin,
    Progress,
    check_disk,
    complete,
    install,
)
from scripts.model_fetch_store import Place, StoreError, whole
from scripts.models_hub import HUB, Hub, HubError, read_token
from scripts.planner.numbers import gib
from scripts.planner.settings import PROFILES

_KEPT = "what came so far is kept, and the same command goes on from there"


def environment() -> dict[str, str]:
    """The shell's over .env's, as compose has it."""
    found = read_env(ROOT)
    return {**(found.values if found else {}), **os.environ}


def models_dir(environ: Mapping[str, str]) -> Path:
    return ROOT / Path(environ.get("MODELS_DIR") or "models").expanduser()


def origin_of(request: Request, place: Place, environ: Mapping[str, str], say: Progress) -> Origin:
    """Asks the hub, or reads the directory. Raises RefusedError, ModelError, HubError, OSError."""
    if request.local is None:
        hub = Hub(environ.get("HF_ENDPOINT") or HUB, read_token(environ, ROOT), say.line, say.came)
        return FromHub(hub, request, say)
    return FromDirectory(request.local, say)


def run(args: argparse.Namespace, say: Progress) -> dict[str, object]:
    """The report. Raises RefusedError, StoreError, HubError, ModelError, OSError."""
    request = parse_request(args.name, args.as_name)
    environ = environment()
    place = Place(models_dir(environ), request.name)
    if request.local is not None and request.local.is_relative_to(place.root.resolve()):
        inside = request.local.relative_to(place.root.resolve())
        raise RefusedError(f"it lies in MODELS_DIR already: a profile serves it with `model: /models/{inside}`")
    if request.name == model_fetch.NAME:
        raise RefusedError(f"{request.name} is the demo model's own place (make model without NAME): choose AS=...")
    place.check()
    origin = origin_of(request, place, environ, say)
    target = place.version(origin.version)
    size = sum(file.size for file in origin.files)
    report: dict[str, object] = {"name": request.name, "version": origin.version, "path": str(target), "bytes": size}
    there = whole(target, hashes=args.verify)
    if args.dry_run:
        if not there:
            check_disk(place, origin)
        say.line(f"would {'keep' if there else 'take'} {several(len(origin.files), 'file')}, {gib(size)}, as {target}")
        return report
    with place.alone(lambda: say.line("another run is at work on it: waiting")):
        there = whole(target, hashes=args.verify and there)  # it may have come while we waited
        found = complete(target) if there else install(place, origin)
        served = serve(place, origin.version, say)
    for check in found:
        if check.status == "warn":
            say.line(f"{check.found}: {check.fix}")
    say.line(f"{target} ({'already there' if there else 'whole and checked'}, {gib(size)})")
    if served:
        say.line(next_step(request.name))
    return {**report, "fetched": not there, "serving": served}


def serve(place: Place, version: str, say: Progress) -> bool:
    """Whether `current` leads to the version now."""
    if place.served() == version:
        return True
    if place.promoted():
        say.line(f"{place.current} stays at {place.served()}, which the gate promoted; remove the link to serve this")
        return False
    place.serve(version)
    return True


def next_step(name: str) -> str:
    """Which profiles serve it, or how to make one."""
    path = f"/models/{name}/current"
    line = re.compile(rf"^model:\s*{re.escape(path)}\s*(#|$)", re.MULTILINE)
    fits = [file.stem for file in sorted(PROFILES.glob("*.yaml")) if line.search(file.read_text(encoding="utf-8"))]
    if fits:
        return f"served by ENGINE_PROFILE={' or '.join(fits[:6])}{' ...' if len(fits) > 6 else ''}"
    return f"no profile serves it yet: copy one of configs/engine and write `model: {path}` (make plan MODEL={name})"


def why(error: OSError, place: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space left on the disk of {place}; {_KEPT}"
    return f"{error.filename or place}: {error.strerror or error}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        "model",
        prog="python -m scripts.model_fetch_named",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", help="org/model, org/model@revision, or a directory")
    parser.add_argument("--as", dest="as_name", metavar="NAME", help="its name below MODELS_DIR")
    parser.add_argument("--verify", action="store_true", help="also check every checksum of what is there")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    args = parser.parse_args(argv)
    say = Progress(quiet=args.json)
    report: dict[str, object] = {}
    code, problem = 0, ""
    try:
        report = run(args, say)
    except (RefusedError, StoreError, HubError, ModelError) as error:
        code, problem = 1, str(error)
    except OSError as error:
        code, problem = 1, why(error, models_dir(environment()))
    except KeyboardInterrupt:
        code, problem = 130, f"interrupted; {_KEPT}"
    except Terminated:
        code, problem = 143, f"terminated; {_KEPT}"
    if args.json:
        print(json.dumps({**report, "error": problem or None}))
    elif problem:
        say.problem(problem)
    return code


if __name__ == "__main__":
    raise_on_termination()
    sys.exit(main())
