"""Writes docs/faults.md, and the stack's part of docs/benchmarks.md, from what `make test-stack` measured.

    python -m scripts.faults_doc [--take results/stack.json] [--check]

The figures are in docs/results/stack.json; --take puts those of a new whole run there first.
Exit codes: 0 written, or with --check up to date; 1 it is not, or the figures are missing; 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SUMMARY, DOCUMENT, BENCHMARKS = Path("docs/results/stack.json"), Path("docs/faults.md"), Path("docs/benchmarks.md")
BEGIN, END = "<!-- the stack: begin -->", "<!-- the stack: end -->"  # in docs/benchmarks.md
# In the order of the page: what happens, and what heals it. The figures are the summary's.
FAULTS = {
    "prometheus stopped": ("Prometheus is stopped", "nothing has to: nothing on a request's way needs it"),
    "prometheus disk full": (
        "the disk under Prometheus is full, and then has room again",
        "nothing has to: requests need no figures, and Prometheus goes on",
    ),
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
{parts}Six clients stream chats all the time; a client that was refused comes again after a second. What takes seconds
here is mostly the start of the engine, about {boot:.0f} s; yours takes what your model takes to load.

| what happens | what heals it | whole again after | what the six clients saw from then on | longest answered |
|---|---|---|---|---|
"""

PARTS = """Several runs of parts of the tests, on a machine that did other work beside them: the same start of an engine
takes twice as long in one as in another.
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

## Another engine, or another model, under load

`make upgrade`, `make promote` and `make revert` with the same six clients, `timeouts.reload_wait_s` above an engine's
start. The seconds are the whole command's; an upgrade first asks the new image's parser about the profile, while the
old engine serves.

| | took | what the six clients saw | longest answered |
|---|---|---|---|
{upgrades}

## Other figures of that run

| | |
|---|---|
| `make down` while a stream of 400 tokens runs, which it ends whole | {down_with_a_stream_s} s |
| `make up-cpu` with an argument the engine refuses: cause told, nothing left | {refused_argument_s} s |
| figures are kept again, after a full disk under Prometheus got room | {figures_back_s} s |

How long the stack takes to come up, and how large its images are: [benchmarks.md](benchmarks.md#the-stack).

Started there: {started}. Not there: {not_here}.
"""

WARM = "| warm: after `make down`, on the volumes of before | {} s |\n"

STACK = """{begin}
<!-- Written by `python -m scripts.faults_doc` from docs/results/stack.json, which `make test-stack` measures. -->

`make up-cpu` until it says ready: vLLM 0.32.0 on CPU with SmolLM2-135M, two shared cores, the images of Prometheus and
its kin on the machine. Most of it is the engine's own start, {boot:.0f} s there; yours takes what your model takes.

| | |
|---|---|
| from nothing{images}: checks, secrets, model copied into place, first start | {up_from_nothing_s} s |
{warm}| a second `make up-cpu` while it runs | {second_up_s} s |
| the gateway's image: what is ours in it | {gateway_mb} MB |
| and the Python base that these tests stand on, from Debian's packages | {base_mb} MB |
| the CPU engine's image without its Python packages, base included | {engine_mb} MB |
| those packages | {packages_mb} MB |

The published base, python:3.11-slim-bookworm, was not on the machine: the aim of 200 MB for the gateway's image holds
with any base below {room_mb} MB. The one here, made of Debian's full packages, is larger.
{end}"""


def render(summary: Mapping[str, Any]) -> str:
    """The page. Raises KeyError naming a figure that is missing."""
    faults = summary["faults"]
    rows = [_row(*FAULTS[name], faults[name]) for name in FAULTS]
    prefill = summary["long_prefill"]
    tail = TAIL.format(
        **{key: summary[key] for key in _PLAIN},
        tokens=prefill["alone"]["tokens"],
        alone=prefill["alone"]["seconds"],
        loaded=prefill["under load"]["seconds"],
        upgrades="\n".join(
            _swap(name, found) for kind in ("upgrades", "promotions") for name, found in summary[kind].items()
        ),
        figures_back_s=faults["prometheus disk full"]["figures_back_s"],
        started=", ".join(summary["started"]),
        not_here="; ".join(f"{name} ({why})" for name, why in summary["not_here"].items()),
    )
    return (
        HEAD.format(boot=faults["engine core killed"]["heal_s"], parts=PARTS if summary.get("in_parts") else "")
        + "\n".join(rows)
        + "\n"
        + tail
    )


_PLAIN = ("down_with_a_stream_s", "refused_argument_s")


def stack_section(summary: Mapping[str, Any]) -> str:
    """The stack's part of docs/benchmarks.md, its two marks included. Raises KeyError."""
    gateway, engine = summary["gateway_image_mb"], summary["engine_cpu_image_mb"]
    own = gateway["image"] - gateway["base"]
    return STACK.format(
        begin=BEGIN,
        end=END,
        boot=summary["faults"]["engine core killed"]["heal_s"],
        images="" if summary.get("images_were_there", True) else ", our images built",
        warm=WARM.format(summary["warm_up_s"]) if "warm_up_s" in summary else "",
        gateway_mb=own,
        base_mb=gateway["base"],
        engine_mb=engine["image"],
        packages_mb=engine["packages"],
        room_mb=200 - own,
        **{key: summary[key] for key in ("up_from_nothing_s", "second_up_s")},
    )


def with_section(page: str, section: str) -> str:
    """The page with that part in its place. Raises ValueError where the page has no marks for it."""
    before, _, rest = page.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"{BENCHMARKS} has no {BEGIN} ... {END}")
    return before + section + after


SWAPS = {
    "promote": "`make promote`: another version of the model",
    "revert": "`make revert`: the version before",
    "does not hold": "`make promote` of a version that the engine does not load: taken back",
}


def _swap(name: str, found: Mapping[str, Any]) -> str:
    took, longest = (f"{found[key]} s" if key in found else "–" for key in ("took_s", "longest_answered_s"))
    saw = ", ".join(f"{count} × {outcome}" for outcome, count in sorted(found["clients_saw"].items()))
    what = SWAPS.get(name) or (f"vLLM {name}" if " to " in name else f"{name}: taken back")
    return f"| {what} | {took} | {saw} | {longest} |"


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
    parser.add_argument("--take", type=Path, help="a new run's figures (results/stack.json), copied to docs/results")
    parser.add_argument("--check", action="store_true", help="only say whether the pages are up to date")
    arguments = parser.parse_args(argv)
    source = arguments.take or SUMMARY
    try:
        summary = json.loads(source.read_text(encoding="utf-8"))
        pages = {DOCUMENT: render(summary), BENCHMARKS: with_section(_text(BENCHMARKS), stack_section(summary))}
    except OSError as error:
        print(f"faults_doc: {error.filename}: {error.strerror}; make test-stack measures it", file=sys.stderr)
        return 1
    except KeyError as error:
        print(f"faults_doc: {source} has no {error}: run the whole of make test-stack", file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"faults_doc: {error}", file=sys.stderr)
        return 1
    stale = [path for path, text in pages.items() if text != _text(path)]
    if arguments.check:
        for path in stale:
            print(f"faults_doc: {path} is not what {source} says: python -m scripts.faults_doc", file=sys.stderr)
        return int(bool(stale))
    if arguments.take:
        SUMMARY.write_text(json.dumps(summary, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for path in stale:
        path.write_text(pages[path], encoding="utf-8")
    return 0


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


if __name__ == "__main__":
    sys.exit(main())
