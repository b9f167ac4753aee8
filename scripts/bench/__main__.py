"""Measures an engine, or a plan of engines, by `vllm bench serve` and by whole answers; writes a report.

    python -m scripts.bench PLAN.yaml [--out DIR] [--engine URL [--gateway URL] [--key-file FILE] --tokenizer DIR]
                            [--model DIR] [--texts FILE] [--image IMAGE] [--python PROGRAM] [--retry] [--fresh]
                            [--dry-run] [--json]

Without --engine each entry of the plan gets an engine of its own. The same command again goes on where a run ended, as
long as plan, model, flags, texts, versions and machine are the same; else it says what differs and measures nothing.
Exit codes: 0 all measured, and what was meant to fail failed; 1 otherwise, and the report says what; 2 wrong usage, an
unusable plan, no model or engine here, or a folder of other figures; 130 or 143 interrupted, to be continued.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from scripts._children import Terminated, raise_on_termination
from scripts._command import Parser, web_address
from scripts.bench import engine, figures, plan, runner, workloads
from scripts.bench.engine import ROOT
from scripts.bench.folder import Folder, write
from scripts.bench.hardware import hardware
from scripts.planner import PlanError as ProfileError
from scripts.planner.catalog import directory


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path, help="a file of configs/bench")
    parser.add_argument("--out", type=Path, help="the results' folder (default: results/bench/<plan's name>)")
    parser.add_argument(
        "--engine", type=web_address, help="measure this running engine, http://host:port, instead of starting any"
    )
    parser.add_argument("--gateway", help="and this gateway in front of it")
    parser.add_argument("--key-file", type=Path, help="a file with the API key for both")
    parser.add_argument("--tokenizer", help="the served model's directory (with --engine)")
    parser.add_argument("--model", help="model directory, instead of the plan's")
    parser.add_argument("--texts", type=Path, help="real chats instead of generated ones (scripts/bench/lengths.py)")
    parser.add_argument("--python", default=str(ROOT / ".venv-engine/bin/python"), help="of the environment with vLLM")
    parser.add_argument("--image", help="start engines in Docker from this image, with all GPUs")
    parser.add_argument("--retry", action="store_true", help="try what failed before once more")
    parser.add_argument("--fresh", action="store_true", help="move an earlier run's figures aside and measure anew")
    parser.add_argument(
        "--same-flags", action="store_true", help="--engine was started again since, with the same flags: go on"
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be measured, and what is missing")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    arguments = parser.parse_args(argv)
    if arguments.engine and not arguments.tokenizer:
        parser.error("--engine needs --tokenizer: the served model's directory")
    if arguments.gateway and not arguments.engine:
        parser.error("--gateway needs --engine: counters are read from the engine itself")
    return arguments


def make_run(arguments: argparse.Namespace) -> runner.Run:
    """Raises PlanError, ValueError or OSError with one line."""
    chosen = plan.load(arguments.plan)
    # A name is looked for where models are kept; a path stays one.
    model = arguments.model or str(directory(chosen.model) or chosen.model)
    chosen = chosen.model_copy(update={"model": model})
    attached = None
    if arguments.engine:
        chosen = chosen.attached()
        key = arguments.key_file.read_text().strip() if arguments.key_file else ""
        front = arguments.gateway.rstrip("/") if arguments.gateway else None
        attached = runner.Attached(arguments.engine.rstrip("/"), front, key, arguments.tokenizer)
    texts = workloads.read_texts(arguments.texts) if arguments.texts else ()
    path = arguments.out or ROOT / "results" / "bench" / arguments.plan.stem
    return runner.Run(
        chosen,
        Folder(path.absolute(), chosen),
        engine.Launcher(arguments.python, arguments.image),
        lambda line: print(line, file=sys.stderr, flush=True),
        attached,
        texts,
    )


def summarise(run: runner.Run) -> dict[str, Any]:
    """The summary of what lies in the folder; writes summary.json, report.md and report.html beside it."""
    from scripts.bench import report

    results, outcomes, path = run.folder.results(), run.folder.outcomes(), run.folder.path
    boots = [json.loads(file.read_text()) for file in sorted((path / "boots").glob("*.json"))]
    summary = {
        "title": run.plan.title,
        "date": " to ".join(run.folder.days()) or datetime.now(UTC).strftime("%Y-%m-%d"),
        "hardware": hardware(),
        "boots": {boot["boot"]: boot for boot in boots},
        **figures.summarise(run.plan, results),
        "failures": outcomes.failures,
        "failed_as_expected": outcomes.expected,
        "to_make": len(run.folder.pending()),
    }
    write(path / "summary.json", json.dumps(summary, indent=2))
    write(path / "report.md", report.markdown(run.plan, summary))
    write(path / "report.html", report.page(run.plan, summary, results))
    return summary


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    try:
        run = make_run(arguments)
        todo = list(run.plan.measurements()) if arguments.fresh else run.folder.pending(retry=arguments.retry)
        lacking = runner.missing(run, todo)
        if lacking and not arguments.dry_run:
            raise plan.PlanError(lacking)
        now = runner.conditions_of(run)
        if arguments.dry_run:
            return dry_run(run, arguments, now, todo, lacking)
    except engine.StartError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except (plan.PlanError, ProfileError, ValueError, OSError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    raise_on_termination()
    try:
        run.say(run.folder.take_up(now, retry=arguments.retry, fresh=arguments.fresh, same_flags=arguments.same_flags))
        return measure(run, as_json=arguments.json)
    except plan.PlanError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # a failed step's is in the folder; here the folder takes no more
        print(
            f"bench: {error.filename or run.folder.path}: {error.strerror}; the same command goes on", file=sys.stderr
        )
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Terminated:  # a second one, that does not wait for the report
        return 128 + signal.SIGTERM


def dry_run(
    run: runner.Run,
    arguments: argparse.Namespace,
    now: Mapping[str, Any],
    todo: Sequence[tuple[plan.Boot, plan.Row, int]],
    lacking: str | None,
) -> int:
    """Says what would be measured, and what is not here for it. Raises PlanError where the folder holds other figures,
    which can only be told where all is here."""
    if not arguments.fresh and not lacking:
        run.folder.check(now, same_flags=arguments.same_flags)
    for boot, row, repeat in todo:
        print(f"{boot.name}/{row.name} {repeat + 1}/{row.repeats}")
    if lacking:
        print(f"bench: not here yet, and needed to measure it: {lacking}", file=sys.stderr)
    return 0


def measure(run: runner.Run, *, as_json: bool) -> int:
    """Exit code. Raises OSError where the folder can't be written."""
    code = 0
    try:
        runner.execute(run)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except Terminated:
        code = 128 + signal.SIGTERM
    left = len(run.folder.pending())
    if code:  # said first: writing the report takes a while
        print(f"interrupted; the same command goes on, {left} left to measure", file=sys.stderr)
    summary = summarise(run)
    print(json.dumps(summary, indent=2) if as_json else (run.folder.path / "report.md").read_text(), end="")
    print(f"report: {run.folder.path / 'report.html'}", file=sys.stderr)
    return code or (1 if summary["failures"] or left else 0)


if __name__ == "__main__":
    sys.exit(main())
