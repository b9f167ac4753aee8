"""Runs a plan into a folder. A finished measurement is a file there, so a run that ended early goes on where it was.

A step that fails (no memory, a flag this release does not know) is recorded with its reason and passed over; the same
command with --retry tries it again.
"""

from __future__ import annotations

import contextlib
import functools
import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from scripts.bench import conditions, drive, engine, watch, workloads
from scripts.bench.folder import Folder, write
from scripts.bench.generator import Generator
from scripts.bench.hardware import hardware
from scripts.bench.plan import Boot, Plan, Row
from scripts.planner.settings import profile_path, read_profile

START_S = 1800
IDLE_S = 30  # for what an earlier measurement, or an interrupted one, left running


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
    folder: Folder
    launcher: engine.Launcher  # its python runs the load generator, too
    say: Callable[[str], None]
    attached: Attached | None = None
    texts: Sequence[workloads.Request] = ()


def missing(run: Run, todo: Sequence[tuple[Boot, Row, int]]) -> str | None:
    """What must be there before any of `todo` is measured, and is not; None where all is.

    A model that only some steps want fails those alone.
    """
    if run.attached is None:
        why = [
            conditions.model_missing(boot.model or run.plan.model)
            for boot in {each[0].name: each[0] for each in todo}.values()
        ]
        if why and all(why):
            return why[0]
        if todo and (reason := conditions.engine_missing(run.launcher)) is not None:
            return reason
    if any(row.stream for _, row, _ in todo):
        if run.attached is not None and (reason := conditions.model_missing(run.attached.tokenizer)) is not None:
            return f"--tokenizer: {reason}"
        return conditions.generator_missing(run.launcher)
    return None


def conditions_of(run: Run) -> dict[str, Any]:
    """What figures depend on. Raises StartError where a running engine does not answer, the planner's PlanError for
    a profile that can't be read."""
    models = {boot.model or run.plan.model for boot in run.plan.boots}
    profiles = {boot.profile: read_profile(profile_path(boot.profile)) for boot in run.plan.boots if boot.profile}
    gateway = any(row.through == "gateway" for boot in run.plan.boots for row in boot.rows)
    now: dict[str, Any] = {
        "plan": conditions.by_name(run.plan.model_dump(mode="json", exclude={"model"})),
        "generator": conditions.generator_version(run.launcher),
        "texts": conditions.digest(repr(run.texts)) if run.texts else None,
        "machine": hardware(),
    }
    if run.attached is None:
        engines = {"version": conditions.engine_version(run.launcher), "profiles": profiles}
        now |= {"engine": engines, "models": {model: conditions.model_identity(model) for model in sorted(models)}}
        return now | {"gateway": conditions.gateway_code() if gateway else None}
    target = engine.look(run.attached.engine, run.attached.gateway, run.attached.api_key)
    seen = {"url": target.engine, "model": target.model, "max_model_len": target.max_model_len, **target.facts}
    return now | {
        "engine": {**seen, "started": watch.started(target.engine)},
        "gateway": run.attached.gateway,
        "tokenizer": str(Path(run.attached.tokenizer).resolve()),
    }


def execute(run: Run) -> None:
    """Measures all that is pending. Raises nothing for a failed step; it is in the folder. OSError where that takes no
    more."""
    pending = run.folder.pending()
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
                    except httpx.HTTPError as error:
                        _fail(run, boot, f"gone during {row.name} {repeat + 1}: {error or type(error).__name__}")
                        del targets[boot.name]
                        continue
                    left = (time.monotonic() - begin) / passed * (total - passed)
                    rate = f"{result['requests_per_s']:.2f} req/s" if "requests_per_s" in result else result["failed"]
                    meant = "failed as expected: " if "failed" in result and row.expect == "failure" else ""
                    where = f"[{passed}/{total}, {left / 60:.0f} min left]"
                    run.say(f"  {boot.name}/{row.name} {repeat + 1}/{row.repeats}: {meant}{rate}   {where}")


def _fail(run: Run, boot: Boot, reason: str, *, came_up: bool = False) -> None:
    write(run.folder.failure(boot), json.dumps({"boot": boot.name, "reason": reason, "came_up": came_up}))
    meant = boot.expect == "failure" and not came_up
    run.say(f"  {boot.name} {'failed as expected' if meant else 'failed and is passed over'}: {reason}")


def _targets(run: Run, boots: Sequence[Boot], stack: contextlib.ExitStack) -> dict[str, tuple[engine.Target, str]]:
    """Boot's name to (what to measure, its tokenizer): the attached stack, or an engine and, where a row wants it, a
    gateway of our own. They start side by side; those that do not come up are in the folder, and not in here.
    """
    starts: list[tuple[Boot, Callable[[], str]]] = []
    for boot in boots:
        if run.attached is None and (missing := conditions.model_missing(boot.model or run.plan.model)) is not None:
            _fail(run, boot, missing)
            continue
        run.say(f"{boot.name}: {boot.title or 'starting'}")
        if run.attached is None:
            log = run.folder.path / "logs" / f"{boot.name}.log"
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
            if boot.expect == "failure":
                _fail(run, boot, "meant to fail, and it came up", came_up=True)
                continue
            write(run.folder.path / "boots" / f"{boot.name}.json", json.dumps(_facts(run, boot, target), indent=2))
            found[boot.name] = (target, run.attached.tokenizer if run.attached else boot.model or run.plan.model)
        except (engine.StartError, httpx.HTTPError) as error:
            _fail(run, boot, str(error) or type(error).__name__)
    return found


def _look(run: Run, boot: Boot, url: str, stack: contextlib.ExitStack) -> engine.Target:
    if run.attached is not None:
        return engine.look(url, run.attached.gateway, run.attached.api_key)
    front = None
    if any(row.through == "gateway" for row in boot.rows):
        log = run.folder.path / "logs" / f"{boot.name}.gateway.log"
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
                row, requests, target, generator=generator, tokenizer=tokenizer, folder=run.folder.path / "work"
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
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    if "failed" in figures or figures["completed"] < figures["requests"]:
        # A server that is gone fails the boot, and the rest of its rows with it; half an answer is no figure.
        httpx.get(f"{target.engine}/health", timeout=10).raise_for_status()
        if target.gateway and row.through == "gateway":
            httpx.get(f"{target.gateway}/healthz", timeout=10).raise_for_status()
    write(run.folder.row(boot, row, repeat), json.dumps(result))
    return result


def _arguments(plan: Plan, boot: Boot) -> tuple[str, ...]:
    """The profile's, the plan's, the boot's: the later win, as the engine reads them."""
    # What a profile (configs/engine) says, as arguments after the model: it then runs with another model's path.
    profile = engine.arguments(read_profile(profile_path(boot.profile))) if boot.profile else ()
    return (*profile, *plan.arguments, *boot.arguments)


def _facts(run: Run, boot: Boot, target: engine.Target) -> dict[str, Any]:
    arguments = () if run.attached else _arguments(run.plan, boot)
    facts = {"boot": boot.name, "title": boot.title, "arguments": arguments, "model": target.model}
    return {**facts, **target.facts}
