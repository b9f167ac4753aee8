"""Measures an engine, or a plan of engines, by `vllm bench serve` and by whole answers; writes a report.

    python -m scripts.bench PLAN.yaml [--out DIR] [--engine URL [--gateway URL] [--key-file FILE] --tokenizer DIR]
                            [--model DIR] [--texts FILE] [--image IMAGE] [--python PROGRAM] [--retry]
                            [--dry-run] [--json]

Without --engine each entry of the plan gets an engine of its own. The same command again goes on where a run ended.
Exit codes: 0 all measured; 1 something was not, and the report says what; 2 wrong usage or an unusable plan;
130 or 143 interrupted, to be continued.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from scripts import model_fetch
from scripts._children import Terminated, raise_on_termination
from scripts.bench import engine, figures, plan, runner, workloads

ROOT = Path(__file__).parent.parent.parent


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path, help="a file of configs/bench")
    parser.add_argument("--out", type=Path, help="the results' folder (default: results/bench/<plan's name>)")
    parser.add_argument("--engine", help="measure this running engine, http://host:port, instead of starting any")
    parser.add_argument("--gateway", help="and this gateway in front of it")
    parser.add_argument("--key-file", type=Path, help="a file with the API key for both")
    parser.add_argument("--tokenizer", help="the served model's directory (with --engine)")
    parser.add_argument("--model", help="model directory, instead of the plan's")
    parser.add_argument("--texts", type=Path, help="real chats instead of generated ones (scripts/bench/lengths.py)")
    parser.add_argument("--python", default=str(ROOT / ".venv-engine/bin/python"), help="of the environment with vLLM")
    parser.add_argument("--image", help="start engines in Docker from this image, with all GPUs")
    parser.add_argument("--retry", action="store_true", help="try what failed before once more")
    parser.add_argument("--dry-run", action="store_true", help="say what would be measured")
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
    demo = model_fetch.model_dir()
    model = arguments.model or (str(demo) if chosen.model == demo.name else chosen.model)
    chosen = chosen.model_copy(update={"model": model})
    attached = None
    if arguments.engine:
        key = arguments.key_file.read_text().strip() if arguments.key_file else ""
        front = arguments.gateway.rstrip("/") if arguments.gateway else None
        attached = runner.Attached(arguments.engine.rstrip("/"), front, key, arguments.tokenizer)
    texts = workloads.read_texts(arguments.texts) if arguments.texts else ()
    folder = arguments.out or ROOT / "results" / "bench" / arguments.plan.stem
    return runner.Run(
        chosen,
        folder.absolute(),
        engine.Launcher(arguments.python, arguments.image),
        lambda line: print(line, file=sys.stderr, flush=True),
        attached,
        texts,
        arguments.retry,
    )


def summarise(run: runner.Run) -> dict[str, Any]:
    """The summary of what lies in the folder; writes summary.json, report.md and report.html beside it."""
    from scripts.bench import report

    results = runner.results(run.folder, run.plan)
    boots = [json.loads(path.read_text()) for path in sorted((run.folder / "boots").glob("*.json"))]
    summary = {
        "title": run.plan.title,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "hardware": runner.hardware(),
        "boots": {boot["boot"]: boot for boot in boots},
        **figures.summarise(run.plan, results),
        "failures": runner.failures(run.folder, run.plan),
    }
    runner.write(run.folder / "summary.json", json.dumps(summary, indent=2))
    runner.write(run.folder / "report.md", report.markdown(run.plan, summary))
    runner.write(run.folder / "report.html", report.page(run.plan, summary, results))
    return summary


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    try:
        run = make_run(arguments)
        if arguments.dry_run:
            for boot, row, repeat in run.pending():
                print(f"{boot.name}/{row.name} {repeat + 1}/{row.repeats}")
            return 0
        runner.prepare(run)
    except (plan.PlanError, ValueError, OSError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    raise_on_termination()
    try:
        return measure(run, as_json=arguments.json)
    except OSError as error:  # a failed step's is in the folder; here the folder takes no more
        print(f"bench: {error}; the same command goes on", file=sys.stderr)
        return 1


def measure(run: runner.Run, *, as_json: bool) -> int:
    """Exit code. Raises OSError where the folder can't be written."""
    code = 0
    try:
        runner.execute(run)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except Terminated:
        code = 128 + signal.SIGTERM
    summary = summarise(run)
    print(json.dumps(summary, indent=2) if as_json else (run.folder / "report.md").read_text(), end="")
    print(f"report: {run.folder / 'report.html'}", file=sys.stderr)
    if code:
        print(f"interrupted; the same command goes on, {len(run.pending())} measurements are left", file=sys.stderr)
    return code or (1 if summary["failures"] or run.pending() else 0)


if __name__ == "__main__":
    sys.exit(main())
