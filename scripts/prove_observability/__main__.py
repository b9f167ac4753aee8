"""`make prove-observability`: dashboards, rules and alerts against a real stack, real load and real faults.

    python -m scripts.prove_observability [--ci] [--again] [--publish] [--only NAME]... [--json PATH] [--dry-run]

Without options it is the whole proof (about 20 minutes on two cores): every query live, a second time with two API
servers, and every alert made to fire and to clear. It writes results/observability.json; --publish also puts that into
docs/results and writes docs/alerts-proof.md. --ci leaves out the two API servers and what takes long. --only NAME runs
faults by name or alert. --again keeps what an earlier result proves and runs the rest.
Exit codes: 0 proven, 1 not (each problem a line), 2 wrong usage, 3 something is missing, 130 interrupted.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from gateway.wording import several
from scripts import model_fetch
from scripts._children import Terminated, raise_on_termination
from scripts._command import Parser
from scripts.prove_observability import faults_monitoring, faults_replicas, faults_serving, live, queries, report
from scripts.prove_observability.faults import Fault, Outcome, exercise
from scripts.prove_observability.lab import Lab, LabError, program
from scripts.prove_observability.prom import POLL_S, LateError, until
from scripts.prove_observability.traffic import MIX, Front, load, long_answer, streamed_chat

RESULT = Path("results/observability.json")
PUBLISHED, DOCUMENT = Path("docs/results/observability.json"), Path("docs/alerts-proof.md")
FAULTS = (*faults_monitoring.FAULTS, *faults_serving.FAULTS, *faults_replicas.FAULTS)
SCALE = 0.01
DISK_MIB = 24
ASK_S = 120
STATS = b"Avg prompt throughput"
ONE, TWO = "one API server", "two API servers"
SECOND_API_SERVER = ("--api-server-count", "2")


@dataclass(frozen=True)
class Plan:
    """What a run does: rounds of queries by name, faults, and whether that is all there is."""

    rounds: tuple[str, ...]
    faults: tuple[Fault, ...]
    whole: bool


def plan(args: argparse.Namespace, earlier: dict[str, Any] | None) -> Plan:
    """Decides. `earlier`: a result whose proven parts are kept."""
    if args.only:
        return Plan((), tuple(fault for fault in FAULTS if _named(fault, args.only)), whole=False)
    rounds: tuple[str, ...] = (ONE,) if args.ci else (ONE, TWO)
    faults = () if args.queries_only else tuple(fault for fault in FAULTS if fault.ci or not args.ci)
    if earlier is not None:
        sound = {run["run"] for run in earlier["queries"] if not run["problems"]}
        bad = {one["fault"] for one in earlier["alerts"] if one["problem"]}
        good = {one["fault"] for one in earlier["alerts"]} - bad
        rounds = () if sound >= set(rounds) else rounds  # the second is told against the first
        faults = tuple(fault for fault in faults if fault.name not in good)
    return Plan(rounds, faults, whole=not (args.ci or args.queries_only))


def _named(fault: Fault, names: Sequence[str]) -> bool:
    return fault.name in names or any(each.alert in names for each in fault.expected)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("prove-observability", description=__doc__.split("\n")[0])
    parser.add_argument("--ci", action="store_true", help="one engine, the quick faults")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="faults by name or alert")
    parser.add_argument("--queries-only", action="store_true", help="no faults")
    parser.add_argument("--again", action="store_true", help="keep what the result already proves, run the rest")
    parser.add_argument("--json", type=Path, default=RESULT, help="where the result goes (default %(default)s)")
    parser.add_argument("--publish", action="store_true", help=f"also into {PUBLISHED} and {DOCUMENT}")
    parser.add_argument("--keep", action="store_true", help="leave logs and Prometheus's data, and say where")
    parser.add_argument("--dry-run", "--list", action="store_true", help="say what would be done, and start nothing")
    args = parser.parse_args(argv)
    try:
        earlier = json.loads(args.json.read_text(encoding="utf-8")) if args.again else None
    except (OSError, ValueError) as error:
        parser.error(f"--again: {args.json} has no earlier result ({error})")
    chosen = plan(args, earlier)
    if args.only and not chosen.faults:
        parser.error(f"no fault is called {', '.join(args.only)}; --list lists them")
    if args.dry_run:
        for name in chosen.rounds:
            print(f"every query, {name}")
        for fault in chosen.faults:
            print(f"{fault.name}: {fault.how} → {', '.join(each.alert for each in fault.expected)}")
        return 0
    try:
        needed()
        with folder(keep=args.keep) as place:
            result = prove(place, chosen, earlier)
    except LabError as error:
        print(f"prove-observability: {error}", file=sys.stderr)
        return 3
    except (LateError, httpx.HTTPError) as error:
        print(f"prove-observability: {error}", file=sys.stderr)
        return 1
    return publish(result, args)


def publish(result: dict[str, Any], args: argparse.Namespace) -> int:
    """Writes what came of it, and says it; the exit code."""
    args.json.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, indent=1, ensure_ascii=False) + "\n"
    args.json.write_text(text, encoding="utf-8")
    for problem in result["problems"]:
        print(f"FAIL  {problem}")
    if args.publish and result["ok"]:
        PUBLISHED.write_text(text, encoding="utf-8")
        DOCUMENT.write_text(report.document(result), encoding="utf-8")
    raised = sum(outcome["problem"] is None for outcome in result["alerts"])
    asked = sum(sum(run["asked"].values()) for run in result["queries"])
    problems = several(len(result["problems"]), "problem")
    print(f"{asked} queries asked, {several(raised, 'alert')} raised and cleared, {problems}; {args.json}")
    return 0 if result["ok"] else 1


def needed() -> None:
    """Raises LabError for what is not there."""
    for name in ("prometheus", "alertmanager", "node-exporter"):
        program(name)
    if model_fetch.plan(model_fetch.model_dir()).fetch:
        raise LabError(f"the model is not in {model_fetch.model_dir()}: make model")


@contextmanager
def folder(*, keep: bool) -> Iterator[Path]:
    """A fresh folder with a small file system in it at disk/."""
    place = Path(tempfile.mkdtemp(prefix="prove-"))
    disk, image = place / "disk", place / "disk.img"
    disk.mkdir()
    try:
        with image.open("wb") as file:
            file.truncate(DISK_MIB << 20)
        for command in (("mkfs.ext4", "-q", "-m", "0", str(image)), ("mount", "-o", "loop", str(image), str(disk))):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise LabError(f"{command[0]}, for a small file system to fill, needs root: {done.stderr.strip()}")
        yield place
    finally:
        subprocess.run(("umount", str(disk)), capture_output=True, check=False)
        if keep:
            print(f"kept: {place}")
        else:
            shutil.rmtree(place, ignore_errors=True)


def prove(place: Path, chosen: Plan, earlier: dict[str, Any] | None) -> dict[str, Any]:
    """Runs it all; returns the result, with what is kept of the earlier one."""
    began = time.monotonic()
    asked: list[live.Asked] = []
    outcomes: list[Outcome] = []
    broken: list[str] = []
    lab = Lab(place, SCALE)
    try:
        say(began, "starting engine, gateway and monitoring")
        start(lab)
        say(began, "up")
        if ONE in chosen.rounds:
            asked.append(ask(lab, ONE, began))
        for fault in chosen.faults:
            lab.alive()
            found = exercise(fault, lab)
            outcomes += found
            for one in found:
                told = one.problem or f"fired {one.fired_s} s, cleared {one.cleared_s} s"
                say(began, f"{fault.name}: {one.alert}: {told}")
        if TWO in chosen.rounds:
            lab.engine_with(*SECOND_API_SERVER)
            lab.gateway_ready()
            asked.append(ask(lab, TWO, began))
    except (LabError, LateError) as error:
        broken.append(str(error))
    except (KeyboardInterrupt, Terminated):
        broken.append("interrupted: --again goes on")
    finally:
        alerts = [query for query in queries.rules(lab.folder / "rules") if query.kind == "alert"]
        lab.close()
    known = [(queries.name_of(query), dict(query.labels)["severity"]) for query in alerts] if chosen.whole else []
    run = {
        "date": str(datetime.datetime.now(tz=datetime.UTC).date()),
        "machine": f"{several(os.cpu_count() or 1, 'core')}, {psutil.virtual_memory().total >> 30} GiB, no GPU",
        "window_scale": SCALE,
        "seconds": round(time.monotonic() - began),
        "rounds": list(chosen.rounds),
        "faults": [fault.name for fault in chosen.faults],
    }
    return report.result(run, asked, outcomes, known, broken, earlier)


def start(lab: Lab) -> None:
    """Everything up, and a key each for a client and for one that may ask three times a minute."""
    lab.add_key("proof")
    lab.add_key("limited", "--requests-per-minute", "3")
    lab.engine()
    lab.gateway()
    lab.monitoring()
    lab.engine_up()
    lab.gateway_ready()


def ask(lab: Lab, run: str, began: float) -> live.Asked:
    """Load of every kind, and every query, until all have something to say or ASK_S are over."""
    start_s, log = time.time(), lab.folder / "engine.log"
    logged = log.stat().st_size
    proof, limited = (Front(lab.url("gateway"), lab.keys[name]) for name in ("proof", "limited"))
    until_s = time.monotonic() + ASK_S
    with load(proof, *MIX), load(limited, streamed_chat, pace_s=0.5):
        with load(proof, *(long_answer,) * 14):  # one too many
            overload = 'sum(gateway_shed_total{cause!~"key_.*|no_engine"}) > 0'
            until(lambda: lab.prometheus.instant(overload), overload, ASK_S)
        asked = live.ask(lab, run, start_s)
        while asked.problems and time.monotonic() < until_s:
            time.sleep(POLL_S)
            asked = live.ask(lab, run, start_s)
    said = log.read_bytes()[logged:].count(STATS)
    say(
        began,
        f"{run}: {len(asked.verdicts)} queries, {asked.mutants} renamed, {several(len(asked.problems), 'problem')}",
    )
    for problem in asked.problems:
        say(began, f"  {problem}")
    return dataclasses.replace(asked, stats_lines=said)


def say(began: float, text: str) -> None:
    print(f"{time.monotonic() - began:6.0f} s  {text}", flush=True)


if __name__ == "__main__":
    raise_on_termination()
    try:
        sys.exit(main())
    except (KeyboardInterrupt, Terminated):
        print("prove-observability: interrupted; nothing is left running", file=sys.stderr)
        sys.exit(130)
