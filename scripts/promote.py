"""Serves a quantized version from now on, where the gate passed exactly its bytes.

    python -m scripts.promote NAME [DIGEST] [--dry-run] [--json]

The link MODELS_DIR/NAME/current moves in one step; what it named before is kept as `previous`. Where the stack runs
with a profile that serves NAME, its engine is replaced under load: requests wait meanwhile, the new engine is tried
before they reach it, and one that does not hold is taken back, link included.

Exit codes: 0 it is served (or was already), 1 refused or taken back (one line says why, and what was served before
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
from scripts.quantization import QuantizeError, promotion_engine
from scripts.quantization.promotion import plan_promotion
from scripts.quantization.promotion_engine import Done
from scripts.quantization.store import alone, models_dir, versions


def main(argv: Sequence[str] | None = None) -> int:
    example = "make promote NAME=llama3-8b-awq (make models lists them)"
    parser = Parser("promote", "name a model", example, description="Serve a quantized version.")
    parser.add_argument("name", help="the model, a directory of MODELS_DIR")
    parser.add_argument("digest", nargs="?", help="the version, or its beginning (default: the newest quantized one)")
    parser.add_argument("--dry-run", action="store_true", help="check, say what would be done, change nothing")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    args = parser.parse_args(argv)
    terminal = Terminal()
    say = (lambda text: None) if args.json else terminal.line
    try:
        models = models_dir(os.environ)
        versions(models, args.name)
        with alone(models / args.name):
            healed = None if args.dry_run else promotion_engine.heal(say)
            move = plan_promotion(models, args.name, args.digest)
            done = Done(None, "nothing to do") if move is None else promotion_engine.plan(move)
            if move is not None and not args.dry_run:
                done = promotion_engine.apply(move, "promotion of", say)
        answer = {
            "name": args.name,
            "version": None if move is None else move.to,
            "before": None if move is None else move.now,
            "engine": done.engine,
            "away_s": done.away_s,
            "healed": healed,
            "dry_run": args.dry_run,
        }
        if args.json:
            print(json.dumps(answer))
        elif move is None:
            terminal.line(f"{args.name}: that version is what is served already")
        else:
            word = "would serve" if args.dry_run else "serves"
            terminal.line(f"{args.name}: {word} {move.to} (before: {move.now or 'nothing'}); {done.engine}")
        return 0
    except (QuantizeError, SwapError, ComposeError, JournalError) as error:
        print(f"promote: {error}", file=sys.stderr)
    except OSError as error:
        print(f"promote: {error.filename or ''}: {error.strerror}", file=sys.stderr)
    except (KeyboardInterrupt, Terminated) as error:
        print("\npromote: interrupted; what was served before is served", file=sys.stderr)
        return 143 if isinstance(error, Terminated) else 130
    return 1


if __name__ == "__main__":
    raise_on_termination()
    sys.exit(main())
