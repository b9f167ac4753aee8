"""The host's checks, fed with what machines said, and once with this machine."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from scripts import engine_check, model_fetch
from scripts.checks import Check, host
from scripts.checks.probes import Probes
from scripts.checks.subject import Subject, decide
from scripts.planner.numbers import GIB, MIB

GOOD = engine_check.Machine(
    system="Linux",
    arch="x86_64",
    python=(3, 11),
    glibc=(2, 36),
    cpu_flags=frozenset({"avx2", "avx512f"}),
    free_gib=50,
    installed=True,
)
MEMINFO = "MemTotal:       65536000 kB\nMemFree:         1000000 kB\nMemAvailable:   {kib} kB\n"


def probes(
    root: Path,
    machine: engine_check.Machine = GOOD,
    files: Mapping[str, str] | None = None,
    disk: int | None = 100 * GIB,
    nofile: tuple[int, int] = (1024, 1048576),
) -> Probes:
    return Probes(
        read=lambda path: (files or {}).get(str(path)),
        disk_free=lambda path: disk,
        machine=lambda: machine,
        file_limits=lambda: nofile,
        environ={},
        root=root,
    )


def subject(root: Path, purpose: str = "demo", profile: str = "smollm2-135m.cpu") -> Subject:
    return decide(Probes(environ={"XDG_CACHE_HOME": str(root)}, root=root), purpose, profile, None)


def test_another_system_fails(tmp_path: Path) -> None:
    check = host.system(probes(tmp_path, replace(GOOD, system="Darwin", arch="arm64")), subject(tmp_path))
    assert (check.status, check.found) == ("fail", "Darwin arm64")


@pytest.mark.parametrize(
    ("flags", "profile", "status"),
    [
        ({"avx2", "avx512f", "amx_bf16"}, "smollm2-135m.cpu", "ok"),
        ({"sse4_2"}, "smollm2-135m.cpu", "fail"),
        ({"sse4_2"}, "llama3-8b-awq.rtx4090", "ok"),
        (set(), "smollm2-135m.cpu", "skip"),
    ],
)
def test_avx2_matters_where_the_cpu_serves(flags: set[str], profile: str, status: str, tmp_path: Path) -> None:
    machine = replace(GOOD, cpu_flags=frozenset(flags))
    assert host.cpu(probes(tmp_path, machine), subject(tmp_path, profile=profile)).status == status


def memory(tmp_path: Path, available: int, purpose: str = "demo", **files: str) -> Check:
    said = {"/proc/meminfo": MEMINFO.format(kib=available // 1024)} | {
        f"/sys/fs/cgroup/{k}": v for k, v in files.items()
    }
    target = replace(subject(tmp_path, purpose), model_dir=model_fetch.model_dir())
    assert target.model_dir is not None
    return host.memory(probes(tmp_path, files=said), target)


@pytest.fixture
def small_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """256 MiB of weights in a file that takes no room on the disk."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    where = model_fetch.model_dir()
    where.mkdir(parents=True)
    header = b'{"w":{"dtype":"BF16","shape":[134217728],"data_offsets":[0,268435456]}}'
    with (where / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 268435456)
    return where


def test_memory_is_compared_with_engine_weights_and_pool(small_model: Path, tmp_path: Path) -> None:
    need = host.ENGINE_PROCESSES + host.REST_OF_STACK + 256 * MIB + 512 * MIB
    assert memory(tmp_path, need).status == "ok"
    short = memory(tmp_path, need - MIB)
    assert (short.status, "KV cache 0.50 GiB" in short.expected) == ("fail", True)


def test_a_container_limit_below_the_machines_memory_counts(small_model: Path, tmp_path: Path) -> None:
    assert memory(tmp_path, 64 * GIB, **{"memory.max": "max\n", "memory.current": "1\n"}).status == "ok"
    limited = memory(tmp_path, 64 * GIB, **{"memory.max": f"{2 * GIB}\n", "memory.current": f"{GIB}\n"})
    assert (limited.status, limited.found) == ("fail", "1.00 GiB")


def test_without_a_model_memory_is_not_judged(tmp_path: Path) -> None:
    check = host.memory(probes(tmp_path, files={"/proc/meminfo": MEMINFO.format(kib=1)}), subject(tmp_path))
    assert (check.status, "could not be sized" in check.found) == ("skip", True)
    assert host.memory(probes(tmp_path), subject(tmp_path)).status == "skip"


@pytest.mark.parametrize(
    ("installed", "free", "status"), [(True, 6, "ok"), (True, 4, "fail"), (False, 6, "fail"), (False, 10, "ok")]
)
def test_an_engine_that_is_not_installed_needs_more_disk(
    installed: bool, free: int, status: str, tmp_path: Path
) -> None:
    eyes = probes(tmp_path, replace(GOOD, installed=installed), disk=free * GIB)
    assert host.disk(eyes, subject(tmp_path)).status == status


def test_dockers_small_shared_memory_is_found_where_the_engine_runs_natively(tmp_path: Path) -> None:
    small = probes(tmp_path, disk=64 * MIB)
    assert host.shm(small, subject(tmp_path)).status == "fail"
    assert host.shm(small, subject(tmp_path, "stack")).status == "skip"
    assert host.shm(probes(tmp_path, disk=None), subject(tmp_path)).status == "skip"


@pytest.mark.parametrize(
    ("release", "status"),
    [
        ("6.8.0-49-generic", "ok"),
        ("5.15.167.4-microsoft-standard-WSL2", "warn"),
        ("4.4.0-19041-Microsoft", "fail"),
        ("", "skip"),
    ],
)
def test_wsl_is_told_by_its_kernel(release: str, status: str, tmp_path: Path) -> None:
    assert host.wsl(probes(tmp_path, files={"/proc/sys/kernel/osrelease": f"{release}\n"})).status == status


@pytest.mark.parametrize(
    ("version", "status"), [((3, 10), "fail"), ((3, 11), "ok"), ((3, 14), "ok"), ((3, 15), "fail")]
)
def test_pythons_outside_the_wheels_range_fail(version: tuple[int, int], status: str, tmp_path: Path) -> None:
    assert host.python(probes(tmp_path, replace(GOOD, python=version))).status == status


@pytest.mark.parametrize(("hard", "status"), [(1024, "warn"), (4096, "ok"), (-1, "ok")])
def test_the_hard_limit_of_open_files_counts(hard: int, status: str, tmp_path: Path) -> None:
    assert host.open_files(probes(tmp_path, nofile=(256, hard)), subject(tmp_path)).status == status


def test_on_this_machine_the_checks_say_what_another_library_says() -> None:
    """Nothing is replaced here: the real /proc, the real disk."""
    found = {check.name: check for check in host.checks(Probes(), decide(Probes(), "demo", None, None))}
    assert found["host.system"].status == "ok"
    assert found["host.python"].status == "ok"
    shown = found["host.memory"].found.split()[0]
    assert abs(float(shown) * GIB - psutil.virtual_memory().available) < 2 * GIB
    free = found["host.disk"].found.split()[0]
    assert abs(float(free) * GIB - psutil.disk_usage(str(Path(__file__).parent)).free) < GIB
