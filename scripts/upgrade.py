"""Serves with another image of the engine, under load, and goes back by itself where that one does not hold.

    make upgrade ENGINE_IMAGE=vllm/vllm-openai:v0.33.0        python -m scripts.upgrade IMAGE [--dry-run]

The image is pulled (one that is here already is taken), its own parser must take the profile, and the machine must fit.
Then the engine is swapped (scripts/_swap.py says how): requests wait in the gateway meanwhile, at most
`timeouts.reload_wait_s` each. The new engine must answer a chat and have every series that rules, dashboards and
gateway read; only then is it recorded in .env. Else the engine before is started again, and the last line says why.

A run that was killed is found by the next one, which finishes it or takes it back, and then does what it was asked.

Exit codes: 0 the image serves, 1 it does not (the stack serves what it did, or was not touched), 2 wrong usage,
3 nothing serves: the engine before did not come back either; 130 or 143 interrupted, and taken back.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from scripts import _dotenv, _journal, _preflight
from scripts._children import Terminated, raise_on_termination
from scripts._command import Parser
from scripts._compose import ROOT, Compose, ComposeError
from scripts._demo_talk import Terminal
from scripts._journal import Journal, JournalError
from scripts._running import ENGINES, Stack, SwapError
from scripts._smoke import missing_metrics, needed_metrics, smoke_chat
from scripts._swap import DRAIN_S, START_S, NotBackError, heal, swap
from scripts.checks.report import lines
from scripts.checks.subject import SubjectError

KIND = "upgrade"
_READY = re.compile(r"^supervisor: ready after (\d+) s")


@dataclass(frozen=True)
class Plan:
    """From one image to another. `old_id`: what the old name means now; a pull may give that name to another image."""

    service: str
    variable: str
    old: str
    old_id: str
    new: str

    @property
    def what(self) -> str:
        return f"{self.service}: {self.old} -> {self.new}"

    def note(self, stack: Stack) -> dict[str, str]:
        """For the journal: enough to go back, or to finish, in another process."""
        return {"old": self.old, "old_id": self.old_id, "new": self.new, "variable": self.variable, **stack.same}


def image_id(name: str) -> str | None:
    """The id of an image on this machine."""
    done = subprocess.run(
        ["docker", "image", "inspect", "--format", "{{.Id}}", name], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else None


def settle(terminal: Terminal) -> None:
    """Ends what an earlier upgrade left. Raises JournalError where the interrupted change is of another kind."""
    left = _journal.read()
    if left is None:
        return
    if left.kind != KIND:
        raise JournalError(f"{left.what} was interrupted: `make {left.kind}` ends it first")

    def undo() -> dict[str, str]:
        _retag(left.note["old_id"], left.note["old"])
        return {name: left.note[name] for name in ("ENGINE_PROFILE", "ENGINE_ARGS", left.note["variable"])}

    stack = Stack.running(interrupted=True)
    done = heal(stack, lambda: _record(left.note["variable"], left.note["new"]), undo, say=terminal.line)
    if done:
        terminal.line(done)


def _retag(identity: str, name: str) -> None:
    """The old name means the old image again. Best effort: nearly always it still does."""
    if not name.startswith("sha256:") and image_id(name) != identity:
        subprocess.run(["docker", "tag", identity, name], capture_output=True, check=False)


def _record(variable: str, image: str) -> None:
    _dotenv.record(ROOT / ".env", variable, image)


def pull(image: str, terminal: Terminal) -> None:
    """There when it returns. Raises SwapError."""
    if image_id(image):
        terminal.line(f"image       {image} is on this machine")
        return
    terminal.line(f"image       pulls {image}")
    if subprocess.run(["docker", "pull", image], cwd=ROOT, check=False).returncode != 0:
        raise SwapError(f"{image} can't be pulled, and no image of that name is here: docker's lines above say why")


def accepted(stack: Stack, variable: str, image: str) -> str | None:
    """Asks the new image's own parser about the profile and ENGINE_ARGS; what it says against them."""
    compose = Compose(stack.compose.profiles, {**stack.compose.env, **stack.same, variable: image})
    command = compose.command(
        "run",
        "--rm",
        "--no-deps",
        "-T",
        "--entrypoint",
        "python3",
        stack.engine.service,
        "/opt/stack/engine/accepts.py",
    )
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | compose.env, capture_output=True, text=True, errors="replace", check=False
    )
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return None if done.returncode == 0 else (said or [f"exit code {done.returncode}"])[-1]


