"""The machine: processor, memory, disk, shared memory, Python, open files."""

from __future__ import annotations

import re
from pathlib import Path

from scripts import engine_check
from scripts.checks import Check, fail, judged, ok, skip, warn
from scripts.checks.probes import Probes
from scripts.checks.subject import Subject
from scripts.planner import PlanError
from scripts.planner.checkpoint import read_checkpoint
from scripts.planner.numbers import GIB, MIB, gib, human_int

# vLLM 0.32.0 on the CPU, SmolLM2-135M: proportional set size of its processes less weights and pool.
ENGINE_PROCESSES = 1740 * MIB
REST_OF_STACK = 500 * MIB  # the gateway and Prometheus of the demo, rounded up
SHM_NEED = 256 * MIB  # an engine of several processes uses about 160 MiB
DISK_KEPT = 5 * GIB  # logs, Prometheus's data, an image layer
FILES = 4096  # two connections a stream at the gateway's 1024 in flight, and what else it holds
_AVX512 = ("avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")


def checks(probes: Probes, subject: Subject) -> list[Check]:
    return [
        system(probes, subject),
        cpu(probes, subject),
        memory(probes, subject),
        disk(probes, subject),
        shm(probes, subject),
        wsl(probes),
        python(probes),
        open_files(probes, subject),
    ]


def system(probes: Probes, subject: Subject) -> Check:
    machine = probes.machine()
    found = f"{machine.system} {machine.arch}"
    good = (machine.system, machine.arch) == ("Linux", "x86_64")
    fix = "use an x86_64 Linux machine, or WSL 2 on Windows; `make test-unit test-wire` need no engine"
    return judged(good, "host.system", "Linux x86_64", found, fix)


def cpu(probes: Probes, subject: Subject) -> Check:
    name, expected = "host.cpu", "AVX2"
    flags = probes.machine().cpu_flags
    if not flags:
        return skip(name, expected, "/proc/cpuinfo names no processor flags")
    found = "AVX2" if "avx2" in flags else "no AVX2"
    if more := [flag for flag in _AVX512 if flag in flags]:
        found += f", {' '.join(more)}"
    if not subject.on_cpu:
        return ok(name, "anything: the engine runs on the card", found)
    return judged("avx2" in flags, name, expected, found, "the CPU engine needs a newer processor")


def memory(probes: Probes, subject: Subject) -> Check:
    """Against what was measured of the CPU engine; a CUDA engine's own host memory was not, so it only warns."""
    name = "host.memory"
    available = _available(probes)
    if available is None:
        return skip(name, "enough for the engine", "/proc/meminfo has no MemAvailable")
    weights = _weights(subject)
    pool = _cpu_pool(subject) if subject.on_cpu else 0
    if weights is None or pool is None:
        missing = "the model's weights" if weights is None else "the KV cache's size"
        return skip(name, "enough for the engine", f"{gib(available)} available; {missing} could not be sized")
    need = ENGINE_PROCESSES + REST_OF_STACK + weights + pool
    expected = f"{gib(need)} available (engine {gib(ENGINE_PROCESSES)}, weights {gib(weights)}"
    expected += f", KV cache {gib(pool)}, the rest {gib(REST_OF_STACK)})"
    fix = "close other programs, or take a smaller model"
    if subject.on_cpu:
        fix += " or kv-cache-memory-bytes"
    return judged(available >= need, name, expected, gib(available), fix, "fail" if subject.on_cpu else "warn")


