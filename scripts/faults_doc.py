"""Writes docs/faults.md from what `make test-stack` measured (docs/results/stack.json).

    python -m scripts.faults_doc [--check]

Exit codes: 0 written, or with --check up to date; 1 it is not, or the figures are missing; 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SUMMARY, DOCUMENT = Path("docs/results/stack.json"), Path("docs/faults.md")
# In the order of the page: what happens, and what heals it. The figures are the summary's.
FAULTS = {
    "prometheus stopped": ("Prometheus is stopped", "nothing has to: nothing on a request's way needs it"),
    "gateway killed": ("the gateway's process is killed", "Docker starts it again"),
    "engine core killed": ("the engine's core process is killed", "the supervisor starts the engine again"),
    "engine hung": ("the engine's processes stop (SIGSTOP), their sockets stay", "the watchdog kills and restarts it"),
    "docker restarted": ("the Docker daemon is restarted", "Docker starts what had been running"),
    "engine cannot start": (
        "`make up` with a value that the engine refuses, on a running stack",
        "three starts, then the cause, then `make up` puts the engine before it back",
    ),
    "out of memory at start": (
        "the engine's memory limit is too low, at a first `make up`",
        "three starts, then the cause, then nothing is left running",
    ),
}

HEAD = """# What breaks, what heals by itself, and what clients see

<!-- Written by `python -m scripts.faults_doc` from docs/results/stack.json, which `make test-stack` measures. -->

Measured on the stack in real containers: compose.yaml as it is, vLLM 0.32.0 on CPU with SmolLM2-135M, two shared cores.
Six clients stream chats all the time; a client that was refused comes again after a second. What takes seconds here is
mostly the start of the engine, about {boot:.0f} s; yours takes what your model takes to load.

| what happens | what heals it | whole again after | what the six clients saw from then on | longest answered |
|---|---|---|---|---|
"""

TAIL = """
- **answered**: a whole answer, if need be after waiting in the gateway's waiting room (`timeouts.reload_wait_s`).
- **error event**: the stream had begun; it ended with an SSE error event that says so. Never a forged end.
- **cut off**, **no connection**: the gateway itself was gone. No server can tell those clients anything; they have to
  ask again.
- **HTTP 503**: refused with a reason and a Retry-After.

## What is no fault

A prompt of {tokens} tokens alone on the engine gave no token for {alone} s, and under load for {loaded} s: neither the
gateway nor the watchdog took that for a hang. Both ask the same rule (docs/decisions/0004).

## Other figures of that run

| | |
|---|---|
| `make up-cpu` from nothing to ready | {up_from_nothing_s} s |
| a second `make up-cpu` | {second_up_s} s |
| `make down` while a stream of 400 tokens runs, which it ends whole | {down_with_a_stream_s} s |
| `make up-cpu` with an argument the engine refuses: cause told, nothing left | {refused_argument_s} s |
| the gateway's image, without the Python base | {gateway_mb} MB |

Started there: {started}. Not there: {not_here}.
"""


def render(summary: Mapping[str, Any]) -> str:
    """The page. Raises KeyError naming a figure that is missing."""
    faults = summary["faults"]
    rows = [_row(*FAULTS[name], faults[name]) for name in FAULTS]
    images, prefill = summary["gateway_image_mb"], summary["long_prefill"]
    tail = TAIL.format(
        **{key: summary[key] for key in _PLAIN},
        tokens=prefill["alone"]["tokens"],
        alone=prefill["alone"]["seconds"],
        loaded=prefill["under load"]["seconds"],
        gateway_mb=images["image"] - images["base"],
        started=", ".join(summary["started"]),
        not_here="; ".join(f"{name} ({why})" for name, why in summary["not_here"].items()),
    )
    return HEAD.format(boot=faults["engine core killed"]["heal_s"]) + "\n".join(rows) + "\n" + tail


_PLAIN = ("up_from_nothing_s", "second_up_s", "down_with_a_stream_s", "refused_argument_s")


def _row(what: str, healer: str, found: Mapping[str, Any]) -> str:
    after = "at once" if found.get("heal_s") == 0 else f"{found['heal_s']} s" if found.get("heal_s") else "–"
    if "daemon_stopped_s" in found:
        after = f"{found['heal_s']} s, of which the daemon took {found['daemon_stopped_s']} s to stop"
    if "given_up_s" in found:
        after = f"cause after {found['given_up_s']} s" + (f", whole after {after}" if found.get("heal_s") else "")
    saw = ", ".join(f"{count} × {outcome}" for outcome, count in sorted(found.get("clients_saw", {}).items())) or "–"
    longest = f"{found['longest_answered_s']} s" if "longest_answered_s" in found else "–"
    return f"| {what} | {healer} | {after} | {saw} | {longest} |"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.faults_doc", description="Write docs/faults.md.")
    parser.add_argument("--check", action="store_true", help="only say whether the page is up to date")
    arguments = parser.parse_args(argv)
    try:
        text = render(json.loads(SUMMARY.read_text(encoding="utf-8")))
    except OSError as error:
        print(f"faults_doc: {error.filename}: {error.strerror}; make test-stack measures it", file=sys.stderr)
        return 1
    except KeyError as error:
        print(f"faults_doc: {SUMMARY} has no {error}: run the whole of make test-stack", file=sys.stderr)
        return 1
    if arguments.check:
        current = DOCUMENT.read_text(encoding="utf-8") if DOCUMENT.exists() else ""
        if current != text:
            print(f"faults_doc: {DOCUMENT} is not what {SUMMARY} says: python -m scripts.faults_doc", file=sys.stderr)
        return int(current != text)
    DOCUMENT.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
