"""Quantizes a model to 4 bits: looks at everything first, then makes MODELS_DIR/<name>/<digest>/ or nothing.

    python -m scripts.quantize --config configs/quantize/llama3-8b-instruct.yaml [--device auto|cuda|cpu]
                               [--models DIR] [--stop-engine] [--dry-run] [--json]
    python -m scripts.quantize --self-check

Run it with the job's own environment (make quantize CONFIG=...). A finished artifact of the same inputs is kept.
Exit codes: 0 it is there (made now or before), 1 refused or failed (one line says why), 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scripts._children import Terminated, raise_on_termination
from scripts._command import Parser
from scripts._compose import Compose
from scripts.checks import report
from scripts.checks.probes import Probes
from scripts.quantization import QuantizeError, config, engine_stop, job, store, trial, vram
from scripts.quantization.plan import Ask, Plan, environment, look, quiet, summary
from scripts.quantization.progress import human

_DEFAULT = Path("configs/quantize/smollm2-135m.yaml")


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments().parse_args(argv)
    say: Callable[[str], None] = _err if args.json else _out
    result: dict[str, Any] = {"config": str(args.config), "made": False, "error": None}
    started = time.monotonic()
    code = 0
    try:
        code = _run(args, say, result)
    except QuantizeError as error:
        code, result["error"] = 1, str(error)
    except OSError as error:
        code, result["error"] = 1, f"{error.filename or 'input/output'}: {error.strerror or error}"
    except (KeyboardInterrupt, Terminated):
        code, result["error"] = 130, "interrupted; nothing half-made was left"
    result["s"] = round(time.monotonic() - started, 1)
    if args.json:
        print(json.dumps(result))
    elif result["error"]:
        print(f"quantize: {result['error']}", file=sys.stderr)
    return code


def _run(args: argparse.Namespace, say: Callable[[str], None], result: dict[str, Any]) -> int:
    os.environ.update(quiet())
    if args.self_check:
        device, _ = vram.choose(args.device or "auto", Probes())
        os.environ.update(environment(device))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trial.everything(device.kind, say)
        return 0
    wanted = config.load(args.config)
    if args.device:
        wanted = wanted.model_copy(update={"device": args.device})
    models = (args.models or store.models_dir(os.environ)).absolute()
    ask = Ask(wanted, models, stop_engine=args.stop_engine, stock=args.unsafe_stock_autoawq)
    plan = look(ask, Probes(), say)
    result |= {"checks": [check.as_json() for check in plan.checks], "digest": plan.digest}
    if plan.done:
        result["directory"] = str(plan.target)
        say(f"{plan.target} is there already, made from the same model, texts, settings and versions")
        _next(plan, say)
        return 0
    for line in [*report.lines(plan.checks), *(f"  {note}" for note in [*plan.notes, *summary(plan)])]:
        say(line)
    if plan.refused:
        first = plan.refused[0]
        result["error"] = f"refused: {first.name}: expected {first.expected}, found {first.found}. {first.fix}"
        return 1
    if args.dry_run:
        say(f"  would make {plan.target}")
        return 0
    began = time.monotonic()
    engine = engine_stop.stopped(Compose(), say) if args.stop_engine else contextlib.nullcontext()
    with engine, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the libraries' own, none of which a user can act on
        made = job.run(plan, say, stock=ask.stock)
    result |= {"made": True, "directory": str(plan.target), "manifest": json.loads(made.model_dump_json())}
    say(f"{plan.target} made in {human(time.monotonic() - began)}")
    _next(plan, say)
    return 0


def _next(plan: Plan, say: Callable[[str], None]) -> None:
    say(f"nobody is served from it before the gate has passed it: make gate NAME={plan.config.name}")


def _arguments() -> argparse.ArgumentParser:
    parser = Parser("quantize", description="Quantize a model to 4 bits; docs/quantize.md tells more.")
    parser.add_argument("--config", type=Path, default=_DEFAULT, help="default: %(default)s")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), help="instead of the configuration's")
    parser.add_argument("--models", type=Path, help="instead of MODELS_DIR")
    parser.add_argument("--stop-engine", action="store_true", help="stop the engine for the job, start it again after")
    parser.add_argument("--dry-run", action="store_true", help="check everything, load no weight")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, lines on stderr")
    parser.add_argument("--self-check", action="store_true", help="both producers on one toy layer, then end")
    parser.add_argument("--unsafe-stock-autoawq", action="store_true", help=argparse.SUPPRESS)
    return parser


def _out(line: str) -> None:
    print(line, flush=True)


def _err(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise_on_termination()
    sys.exit(main())
