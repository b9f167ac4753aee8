"""Runs a plan into a folder. A finished measurement is a file there, so a run that ended early goes on where it was.

A step that fails (no memory, a flag this release does not know) is recorded with its reason and passed over; the same
command with --retry tries it again.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from scripts.bench import drive, engine, watch, workloads
from scripts.bench.generator import Generator
from scripts.bench.plan import Boot, Plan, PlanError, Row

START_S = 1800
IDLE_S = 30  # for what an earlier measurement, or an interrupted one, left running
PROFILES = engine.ROOT / "configs" / "engine"


@dataclass(frozen=True)
class Attached:
    """A running stack to measure, instead of engines of our own."""

    engine: str
    gateway: str | None
    api_key: str
    tokenizer: str


@dataclass(frozen=True)
class Run:
    """Where a plan runs and with what. `texts` replace the generated chats."""

    plan: Plan
    folder: Path
    launcher: engine.Launcher  # its python runs the load generator, too
    say: Callable[[str], None]
    attached: Attached | None = None
    texts: Sequence[workloads.Request] = ()
    retry: bool = False

    def file(self, boot: Boot, row: Row, repeat: int) -> Path:
        return self.folder / "rows" / f"{boot.name}.{row.name}.{repeat}.json"

    def failure(self, boot: Boot) -> Path:
        return self.folder / "failed" / f"{boot.name}.json"

    def pending(self) -> list[tuple[Boot, Row, int]]:
        """What is still to measure, failed boots left out."""
        return [
            (boot, row, repeat)
            for boot, row, repeat in self.plan.measurements()
            if not self.file(boot, row, repeat).exists() and not self.failure(boot).exists()
        ]


def prepare(run: Run) -> None:
    """Makes the folder, or takes up an earlier run of the same plan there. Raises PlanError where another's is."""
    for name in ("rows", "failed", "logs", "work"):
        (run.folder / name).mkdir(parents=True, exist_ok=True)
    kept, text = run.folder / "plan.json", run.plan.model_dump_json(indent=2)
    if kept.exists() and kept.read_text().rstrip() != text:
        raise PlanError(f"{run.folder} holds another plan's results: choose another folder with --out, or remove it")
    write(kept, text)
    if run.retry:
        shutil.rmtree(run.folder / "failed")
        (run.folder / "failed").mkdir()


def execute(run: Run) -> None:
    """Measures all that is pending. Raises nothing for a failed step; it is in the folder."""
    pending = run.pending()
    if not pending:
        return
    begin, total, passed = time.monotonic(), len(pending), 0
    with contextlib.ExitStack() as whole:
        generator = whole.enter_context(Generator(run.launcher.python))
        for group in run.plan.groups():
            todo = [each for each in pending if each[0] in group]
            with contextlib.ExitStack() as stack:
                targets = _targets(run, [boot for boot in group if any(boot is each[0] for each in todo)], stack)
                for boot, row, repeat in todo:
                    passed += 1
                    if boot.name not in targets:
                        continue
                    try:
                        result = _one(run, boot, row, repeat, *targets[boot.name], generator)
                    except (httpx.HTTPError, OSError) as error:
                        _fail(run, boot, error)
                        del targets[boot.name]
                        continue
                    left = (time.monotonic() - begin) / passed * (total - passed)
                    rate = f"{result['requests_per_s']:.2f} req/s" if "requests_per_s" in result else result["failed"]
                    where = f"[{passed}/{total}, {left / 60:.0f} min left]"
                    run.say(f"  {boot.name}/{row.name} {repeat + 1}/{row.repeats}: {rate}   {where}")


def _fail(run: Run, boot: Boot, error: Exception) -> None:
    write(run.failure(boot), json.dumps({"boot": boot.name, "reason": str(error) or type(error).__name__}))
    run.say(f"  {boot.name} failed and is passed over: {error}")


def _targets(run: Run, boots: Sequence[Boot], stack: contextlib.ExitStack) -> dict[str, tuple[engine.Target, str]]:
    """Boot's name to (what to measure, its tokenizer): the attached stack, or an engine and, where a row wants it, a
    gateway of our own. They start side by side; those that do not come up are in the folder, and not in here.
    """
    starts: list[tuple[Boot, Callable[[], str]]] = []
    for boot in boots:
        run.say(f"{boot.name}: {boot.title or 'starting'}")
        if run.attached is None:
            log = run.folder / "logs" / f"{boot.name}.log"
            environment, arguments = {**run.plan.environment, **boot.environment}, _arguments(run.plan, boot)
            model = boot.model or run.plan.model
            up = stack.enter_context(
                engine.starting(run.launcher, model, arguments, environment=environment, log=log, start_s=START_S)
            )
        else:
            up = functools.partial(str, run.attached.engine)
        starts.append((boot, up))
    found = {}
    for boot, up in starts:
        try:
            target = _look(run, boot, up(), stack)
            write(run.folder / "boots" / f"{boot.name}.json", json.dumps(_facts(run, boot, target), indent=2))
            found[boot.name] = (target, run.attached.tokenizer if run.attached else boot.model or run.plan.model)
        except (engine.StartError, httpx.HTTPError, OSError) as error:
            _fail(run, boot, error)
    return found


