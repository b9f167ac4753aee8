"""Brings the stack up: checks the machine, starts what is not running, and says when it answers, or why it does not.

    python -m scripts.up [--cpu] [--wait-s N] [--dry-run]

What is missing of secrets is made; the first API key is printed once. A first start that fails leaves nothing running;
on a running stack a new engine that does not come up is replaced by the one before. A second `up` changes nothing.

Exit codes: 0 ready, 1 not (the last lines say why), 2 wrong usage, 130 or 143 interrupted (what was started goes on).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from scripts import _journal, _one_shot, _preflight, _secrets, _stack_model
from scripts._bring_up import Up, UpError
from scripts._children import Terminated, raise_on_termination
from scripts._command import Parser
from scripts._compose import ROOT, Compose, ComposeError
from scripts._demo_talk import Terminal
from scripts._journal import JournalError
from scripts.checks import Check, worst
from scripts.checks.envfile import place, read_env, why_missing
from scripts.checks.report import lines
from scripts.checks.subject import SubjectError

CPU_PROFILE = "smollm2-135m.cpu"
WAIT_S = 2400  # above ENGINE_START_S: the engine's own supervisor gives up before


def environment(cpu: bool, environ: Mapping[str, str]) -> dict[str, str]:
    """What to lay over .env. Raises UpError where it names no engine profile."""
    env_file = read_env(ROOT)
    said = environ.get("ENGINE_PROFILE") or (env_file.values.get("ENGINE_PROFILE", "") if env_file else "")
    if cpu:
        return {"ENGINE_PROFILE": said if ".cpu" in said else CPU_PROFILE}
    if env_file is None:
        raise UpError("there is no .env: cp .env.example .env, and set ENGINE_PROFILE (no GPU here: make up-cpu)")
    if not said:
        why = why_missing("ENGINE_PROFILE", env_file)
        raise UpError(f"{why} (docs/engine-profiles.md says which card takes which)")
    if ".cpu" in said:
        where = place("ENGINE_PROFILE", env_file, environ)
        raise UpError(f"{where}={said} is for a CPU: make up-cpu, or name a profile of your card there")
    return {"ENGINE_PROFILE": said}


def profiles(kind: str, said: str) -> list[str]:
    """Compose's profiles: one engine, whatever COMPOSE_PROFILES says of engines, and what else it names."""
    more = [name for part in said.split(",") if (name := part.strip()) and name not in ("gpu", "cpu")]
    return [kind, *("quantize-cpu" if name == "quantize" and kind == "cpu" else name for name in more)]


def cpu_env_file(example: str) -> str:
    """The .env of a machine without a GPU: the example with its two settings changed."""
    wanted = {"COMPOSE_PROFILES": "cpu", "ENGINE_PROFILE": CPU_PROFILE}
    out = [
        f"{name}={wanted[name]}" if (name := line.partition("=")[0]) in wanted else line
        for line in example.splitlines()
    ]
    return "\n".join(out) + "\n"


