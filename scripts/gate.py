"""Judges a quantized version: it and its original through the pinned engine, one after the other.

    python -m scripts.gate NAME [DIGEST] [--engine local|compose] [--original DIR] [--config FILE] [--dry-run] [--json]

The verdict goes into the version's manifest, for `make promote`, and a report beside it (gate.html). Nothing that is
served changes.

Exit codes: 0 PASS, 4 FAIL, 3 ABSTAIN, 1 it could not be tried (one line says why), 2 wrong usage, 130 or 143
interrupted (nothing of the engine is left, and an earlier verdict stands).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts._children import Terminated, raise_on_termination
from scripts._command import Parser
from scripts._compose import Compose, ComposeError
from scripts._demo_talk import Terminal
from scripts.checks.envfile import read_env
from scripts.quantization import QuantizeError, gate_config, gate_run, store
from scripts.quantization.gate import CODES
from scripts.quantization.gate_engine import ROOT, ComposeRun, Launcher, Local


def launcher(kind: str, environ: Mapping[str, str], more: Sequence[str] = ()) -> Launcher:
    """auto: a card's engine comes in its image; without a card the environment here, else the image for CPUs.

    Raises QuantizeError.
    """
    has_card = shutil.which("nvidia-smi", path=environ.get("PATH")) is not None
    local = Local(more=tuple(more))
    if kind == "local" or (kind == "auto" and not has_card and local.program.exists()):
        if not local.program.exists():
            raise QuantizeError(f"{local.program} is missing: make install, or --engine compose")
        return local
    return ComposeRun("engine" if has_card else "engine-cpu", compose_files(environ), tuple(more))


def compose_files(environ: Mapping[str, str]) -> str:
    """COMPOSE_FILE as `docker compose` would have it here: said, in .env, or what lies there."""
    env_file = read_env(ROOT)
    said = environ.get("COMPOSE_FILE") or (env_file.values.get("COMPOSE_FILE") if env_file else None)
    override = "compose.override.yaml"
    return said or ":".join(["compose.yaml", *([override] if (ROOT / override).exists() else [])])


def card_is_taken(chosen: Launcher) -> str | None:
    """Who holds the card that the gate's engine wants: the stack's own engine."""
    if not isinstance(chosen, ComposeRun) or chosen.service != "engine":
        return None
    try:
        running = [found.service for found in Compose().containers() if found.running]
    except ComposeError:
        return None  # then its own start says what is wrong with Docker
    return "the stack's engine holds the card, and both do not fit: make down first" if "engine" in running else None


def _say(terminal: Terminal, quiet: bool) -> gate_run.Say:
    return (lambda text: None) if quiet else terminal.waiting


def _lines(found: Mapping[str, object], figures: Mapping[str, float] | None) -> list[str]:
    out = [f"{found['verdict']}"]
    out += [f"  {reason}" for reason in found["reasons"]]  # type: ignore[attr-defined]
    out += [f"  note: {note}" for note in found["notes"]]  # type: ignore[attr-defined]
    if figures is not None:
        out.append(
            f"  perplexity {figures['ppl_original']:.4g} -> {figures['ppl_artifact']:.4g} "
            f"({figures['ppl_rise']:+.1%}), KL {figures['kl_mean']:.3f} ± {figures['kl_error']:.3f}, "
            f"top-1 {figures['top1']:.3f} over {figures['tokens']} tokens"
        )
    return out


def main(argv: Sequence[str] | None = None) -> int:
    example = "make gate NAME=llama3-8b-awq (make models lists them)"
    parser = Parser("gate", "name a model", example, description="Judge a quantized version.")
    parser.add_argument("name", help="the model, a directory of MODELS_DIR")
    parser.add_argument("digest", nargs="?", help="the version, or its beginning (default: the newest quantized one)")
    parser.add_argument("--engine", choices=("auto", "local", "compose"), default="auto", help="where the engine runs")
    parser.add_argument(
        "--engine-args", default="", help="more arguments for `vllm serve`, as a shell would split them"
    )
    parser.add_argument("--original", type=Path, help="the original's directory, where the manifest's is not here")
    parser.add_argument("--config", type=Path, default=ROOT / gate_config.PATH, help="limits, chats, engine settings")
    parser.add_argument("--dry-run", action="store_true", help="say what would be measured, and start nothing")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    args = parser.parse_args(argv)
    terminal = Terminal()
    try:
        config = gate_config.load(args.config)
        models = store.models_dir(os.environ)
        chosen = gate_run.plan(models, args.name, args.digest, args.original, config)
        engine = launcher(args.engine, os.environ, args.engine_args.split())
        where = "in its container" if isinstance(engine, ComposeRun) else "here"
        if not args.json:
            terminal.line(f"{chosen.artifact} against {chosen.original}, through the engine {where}")
            terminal.line(f"limits of {chosen.size.name}: {_limits(chosen.size)}")
        if args.dry_run:
            return 0
        if taken := card_is_taken(engine):
            raise QuantizeError(taken)
        with store.alone(models, store.GATE_LOCK, "judging a version in"):
            result = gate_run.run(chosen, engine, config, _say(terminal, args.json))
            found = gate_run.summary(result)
            kept = gate_run.keep(result, found)
        if args.json:
            print(json.dumps({"artifact": str(chosen.artifact), "kept": kept, **found}))
        else:
            for line in _lines(found, found["figures"]):
                terminal.plain(line)
            terminal.plain(f"  report: {chosen.artifact / gate_run.REPORT}" if kept else "  the earlier verdict stands")
        return CODES[result.judgement.verdict]
    except QuantizeError as error:
        print(f"gate: {error}", file=sys.stderr)
    except OSError as error:
        print(f"gate: {error.filename or ''}: {error.strerror}", file=sys.stderr)
    except (KeyboardInterrupt, Terminated) as error:
        print("\ngate: interrupted; nothing was judged", file=sys.stderr)
        return 143 if isinstance(error, Terminated) else 130
    return 1


def _limits(size: gate_config.SizeClass) -> str:
    limits = size.limits
    measured = "" if size.measured else " (provisional)"
    return f"perplexity {limits.ppl_rise_max:+.0%}, KL {limits.kl_mean_max:.2f}, top-1 {limits.top1_min:.2f}{measured}"


if __name__ == "__main__":
    raise_on_termination()
    sys.exit(main())