def _look(run: Run, boot: Boot, url: str, stack: contextlib.ExitStack) -> engine.Target:
    if run.attached is not None:
        return engine.look(url, run.attached.gateway, run.attached.api_key)
    front = None
    if any(row.through == "gateway" for row in boot.rows):
        log = run.folder / "logs" / f"{boot.name}.gateway.log"
        front = stack.enter_context(engine.gateway(url, boot.gateway, log=log))
    return engine.look(url, front)


def _one(
    run: Run, boot: Boot, row: Row, repeat: int, target: engine.Target, tokenizer: str, generator: Generator
) -> dict[str, Any]:
    seed, nonce = f"{run.plan.seed} {row.name} {repeat}", secrets.token_hex(8)
    requests = workloads.requests(
        row.workload,
        row.requests,
        seed=seed,
        nonce=nonce,
        max_model_len=target.max_model_len,
        answer_tokens=row.answer_tokens,
        texts=run.texts,
    )
    others = watch.until_idle(target.engine, IDLE_S)
    with watch.Watch(target.engine) as looking:
        try:
            figures = drive.measure(
                row, requests, target, generator=generator, tokenizer=tokenizer, folder=run.folder / "work"
            )
        except drive.DriveError as error:
            figures = {"failed": str(error)}
    result = {
        **row.model_dump(),
        "boot": boot.name,
        "repeat": repeat,
        **figures,
        "engine": looking.report(),
        "nonce": nonce,
        "others": others,
    }
    if "failed" in figures:
        # A server that is gone fails the boot, and the rest of its rows with it.
        httpx.get(f"{target.engine}/health", timeout=10).raise_for_status()
    write(run.file(boot, row, repeat), json.dumps(result))
    return result


def _arguments(plan: Plan, boot: Boot) -> tuple[str, ...]:
    """The profile's, the plan's, the boot's: the later win, as the engine reads them."""
    profile = profile_arguments(PROFILES / f"{boot.profile}.yaml") if boot.profile else ()
    return (*profile, *plan.arguments, *boot.arguments)


def _facts(run: Run, boot: Boot, target: engine.Target) -> dict[str, Any]:
    arguments = () if run.attached else _arguments(run.plan, boot)
    facts = {"boot": boot.name, "title": boot.title, "arguments": arguments, "model": target.model}
    return {**facts, **target.facts}


def results(folder: Path, plan: Plan) -> dict[str, list[dict[str, Any]]]:
    """boot/row to its repeats' figures, failed ones left out."""
    found: dict[str, list[dict[str, Any]]] = {}
    for boot, row, repeat in plan.measurements():
        path = folder / "rows" / f"{boot.name}.{row.name}.{repeat}.json"
        if path.exists():
            figures = json.loads(path.read_text())
            if "requests_per_s" in figures:
                found.setdefault(f"{boot.name}/{row.name}", []).append(figures)
    return found


def failures(folder: Path, plan: Plan) -> dict[str, str]:
    """boot, or boot/row repeat, to the reason it has no figures."""
    found = {}
    for path in sorted((folder / "failed").glob("*.json")):
        failed = json.loads(path.read_text())
        found[failed["boot"]] = failed["reason"]
    for path in sorted((folder / "rows").glob("*.json")):
        figures = json.loads(path.read_text())
        if "failed" in figures:
            found[f"{figures['boot']}/{figures['name']} {figures['repeat'] + 1}"] = figures["failed"]
    return found


def hardware(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Processor, memory and cards of this machine; no name of it."""
    cpu = platform.processor() or "unknown"
    with contextlib.suppress(OSError):
        models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        cpu = models[0].partition(":")[2].strip() if models else cpu
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {"cpu": cpu, "cores": len(os.sched_getaffinity(0)), "memory_gib": round(gib, 1), "cards": cards()}


def cards() -> list[str]:
    """Names, memory and drivers of the NVIDIA cards; empty without."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False)
    return answer.stdout.strip().splitlines() if answer.returncode == 0 else []


def write(path: Path, text: str) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        half.write_text(text if text.endswith("\n") else f"{text}\n")
        half.replace(path)
    finally:
        half.unlink(missing_ok=True)


def profile_arguments(path: Path) -> tuple[str, ...]:
    """What a profile (configs/engine) says, as arguments after the model: it then runs with another model's path."""
    return engine.arguments(yaml.safe_load(path.read_text()))