def _available(probes: Probes) -> int | None:
    """MemAvailable, or what a memory limit on this shell's control group leaves where that is less."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", probes.read(Path("/proc/meminfo")) or "", re.MULTILINE)
    if found is None:
        return None
    available = int(found[1]) * 1024
    limit = (probes.read(Path("/sys/fs/cgroup/memory.max")) or "").strip()
    used = (probes.read(Path("/sys/fs/cgroup/memory.current")) or "").strip()
    if limit.isdecimal() and used.isdecimal():
        available = min(available, max(int(limit) - int(used), 0))
    return available


def _weights(subject: Subject) -> int | None:
    if subject.model_dir is None:
        return None
    try:
        checkpoint = read_checkpoint(subject.model_dir)
    except (PlanError, OSError):
        return None
    return sum(tensor.size for tensor in checkpoint.tensors.values()) if checkpoint else None


def _cpu_pool(subject: Subject) -> int | None:
    try:
        if "kv-cache-memory-bytes" in subject.profile:
            return human_int(subject.profile["kv-cache-memory-bytes"], "kv-cache-memory-bytes")
        return round(float(subject.environ["VLLM_CPU_KVCACHE_SPACE"]) * GIB)
    except (PlanError, KeyError, ValueError):
        return None


def disk(probes: Probes, subject: Subject) -> Check:
    """Room where the project lies; docker.disk looks at where the images go."""
    name = "host.disk"
    machine = probes.machine()
    need = DISK_KEPT
    expected = f"{gib(DISK_KEPT)} free for logs and metrics"
    if subject.purpose == "demo" and not machine.installed:
        need += engine_check.INSTALL_GIB * GIB
        expected = f"{gib(need)} free: the CPU engine is not installed yet"
    free = probes.disk_free(probes.root)
    if free is None:
        return skip(name, expected, f"the disk of {probes.root} does not say")
    return judged(free >= need, name, expected, f"{gib(free)} at {probes.root}", "make room on this disk")


def shm(probes: Probes, subject: Subject) -> Check:
    name, expected = "host.shm", f"{SHM_NEED // MIB} MiB free in /dev/shm"
    if subject.purpose == "stack":
        return skip(name, expected, "each container has a /dev/shm of its own, sized in compose.yaml")
    free = probes.disk_free(Path("/dev/shm"))  # noqa: S108 - looked at, not written
    if free is None:
        return skip(name, expected, "there is no /dev/shm")
    fix = "mount -o remount,size=2g /dev/shm, or start this container with --shm-size=2g"
    return judged(free >= SHM_NEED, name, expected, f"{free // MIB} MiB", fix)


def wsl(probes: Probes) -> Check:
    """WSL 1 has no Linux kernel, so neither Docker nor CUDA; WSL 2 has both, with its own limits."""
    name, expected = "host.wsl", "no WSL, or WSL 2"
    release = (probes.read(Path("/proc/sys/kernel/osrelease")) or "").strip()
    if not release:
        return skip(name, expected, "/proc/sys/kernel/osrelease can't be read")
    if "microsoft" not in release.lower():
        return ok(name, expected, f"no WSL (kernel {release})")
    if "WSL2" not in release and "microsoft-standard" not in release:
        return fail(name, expected, f"WSL 1 (kernel {release})", "convert it: wsl --set-version <distribution> 2")
    return warn(
        name,
        expected,
        f"WSL 2 (kernel {release})",
        "it works; mind three things: the NVIDIA driver belongs into Windows and never into WSL, memory is half of the "
        "machine's unless .wslconfig says more, and models under /mnt/c load many times slower than from WSL's disk",
    )


def python(probes: Probes) -> Check:
    low, high = engine_check.PYTHONS
    found = probes.machine().python
    expected = f"Python {'.'.join(map(str, low))} to {high[0]}.{high[1] - 1}"
    fix = "install python3.11, or name one: make install PYTHON=/path/to/python3.11"
    return judged(low <= found < high, "host.python", expected, ".".join(map(str, found)), fix)


def open_files(probes: Probes, subject: Subject) -> Check:
    """The hard limit: the gateway raises its own soft one to it."""
    name, expected = "host.files", f"a hard limit of {FILES} open files"
    if subject.purpose == "stack":
        return skip(name, expected, "containers have the Docker engine's limit, not this shell's")
    _, hard = probes.file_limits()
    shown = "unlimited" if hard < 0 else str(hard)
    fix = f"raise it: ulimit -Hn {FILES} as root, or `nofile` in /etc/security/limits.conf"
    return judged(hard < 0 or hard >= FILES, name, expected, shown, fix, "warn")