def run(arguments: argparse.Namespace, terminal: Terminal) -> None:
    """Raises UpError and the errors of its parts."""
    env = environment(arguments.cpu, os.environ)
    kind = "cpu" if arguments.cpu else "gpu"
    makes_env = arguments.cpu and read_env(ROOT) is None
    if makes_env and arguments.dry_run:
        terminal.line("settings    would make .env from .env.example, for a machine without a GPU")
    elif makes_env:
        (ROOT / ".env").write_text(cpu_env_file((ROOT / ".env.example").read_text(encoding="utf-8")), encoding="utf-8")
        terminal.line("settings    .env is made from .env.example, for a machine without a GPU")
    if env["ENGINE_PROFILE"] == CPU_PROFILE:
        _small_model(arguments.dry_run, terminal)
    running = _running(env)
    subject, checks = _preflight.look(env["ENGINE_PROFILE"], env, running)
    chosen = profiles(kind, subject.environ.get("COMPOSE_PROFILES", ""))
    if _one_shot.wanted(chosen):  # the model is what the job is to make: looked at when it has
        checks = [check for check in checks if not check.name.startswith("model.")]
        writer = _one_shot.writer(subject.models_root, os.geteuid())
        env["QUANTIZE_USER"] = writer.user
        if not arguments.dry_run:
            _one_shot.give(subject.models_root, writer)
    if makes_env and arguments.dry_run:
        checks = [check for check in checks if check.name != "settings.env"]
    _report(checks, terminal)
    compose = Compose(chosen, env)
    if _OTHER[kind] in running:
        raise UpError(f"{_OTHER[kind]} of this stack is running: make down first")
    secrets = _secrets.plan(_secrets.folder(subject.environ), load="load" in chosen)
    if arguments.dry_run:
        terminal.plain(f"would make: {', '.join(secrets.missing) or 'no secrets'}")
        terminal.plain(" ".join(f"{name}={value}" for name, value in env.items()) + " " + " ".join(
            compose.command("up", "--detach", "--remove-orphans")))  # fmt: skip
        return
    key = _secrets.make(secrets)
    if key:
        terminal.line(f"first key   {key}   (shown once; `make keys` makes more)")
    up = Up(compose, subject, arguments.wait_s, terminal)
    with _journal.alone():
        up.run()
    terminal.line("ready")
    terminal.plain(up.recipe(key))


def _running(env: Mapping[str, str]) -> set[str]:
    """Services of this stack that run now; none where Docker can't be asked, which the checks then say."""
    try:
        return {found.service for found in Compose(env=env).containers() if found.running}
    except ComposeError:
        return set()


def _small_model(dry_run: bool, terminal: Terminal) -> None:
    """There before the checks look for it. Raises UpError where it has to be fetched first."""
    env_file = read_env(ROOT)
    chosen = _stack_model.plan({**(env_file.values if env_file else {}), **os.environ})
    if chosen.problem:
        raise UpError(chosen.problem)
    if chosen.source is not None:
        terminal.line(f"model       {'would copy' if dry_run else 'copies'} {chosen.source} to {chosen.target.parent}")
        if not dry_run:
            _stack_model.copy(chosen)


_OTHER = {"cpu": "engine", "gpu": "engine-cpu"}  # both are http://engine:8000


def _report(checks: Sequence[Check], terminal: Terminal) -> None:
    """What is not well, with the way out. Raises UpError where it stops the start."""
    for line in lines([check for check in checks if check.status in ("warn", "fail")]):
        terminal.plain(line)
    failed = [check for check in checks if check.status == "fail"]
    if failed and worst(checks) == "fail":
        again = "make doctor ARGS='--for stack' looks again"
        raise UpError(f"{len(failed)} of {len(checks)} checks failed, nothing was started ({again})")
    terminal.line(f"preflight   {sum(check.status == 'ok' for check in checks)} checks passed")


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("up", description="Bring the stack up and wait for it.")
    parser.add_argument("--cpu", action="store_true", help="the CPU engine, on a machine without a GPU")
    parser.add_argument("--wait-s", type=float, default=WAIT_S, help="longest wait for an answer (default %(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="check, say what would be done, change nothing")
    arguments = parser.parse_args(argv)
    terminal = Terminal()
    try:
        run(arguments, terminal)
    except (UpError, SubjectError, ComposeError, JournalError, _one_shot.JobError, _secrets.SecretsError) as error:
        terminal.plain()
        print(f"up: {error}", file=sys.stderr)
    except OSError as error:
        print(f"up: {error.filename or ''}: {error.strerror}", file=sys.stderr)
    except (KeyboardInterrupt, Terminated) as error:
        print("\nup: interrupted; what was started goes on (make ps, make down)", file=sys.stderr)
        return 143 if isinstance(error, Terminated) else 130
    else:
        return 0
    return 1


if __name__ == "__main__":
    raise_on_termination()
    sys.exit(main())
