"""Finds the engine flags and gateway limits that serve the most within the SLO here, and puts them in place.

    python -m scripts.tune PROFILE --model DIR [--workload chat] [--ttft-s S] [--itl-s S] [--budget-s S] [--trials N]
                           [--image IMAGE] [--kv-fp8] [--keep] [--out DIR] [--dry-run] [--json]
    python -m scripts.tune PROFILE --revert

The profile (configs/engine/PROFILE.yaml) and configs/gateway.yaml are changed only where the gain is beyond the spread
of the repeats and a soak held; --keep only reports. A run that was interrupted goes on with its trials. Nothing else
may use the card meanwhile: `make down` first. Exit codes: 0 tuned, or kept for a reason; 1 the current profile can't be
measured; 2 wrong usage; 130 or 143 interrupted, files untouched.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from scripts._children import Terminated, raise_on_termination
from scripts.bench import engine, runner
from scripts.bench.generator import Generator
from scripts.tune import decide, loop, report, settings, space
from scripts.tune.probe import Setup

ROOT = Path(__file__).parent.parent.parent
GATEWAY = ROOT / "configs" / "gateway.yaml"


def parse(argv: list[str] | None) -> argparse.Namespace:
    promised = yaml.safe_load((ROOT / "configs/slo.yaml").read_text())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", help="a file of configs/engine, without .yaml, or a path")
    parser.add_argument("--model", help="the model's directory on this machine")
    parser.add_argument("--workload", choices=["chat", "prefix", "long", "mixed"], default="chat")
    parser.add_argument("--ttft-s", type=float, default=promised["ttft"]["limit_s"], help="default: configs/slo.yaml's")
    parser.add_argument("--itl-s", type=float, default=promised["itl"]["limit_s"], help="default: configs/slo.yaml's")
    parser.add_argument(
        "--budget-s", type=float, default=2400, help="for the search; confirming and soaking come after"
    )
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--soak-s", type=float, default=120)
    parser.add_argument("--most-in-flight", type=int, default=512)
    parser.add_argument(
        "--waves", type=int, default=4, help="requests of a measurement, as multiples of those in flight"
    )
    parser.add_argument("--platform", choices=["gpu", "cpu"], default="gpu" if runner.cards() else "cpu")
    parser.add_argument("--kv-fp8", action="store_true", help="also try a KV cache in 8 bits, which rounds")
    parser.add_argument("--gateway-settings", type=Path, default=GATEWAY)
    parser.add_argument("--python", default=str(ROOT / ".venv-engine/bin/python"), help="of the environment with vLLM")
    parser.add_argument("--image", help="start engines in Docker from this image, with all GPUs")
    parser.add_argument("--out", type=Path, help="the results' folder (default: results/tune/PROFILE)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="report only")
    parser.add_argument("--revert", action="store_true", help="put back what the last run replaced")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    if not arguments.revert and not arguments.model:
        parser.error("--model: the model's directory on this machine")
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    given = Path(arguments.profile)
    path = given if given.suffix == ".yaml" else runner.PROFILES / f"{given}.yaml"
    folder = (arguments.out or ROOT / "results" / "tune" / path.stem).absolute()
    if arguments.revert:
        return _revert(folder / "before")
    try:
        profile = settings.read(path)
    except OSError as error:
        print(f"tune: {path}: {error.strerror}", file=sys.stderr)
        return 2
    candidates = space.space(arguments.platform, kv_fp8=arguments.kv_fp8)
    if arguments.dry_run:
        print(f"{path}: " + "; ".join(f"{name} of {values}" for name, values in candidates.items()))
        return 0
    task = _task(arguments, profile, candidates, folder, path)
    raise_on_termination()
    try:
        with task.setup.generator:
            found = loop.tune(task)
    except loop.FAILURES as error:
        print(f"tune: the current profile can't be measured: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Terminated:
        return 128 + signal.SIGTERM
    loop.save(folder / "report.json", found, task.setup.slo)
    runner.write(folder / "report.md", report.render(found, path.stem))
    (folder / "study.journal").unlink(missing_ok=True)  # done: the next run starts anew
    if found["replaced"] and not arguments.keep:
        _put_in_place(path, arguments.gateway_settings, found, folder / "before")
    print(json.dumps(found, indent=2) if arguments.json else (folder / "report.md").read_text(), end="")
    return 0


def _task(
    arguments: argparse.Namespace, profile: dict[str, Any], candidates: dict[str, list[Any]], folder: Path, path: Path
) -> loop.Task:
    folder.mkdir(parents=True, exist_ok=True)
    _forget_another(folder, path.read_text())
    setup = Setup(
        launcher=engine.Launcher(arguments.python, arguments.image),
        generator=Generator(arguments.python),
        model=arguments.model,
        workload=arguments.workload,
        slo=decide.Slo(arguments.ttft_s, arguments.itl_s),
        most_in_flight=arguments.most_in_flight,
        waves=arguments.waves,
        environment={},
        folder=folder,
    )
    return loop.Task(
        setup=setup,
        profile=profile,
        candidates=candidates,
        budget_s=arguments.budget_s,
        trials=arguments.trials,
        repeats=arguments.repeats,
        soak_s=arguments.soak_s,
        seed=arguments.seed,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )


def _forget_another(folder: Path, text: str) -> None:
    """Trials of a profile that has changed since say nothing about this one."""
    kept = folder / "profile.yaml"
    if kept.exists() and kept.read_text().rstrip() != text.rstrip():
        (folder / "study.journal").unlink(missing_ok=True)
    runner.write(kept, text)


def _put_in_place(profile: Path, gateway: Path, found: dict[str, Any], kept: Path) -> None:
    shutil.rmtree(kept, ignore_errors=True)
    rates = found["best"]["repeats"], found["current"]["repeats"]
    day = datetime.now(UTC).strftime("%Y-%m-%d")
    comment = f"make tune, {day}: {min(rates[0]):.0f} tokens/s or more against {max(rates[1]):.0f} at most"
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
