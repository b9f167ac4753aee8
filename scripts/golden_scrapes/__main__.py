"""Record or derive engines' /metrics pages: `python -m scripts.golden_scrapes record NAME... | derive NAME... | list`.

record   install an old engine into a throwaway environment (6 GB, one at a time), start it with the small model, send
         it eight chats with a shared beginning, and keep its page; the pinned release runs from .venv-engine
derive   write a page from the metric definitions in a release's source, for releases that cannot be had as a CPU build
list     what can be recorded and derived
Exit codes: 0 done, 1 a page could not be had (it is not written), 2 wrong usage.
"""

from __future__ import annotations

import argparse
import datetime
import shutil
import sys
import tempfile
from pathlib import Path

from scripts import model_fetch
from scripts.engine_args.vocabulary import PINNED
from scripts.golden_scrapes import derived, record
from scripts.golden_scrapes.builds import BUILDS, SHIM, Build, BuildError, in_old_words, install

OUT = Path("tests/fixtures/scrapes")
NOTE = "its library's need of a newer libstdc++, for one symbol, was made optional; nothing else was changed"
ENGINE = Path(".venv-engine/bin/vllm")


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m scripts.golden_scrapes", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recorded = {PINNED: None, **{build.version: build for build in BUILDS}}
    for name, choices, text in (
        ("record", sorted(recorded), "run the real engine"),
        ("derive", sorted(derived.RELEASES), "read the release's source"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("names", nargs="+", metavar="NAME", choices=choices)
        command.add_argument("--dry-run", action="store_true", help="say what would be written, and write nothing")
        command.add_argument("--python", default="3.11", help="the interpreter of old engines (default %(default)s)")
    commands.add_parser("list", help="the names that record and derive take")
    args = parser.parse_args(argv)
    if args.command == "list":
        print("record:", *sorted(recorded), "\nderive:", *sorted(derived.RELEASES))
        return 0
    failed = 0
    for name in args.names:
        path = OUT / (f"{name}.prom" if args.command == "record" else f"derived-{name}.prom")
        if args.dry_run:
            print(f"would {args.command} {path}")
            continue
        try:
            text = _record(recorded[name], args.python) if args.command == "record" else derived.page(name)
        except BuildError as error:
            print(f"golden-scrapes: {name}: {error}", file=sys.stderr)
            failed += 1
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(f"{path}: {sum(1 for line in text.splitlines() if line.startswith('vllm:'))} vllm: samples", flush=True)
    return 1 if failed else 0


def _record(build: Build | None, python: str) -> str:
    model = model_fetch.model_dir()
    if model_fetch.plan(model).fetch:
        raise BuildError(f"the model is not in {model}: make model")
    with tempfile.TemporaryDirectory(prefix="golden-") as name:
        folder = Path(name)
        log = folder / "engine.log"
        note = ""
        if build is None:
            engine, env, version = ENGINE, {}, PINNED
        else:
            env = install(build, folder / "venv", python)
            engine, version = folder / "venv/bin/vllm", build.version
            model = in_old_words(model, folder / record.NAME)
            if SHIM in env.get("LD_PRELOAD", ""):
                note = f"# note: {NOTE}\n"
        page = record.page(engine, model, env, log)
        shutil.rmtree(folder / "venv", ignore_errors=True)
    command = " ".join(("vllm serve", record.NAME, *record.FLAGS))
    today = datetime.datetime.now(tz=datetime.UTC).date()
    head = f"# recorded from vLLM {version}, CPU build, after eight chats with a shared beginning\n"
    return f"{head}# command: {command}\n# date: {today}\n{note}{page}"


NEWER_NOTE = (
    "library ran with one needed symbol version made optional, for want of a newer libstdc++; nothing else changed"
)


if __name__ == "__main__":
    sys.exit(main())
