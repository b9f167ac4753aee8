"""Docker as a real engine describes itself, as a client without one does, and as GPU hosts do."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from scripts.checks import docker
from scripts.checks.probes import Probes, Ran
from scripts.checks.subject import Subject, decide
from scripts.planner.numbers import GIB

FIXTURES = Path(__file__).parents[1] / "fixtures" / "engines"
VERSION = (FIXTURES / "docker" / "recorded-26.1.5-version.json").read_text(encoding="utf-8")
INFO = json.loads((FIXTURES / "docker" / "recorded-26.1.5-info.json").read_text(encoding="utf-8"))
NO_VERSION = (FIXTURES / "docker" / "recorded-no-engine-version.json").read_text(encoding="utf-8")
NO_INFO = (FIXTURES / "docker" / "recorded-no-engine-info.json").read_text(encoding="utf-8")
TABLE = (FIXTURES / "nvidia-smi" / "recorded-h200-580-table.txt").read_text(encoding="utf-8")
NOT_RUNNING = "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?\n"
DENIED = "permission denied while trying to connect to the Docker daemon socket at unix:///var/run/docker.sock: ..."
GPU, CPU = "llama3-8b-awq.rtx4090", "smollm2-135m.cpu"


class Docker:
    """Answers commands by their first words; what is not in the table is a program that is not there."""

    def __init__(self, **answers: Ran) -> None:
        self.answers = answers

    def __call__(self, command: Sequence[str], environ: Mapping[str, str] | None = None) -> Ran | None:
        words = [word for word in command if not word.startswith(("-", "{")) and word != "*"]
        for count in (3, 2, 1):
            if found := self.answers.get("_".join(words[:count]).replace("-", "_")):
                return found
        return None


def info(**changed: Any) -> Ran:
    return Ran(0, json.dumps(INFO | changed))


def look(root: Path, purpose: str, profile: str, disk: int = 100 * GIB, **answers: Ran) -> dict[str, Any]:
    eyes = Probes(run=Docker(**answers), disk_free=lambda path: disk, environ={}, root=root)
    return {check.name: check for check in docker.checks(eyes, subject(root, purpose, profile))}


def subject(root: Path, purpose: str, profile: str) -> Subject:
    return decide(Probes(environ={"XDG_CACHE_HOME": str(root)}, root=root), purpose, profile, None)


RUNNING = {"docker_version": Ran(0, VERSION), "docker_compose_version": Ran(0, "2.26.1-4\n"), "docker_info": info()}


def test_a_real_engine_is_read(tmp_path: Path) -> None:
    found = look(tmp_path, "stack", CPU, **RUNNING)
    assert (found["docker.engine"].status, found["docker.engine"].found) == ("ok", "26.1.5+dfsg1")
    assert (found["docker.compose"].status, found["docker.compose"].found) == ("ok", "2.26.1-4")


@pytest.mark.parametrize(
    ("ran", "fix"),
    [
        (Ran(1, NO_VERSION, NOT_RUNNING), "systemctl start docker"),
        (Ran(1, NO_VERSION, DENIED), "usermod -aG docker"),
        (Ran(124, "", "docker gave no answer in 20 s"), "systemctl restart docker"),
    ],
)
def test_each_reason_for_no_engine_has_its_own_fix(ran: Ran, fix: str, tmp_path: Path) -> None:
    check = look(tmp_path, "stack", GPU, docker_version=ran, docker_info=Ran(1, NO_INFO, NOT_RUNNING))["docker.engine"]
    assert (check.status, fix in check.fix) == ("fail", True)


def test_a_client_without_an_engine_is_not_taken_for_one(tmp_path: Path) -> None:
    """`docker info` prints a whole JSON object then, and older clients end with 0."""
    found = look(tmp_path, "stack", GPU, docker_version=Ran(1, NO_VERSION, NOT_RUNNING), docker_info=Ran(0, NO_INFO))
    assert found["docker.nvidia"].status == "skip"
    assert found["docker.disk"].status == "skip"


def test_the_demo_needs_no_docker(tmp_path: Path) -> None:
    assert {check.status for check in look(tmp_path, "demo", CPU).values()} == {"skip"}
    broken = look(tmp_path, "demo", CPU, docker_version=Ran(1, NO_VERSION, NOT_RUNNING))
    assert broken["docker.engine"].status == "skip"


def test_the_stack_does(tmp_path: Path) -> None:
    found = look(tmp_path, "stack", GPU)
    assert found["docker.engine"].status == found["docker.compose"].status == "fail"


@pytest.mark.parametrize(("version", "status"), [("20.10.24", "fail"), ("23.0.0", "ok"), ("28.2.2", "ok")])
def test_old_engines_fail(version: str, status: str, tmp_path: Path) -> None:
    said = Ran(0, json.dumps({"Server": {"Version": version}}))
    assert look(tmp_path, "stack", GPU, docker_version=said)["docker.engine"].status == status


@pytest.mark.parametrize(
    ("version", "status"),
    [("1.29.2", "fail"), ("v2.24.3", "fail"), ("2.24.4", "ok"), ("v5.0.0", "ok"), ("dev", "skip")],
)
def test_old_composes_fail(version: str, status: str, tmp_path: Path) -> None:
    found = look(tmp_path, "stack", GPU, **RUNNING | {"docker_compose_version": Ran(0, version)})
    assert found["docker.compose"].status == status


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ({}, "fail"),
        ({"Runtimes": {"runc": {}, "nvidia": {"path": "nvidia-container-runtime"}}}, "ok"),
        ({"DiscoveredDevices": [{"Source": "cdi", "ID": "nvidia.com/gpu=0"}]}, "ok"),
        ({"DiscoveredDevices": [{"Source": "cdi", "ID": "vendor.com/net=eth0"}]}, "fail"),
    ],
)
def test_a_missing_container_toolkit_is_detected(changed: dict[str, Any], status: str, tmp_path: Path) -> None:
    """Field case G1."""
    found = look(tmp_path, "stack", GPU, **RUNNING | {"docker_info": info(**changed), "nvidia_smi": Ran(0, TABLE)})
    assert found["docker.nvidia"].status == status
    assert look(tmp_path, "stack", CPU, **RUNNING)["docker.nvidia"].status == "skip"


def test_without_a_driver_the_container_toolkit_is_not_a_second_message(tmp_path: Path) -> None:
    assert look(tmp_path, "stack", GPU, **RUNNING)["docker.nvidia"].status == "skip"


def engine_image(root: Path, env: list[str], table: str | None) -> dict[str, Any]:
    (root / "compose.yaml").touch()
    services = {"services": {"engine": {"image": "vllm/vllm-openai:v0.32.0"}}}
    answers = RUNNING | {"docker_compose_config": Ran(0, json.dumps(services)), "docker_image": Ran(0, json.dumps(env))}
    if table is not None:
        answers["nvidia_smi"] = Ran(0, table)
    return look(root, "stack", GPU, **answers)


@pytest.mark.parametrize(
    ("env", "offered", "status"),
    [
        (["NVIDIA_REQUIRE_CUDA=cuda>=13.0 brand=unknown,driver>=535,driver<536", "A=b"], "13.0", "ok"),
        (["NVIDIA_REQUIRE_CUDA=cuda>=13.0 brand=unknown,driver>=535,driver<536"], "12.8", "fail"),
        (["CUDA_VERSION=13.0.1"], "12.8", "fail"),
        (["CUDA_VERSION=12.9.1"], "13.0", "ok"),
        (["PATH=/bin"], "13.0", "skip"),
    ],
)
def test_the_image_itself_says_what_driver_it_needs(env: list[str], offered: str, status: str, tmp_path: Path) -> None:
    table = TABLE.replace("CUDA Version: 13.0", f"CUDA Version: {offered}")
    assert engine_image(tmp_path, env, table)["docker.image"].status == status


def test_without_a_driver_the_images_need_is_told_and_not_judged(tmp_path: Path) -> None:
    check = engine_image(tmp_path, ["CUDA_VERSION=13.0.1"], None)["docker.image"]
    assert (check.status, "wants CUDA 13.0" in check.found) == ("skip", True)


def test_an_image_that_is_there_needs_no_more_disk(tmp_path: Path) -> None:
    root = {"docker_info": info(DockerRootDir=str(tmp_path))}
    assert look(tmp_path, "stack", GPU, 10 * GIB, **RUNNING | root)["docker.disk"].status == "warn"
    assert look(tmp_path, "stack", GPU, 50 * GIB, **RUNNING | root)["docker.disk"].status == "ok"
    elsewhere = {"docker_info": info(DockerRootDir="/nowhere/docker")}
    assert look(tmp_path, "stack", GPU, **RUNNING | elsewhere)["docker.disk"].status == "skip"