def preflight(stack: Stack, variable: str, image: str, terminal: Terminal) -> None:
    """Raises SwapError where the new image can't work here; nothing was touched then."""
    checks = _preflight.for_image(stack.engine.env.get("ENGINE_PROFILE", ""), {**stack.same, variable: image})
    for line in lines([check for check in checks if check.status in ("warn", "fail")]):
        terminal.plain(line)
    failed = [check.name for check in checks if check.status == "fail"]
    if failed:
        raise SwapError(f"preflight: {', '.join(failed)} failed; nothing was changed")
    if wrong := accepted(stack, variable, image):
        raise SwapError(f"{image} does not take the profile {stack.engine.env.get('ENGINE_PROFILE')}: {wrong}")
    terminal.line(f"preflight   {sum(check.status == 'ok' for check in checks)} checks passed, the profile is accepted")


def last_start_s(stack: Stack) -> float | None:
    """How long the running engine took to be ready, by its own supervisor."""
    found = [
        int(match[1]) for line in stack.compose.tail(stack.engine.service, 100_000) if (match := _READY.match(line))
    ]
    return float(found[-1]) if found else None


def reload_wait_s(stack: Stack) -> float | None:
    """The gateway's own setting in force; None where it does not say."""
    source = "from gateway.settings import load; print(load().timeouts.reload_wait_s)"
    try:
        return float(stack.compose.run("exec", "-T", "gateway", "python", "-c", source))
    except (ComposeError, ValueError):
        return None


def say_waits(stack: Stack, terminal: Terminal) -> None:
    took, bound = last_start_s(stack), reload_wait_s(stack)
    if bound is None:
        return
    terminal.line(f"waiting     requests wait for at most {bound:.0f} s (timeouts.reload_wait_s)")
    if took is not None and took + 10 > bound:
        terminal.line(
            f"            the engine's last start took {took:.0f} s: those that wait longer are refused with 503. "
            f"More time: reload_wait_s in configs/gateway.yaml, then docker compose restart gateway"
        )


def run(arguments: argparse.Namespace, terminal: Terminal) -> None:
    """Raises SwapError, NotBackError, JournalError, ComposeError, OSError."""
    if not arguments.dry_run:
        settle(terminal)
    stack = Stack.running()
    engine = stack.engine
    plan = Plan(engine.service, ENGINES[engine.service], engine.image, engine.image_id, arguments.image)
    terminal.line(plan.what)
    if arguments.dry_run:
        here = "is here" if image_id(plan.new) else "would be pulled"
        terminal.plain(
            f"{plan.new} {here}; then {plan.variable}={plan.new} for {plan.service}, and into .env if it holds"
        )
        return
    pull(plan.new, terminal)
    if image_id(plan.new) == plan.old_id:
        _record(plan.variable, plan.new)
        terminal.line("nothing to do: that image is what runs")
        return
    preflight(stack, plan.variable, plan.new, terminal)
    say_waits(stack, terminal)
    needed = needed_metrics()

    def undo() -> dict[str, str]:
        _retag(plan.old_id, plan.old)
        return {}

    outcome = swap(
        stack,
        lambda: {plan.variable: plan.new},
        undo,
        lambda: smoke_chat(stack) or missing_metrics(stack, needed),
        keep=lambda: _record(plan.variable, plan.new),
        journal=Journal(plan.what, KIND, note=plan.note(stack)),
        say=terminal.line,
        drain_s=arguments.drain_s,
        start_s=arguments.start_s,
    )
    terminal.line(
        f"held: a chat was answered and {len(needed)} series are there; recorded in .env as {plan.variable}. "
        f"Requests waited {outcome.away_s:.0f} s at most ({outcome.started_s:.0f} s of it the new engine's start)"
    )


def main(argv: Sequence[str] | None = None) -> int:
    example = "make upgrade ENGINE_IMAGE=vllm/vllm-openai:v0.33.0"
    parser = Parser("upgrade", "name the engine's new image", example, description="Serve with another engine image.")
    parser.add_argument("image", help="the engine's new image, pulled if it is not on this machine")
    parser.add_argument(
        "--drain-s", type=float, default=DRAIN_S, help="longest wait for running requests (%(default)s)"
    )
    parser.add_argument("--start-s", type=float, default=START_S, help="longest start of the new engine (%(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, change nothing")
    arguments = parser.parse_args(argv)
    if not re.fullmatch(r"[A-Za-z0-9][\w./:@-]*", arguments.image):
        parser.error(f"{arguments.image!r} is no image's name")
    terminal = Terminal()
    try:
        run(arguments, terminal)
    except NotBackError as error:
        print(f"upgrade: {error}\nupgrade: nothing serves now: make logs, then make up (make up-cpu)", file=sys.stderr)
        return 3
    except (SwapError, JournalError, ComposeError, SubjectError) as error:
        print(f"upgrade: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"upgrade: {error.filename or ''}: {error.strerror}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, Terminated) as error:
        print("\nupgrade: interrupted; the engine before serves", file=sys.stderr)
        return 143 if isinstance(error, Terminated) else 130
    return 0


if __name__ == "__main__":
    raise_on_termination()
    sys.exit(main())
