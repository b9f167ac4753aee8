"""Draw the shipped dashboards with Grafana's own components, against a live Prometheus; no Grafana server.

    python -m scripts.dashboards.preview [--prometheus URL] [--out DIR] [--minutes N] [--boards UID,...] [--json]
                                         [--keep DIR | --replay DIR]

Without --prometheus it runs a stack here (engine on the CPU, gateway, Prometheus with the rules, load) for --minutes
and draws that; --keep leaves its data in DIR, and --replay DIR draws them again. Needs node, npm and Chromium; node
modules go to grafana/preview/node_modules.

Exit codes: 0 all drawn; 1 a panel could not be drawn, or something is missing (one line says what); 2 wrong usage.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from gateway.wording import several
from scripts import _ports, _prometheus
from scripts._children import Terminated, raise_on_termination
from scripts._command import Parser, web_address
from scripts.dashboards import _runbooks, _stage
from scripts.dashboards.__main__ import FOLDER
from scripts.dashboards._board import BOARDS

TOOL = Path("grafana/preview")
WIDE, LAPTOP = 1600, 1280
OVERVIEW = "vllm-overview"


class PreviewError(Exception):
    """It can't be drawn; the message is one line for the user."""


def shots(uids: list[str]) -> list[dict[str, Any]]:
    """What is drawn: each board dark and light, the overview on a laptop's screen as well."""
    wanted = [{"uid": uid, "theme": theme, "width": WIDE} for uid in uids for theme in ("dark", "light")]
    if OVERVIEW in uids:
        wanted.append({"uid": OVERVIEW, "theme": "dark", "width": LAPTOP})
    return wanted


def tools() -> str:
    """Chromium's path, with the node modules installed. Raises PreviewError."""
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            raise PreviewError(f"{program} is missing: apt-get install nodejs npm")
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        raise PreviewError("Chromium is missing: apt-get install chromium fonts-inter fonts-roboto")
    lock, installed = TOOL / "package-lock.json", TOOL / "node_modules" / ".package-lock.json"
    if not installed.exists() or installed.stat().st_mtime < lock.stat().st_mtime:
        command = ["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
        done = subprocess.run(command, cwd=TOOL, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if line.startswith("npm error")]
            raise PreviewError(f"npm ci in {TOOL} failed: {(lines or ['no message'])[-1].removeprefix('npm error ')}")
        installed.touch()
    return found


def look(url: str) -> None:
    """Raises PreviewError where no Prometheus answers."""
    try:
        with httpx.Client(timeout=5, trust_env=False) as client:
            _prometheus.query(client, url, "vector(1)")
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise PreviewError(f"no Prometheus answers at {url}: {error}") from error


@contextlib.contextmanager
def source(args: argparse.Namespace) -> Iterator[tuple[str, _stage.Recording]]:
    """The Prometheus to draw from, and what is shown of it."""
    if args.prometheus:
        now = time.time()
        yield args.prometheus, _stage.Recording(now - args.minutes * 60, now, args.note)
        return
    with contextlib.ExitStack() as stack:
        if args.replay:
            folder = args.replay
        elif args.keep:
            folder = args.keep
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dashboards-preview-")))
        told = folder / "recording.json"
        if not args.replay:
            print(f"preview: a live stack for {several(args.minutes, 'minute', f'{args.minutes:g}')}", file=sys.stderr)
            recorded = _stage.record(folder, args.minutes * 60)
            told.write_text(json.dumps(dataclasses.asdict(recorded)), encoding="utf-8")
        shown = _stage.Recording(**json.loads(told.read_text(encoding="utf-8")))
        url = stack.enter_context(_stage.prometheus(folder, _ports.free_port(), {}))
        yield url, shown


def draw(args: argparse.Namespace, chromium: str, uids: list[str]) -> list[dict[str, Any]]:
    with source(args) as (url, shown):
        wanted = {
            "dashboards": str(FOLDER),
            "out": str(args.out),
            "prometheus": url,
            "chromium": chromium,
            "start": round(shown.start),
            "end": round(shown.end),
            "note": shown.note,
            "shots": shots(uids),
        }
        command = ["node", str(TOOL / "render.mjs"), json.dumps(wanted)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        drawn: list[dict[str, Any]] = json.loads(done.stdout)
    except ValueError:
        raise PreviewError(f"the renderer failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}") from None
    if shutil.which("pngquant"):  # a third of the size
        for file in {shot["file"] for shot in drawn if Path(shot["file"]).exists()}:
            subprocess.run(["pngquant", "--force", "--skip-if-larger", "--ext", ".png", file], check=False)
    return drawn


def problems(drawn: list[dict[str, Any]]) -> list[str]:
    """What could not be drawn, one line each."""
    found = []
    for shot in drawn:
        name = f"{shot['uid']} {shot['theme']} {shot['width']}"
        found += [f"{name}: {text}" for text in (*shot["problems"], *filter(None, [shot.get("error")]))]
        found += [f"{name}: {panel['title']}: {panel['error']}" for panel in shot.get("panels", ()) if panel["error"]]
        found += [
            f"{name}: {panel['title']}: its title is cut off" for panel in shot.get("panels", ()) if panel["cutTitle"]
        ]
    return found


def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        "dashboards-preview",
        prog="python -m scripts.dashboards.preview",
        description="Draw the dashboards against a live Prometheus.",
    )
    parser.add_argument("--prometheus", type=web_address, help="address of a running one, e.g. http://127.0.0.1:9090")
    parser.add_argument("--out", type=Path, default=Path("results/dashboards"), help="folder (default %(default)s)")
    parser.add_argument("--minutes", type=float, default=5, help="how far back (default %(default)s)")
    parser.add_argument(
        "--boards", default=",".join(BOARDS), help="uids, comma-separated (default: all but the runbooks)"
    )
    parser.add_argument("--note", default="", help="a line under each title, with --prometheus")
    parser.add_argument("--json", action="store_true", help="print what became of every panel")
    kept = parser.add_mutually_exclusive_group()
    kept.add_argument("--keep", type=Path, help="leave the live run's data there")
    kept.add_argument("--replay", type=Path, help="draw the data an earlier --keep left")
    args = parser.parse_args(argv)
    uids = args.boards.split(",")
    there = (*BOARDS, _runbooks.UID)
    if unknown := set(uids) - set(there):
        parser.error(f"no such dashboard: {', '.join(sorted(unknown))}; there are {', '.join(there)}")
    try:
        if args.prometheus:
            look(args.prometheus)  # before the tools are fetched, which takes a minute
        drawn = draw(args, tools(), uids)
    except (PreviewError, _stage.StageError) as error:
        print(f"preview: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"preview: {error.filename or ''}: {error.strerror}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, Terminated):
        print("preview: interrupted", file=sys.stderr)
        return 130
    if args.json:
        print(json.dumps(drawn, indent=2))
    else:
        for shot in drawn:
            panels = shot.get("panels", [])
            empty = [panel["title"] for panel in panels if panel["empty"]]
            print(f"{shot['file']}: {several(len(panels), 'panel')}, without data: {', '.join(empty) or 'none'}")
    wrong = problems(drawn)
    for line in wrong:
        print(f"preview: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise_on_termination()
    sys.exit(main())
