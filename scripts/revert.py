"""Serves again what a model's last promotion replaced; a second revert takes the first one back.

    python -m scripts.revert NAME [--engine auto|local|compose] [--dry-run] [--json]

The version before has to be whole, and to answer a chat before clients reach it: where the stack runs with a profile
that serves NAME, through its engine, which is replaced under load; else through an engine started for that alone.

Exit codes: 0 it is served, 1 refused or taken back (one line says why, and what was served before
still is), 2 wrong usage, 130 or 143 interrupted (taken back; after a kill -9 the next run ends what was begun).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from scripts._children import Terminated, raise_on_termination
from scripts._command import Parser
from scripts._compose import ComposeError
from scripts._demo_talk import Terminal
from scripts._journal import JournalError
from scripts._running import SwapError
from scripts.gate import launcher
from scripts.quantization import QuantizeError, gate_config, promotion_engine
from scripts.quantization.gate_engine import ROOT, EngineError
from scripts.quantization.promotion import plan_revert
from scripts.quantization.store import alone, models_dir, versions


def main(argv: Sequence[str] | None = None) -> int:
    example = "make revert NAME=llama3-8b-awq (make models lists them)"
    parser = Parser("revert", "name a model", example, description="Serve what was served before.")
    parser.add_argument("name", help="the model, a directory of MODELS_DIR")
    parser.add_argument("--engine", choices=("auto", "local", "compose"), default="auto", help="where it is tried")
    parser.add_argument("--dry-run", action="store_true", help="check, say what would be done, change nothing")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    args = parser.parse_args(argv)
    terminal = Terminal()
    say = (lambda text: None) if args.json else terminal.line
    waiting = (lambda text: None) if args.json else terminal.waiting
    try:
        models = models_dir(os.environ)
        versions(models, args.name)
        with alone(models / args.name):
            healed = None if args.dry_run else promotion_engine.heal(say)
            move = plan_revert(models, args.name)
            done = promotion_engine.plan(move)
            if not args.dry_run:
                if isinstance(promotion_engine.concerned(move.home), str):
                    config = gate_config.load(ROOT / gate_config.PATH)
                    promotion_engine.try_alone(move.home / move.to, launcher(args.engine, os.environ), config, waiting)
                done = promotion_engine.apply(move, "revert to", say)
        answer = {
            "name": args.name,
            "version": move.to,
            "before": move.now,
            "engine": done.engine,
            "away_s": done.away_s,
            "healed": healed,
            "dry_run": args.dry_run,
        }
        if args.json:
            print(json.dumps(answer))
        else:
            word = "would serve" if args.dry_run else "serves"
            terminal.line(f"{args.name}: {word} {move.to} (before: {move.now or 'nothing'}); {done.engine}")
        return 0
    except (QuantizeError, EngineError, SwapError, ComposeError, JournalError) as error:
        if sys.stdout.isatty():
            terminal.plain()  # behind what was awaited
        print(f"revert: {error}", file=sys.stderr)
    except OSError as error:
        print(f"revert: {error.filename or ''}: {error.strerror}", file=sys.stderr)
    except (KeyboardInterrupt, Terminated) as error:
        print("\nrevert: interrupted; what was served before is served", file=sys.stderr)
        return 143 if isinstance(error, Terminated) else 130
    return 1


if __name__ == "__main__":
    raise_on_termination()
    sys.exit(main())
