"""Finds the engine flags and gateway limits that serve the most within the SLO here, and puts them in place.

    python -m scripts.tune PROFILE [--model DIR] [--workload chat] [--ttft-s S] [--itl-s S] [--budget-s S] [--trials N]
                           [--image IMAGE] [--kv-fp8] [--keep] [--out DIR] [--dry-run] [--json]
    python -m scripts.tune PROFILE --revert

The profile (configs/engine/PROFILE.yaml) and configs/gateway.yaml are changed only where the gain is beyond the spread
of the repeats and a soak held; --keep only reports. A run that was interrupted goes on with its trials. Nothing else
may use the card meanwhile: `make down` first. Exit codes: 0 tuned, or kept for a reason; 1 the current profile can't be
measured, a later stage failed, or a file can't be written, files untouched; 2 wrong usage, or model, engine or card are
not there; 130 or 143 interrupted, files untouched.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from scripts._children import Terminated, raise_on_termination
from scripts.bench import conditions, engine
from scripts.bench.folder import write
from scripts.bench.generator import Generator
from scripts.bench.hardware import hardware
from scripts.checks.probes import Probes
from scripts.planner import PlanError
from scripts.planner.settings import profile_path, read_profile
from scripts.tune import checks, decide, loop, report, search, settings, space
from scripts.tune.arguments import parse
from scripts.tune.probe import Setup
from scripts.tune.task import Task

_UNTOUCHED = "the profile is as it was, and the same command goes on with the trials made"


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv, __doc__)
    path = profile_path(arguments.profile)
    folder = (arguments.out or engine.ROOT / "results" / "tune" / path.stem).absolute()
    if arguments.revert:
        return _revert(folder / "before")
    try:
        profile = read_profile(path)
    except PlanError as error:
        print(f"tune: {error}", file=sys.stderr)
        return 2
    task = _task(arguments, path, profile, folder)
    wrong = list(
        checks.problems(
            path, task.setup.model or None, task.setup.launcher, arguments.platform, Probes(), any_card=arguments.stated
        )
    )
    for line in wrong:
        print(f"tune: {line}", file=sys.stderr)
    if wrong:
        return 2
    if arguments.dry_run:
        print(_plan(path, task, arguments))
        return 0
    raise_on_termination()
    try:
        return _tune(arguments, path, task)
    except search.FAILURES as error:
        print(f"tune: the current profile can't be measured: {error or type(error).__name__}", file=sys.stderr)
        return 1
    except loop.StageError as error:
        print(f"tune: {error}; {_UNTOUCHED}", file=sys.stderr)
        return 1
    except OSError as error:
        where = error.filename or task.setup.folder
        print(f"tune: {where}: {error.strerror}; the profile is as it was, the same command goes on", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except Terminated:
        code = 128 + signal.SIGTERM
    print(f"interrupted; {_UNTOUCHED}", file=sys.stderr)
    return code


def _plan(path: Path, task: Task, arguments: argparse.Namespace) -> str:
    setup = task.setup
    planned = f"{task.planned_kv_tokens:,} tokens" if task.planned_kv_tokens else "unknown"
    return "\n".join(
        [
            f"{path}, with {setup.model}",
            f"KV cache by the memory plan: {planned}",
            f"tried: {'; '.join(f'{name} of {values}' for name, values in task.candidates.items())}",
            f"promise: TTFT {setup.slo.ttft_s} s, ITL {setup.slo.itl_s} s for 95 % of the tokens of {setup.workload}",
            f"time: {task.budget_s / 60:.0f} min in all, {task.trials} trials at most, {task.repeats} repeats",
            f"changed where better: {path}, {arguments.gateway_settings}",
        ]
    )


def _tune(arguments: argparse.Namespace, path: Path, task: Task) -> int:
    folder = task.setup.folder
    folder.mkdir(parents=True, exist_ok=True)
    differs = search.take_up(folder, _conditions(arguments, task))
    if differs:
        task.say(f"an earlier run's trials do not count here ({'; '.join(differs)})")
    with task.setup.generator:
        found = loop.tune(task)
    loop.save(folder / "report.json", found, task.setup.slo)
    write(folder / "report.md", report.render(found, path.stem))
    search.forget(folder)  # done: the next run starts anew
    if found["replaced"] and not arguments.keep:
        _put_in_place(path, arguments.gateway_settings, found, folder / "before")
    print(json.dumps(found, indent=2) if arguments.json else (folder / "report.md").read_text(), end="")
    return 0


def _task(arguments: argparse.Namespace, path: Path, profile: dict[str, Any], folder: Path) -> Task:
    setup = Setup(
        launcher=engine.Launcher(arguments.python, arguments.image),
        generator=Generator(arguments.python),
        model=arguments.model or checks.model_of(profile) or "",
        workload=arguments.workload,
        slo=decide.Slo(arguments.ttft_s, arguments.itl_s),
        most_in_flight=arguments.most_in_flight,
        waves=arguments.waves,
        answer_tokens=arguments.answer_tokens,
        environment={},
        folder=folder,
    )
    return Task(
        setup=setup,
        profile=profile,
        candidates=space.space(arguments.platform, kv_fp8=arguments.kv_fp8),
        budget_s=arguments.budget_s,
        trials=arguments.trials,
        repeats=arguments.repeats,
        gain=arguments.gain,
        soak_s=arguments.soak_s,
        seed=arguments.seed,
        planned_kv_tokens=checks.planned_kv_tokens(path, profile, setup.model, arguments.platform),
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )


def _conditions(arguments: argparse.Namespace, task: Task) -> dict[str, Any]:
    """All that a trial's figure depends on."""
    setup = task.setup
    return {
        "profile": task.profile,
        "candidates": task.candidates,
        "model": conditions.model_identity(setup.model),
        "engine": conditions.engine_version(setup.launcher),
        "workload": setup.workload,
        "slo": asdict(setup.slo),
        "most in flight": setup.most_in_flight,
        "waves": setup.waves,
        "answer tokens": setup.answer_tokens,
        "seed": arguments.seed,
        "hardware": hardware(),
    }


def _put_in_place(profile: Path, gateway: Path, found: dict[str, Any], kept: Path) -> None:
    shutil.rmtree(kept, ignore_errors=True)
    rates = found["best"]["repeats"], found["current"]["repeats"]
    day = datetime.now(UTC).strftime("%Y-%m-%d")
    comment = f"make tune, {day}: {min(rates[0]):.0f} tokens/s or more against {max(rates[1]):.0f} at most"
    comment = f"{comment}. {space.price(found['best']['changes'])}".rstrip(". ")
    texts = {
        profile: settings.rewritten(profile.read_text(), found["best"]["changes"], comment),
        gateway: settings.rewritten(gateway.read_text(), found["limits"], comment),
    }
    settings.apply(texts, kept)
    print(
        f"{profile} and {gateway} are changed; they count from the engine's and the gateway's next start (`make up`). "
        f"Back: make tune PROFILE={profile.stem} ARGS=--revert",
        file=sys.stderr,
    )


def _revert(kept: Path) -> int:
    try:
        restored = settings.revert(kept)
    except settings.NothingToRevertError as error:
        print(f"tune: {error}", file=sys.stderr)
        return 1
    print(f"put back: {', '.join(map(str, restored))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
