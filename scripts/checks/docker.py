"""Docker: the engine, compose, the NVIDIA runtime, what the engine's image asks of the driver, and the disk."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.checks import Check, Status, fail, judged, ok, skip
from scripts.checks.probes import Probes, Ran
from scripts.checks.subject import Subject
from scripts.planner.numbers import GIB, gib

ENGINE_MIN = (23, 0)  # BuildKit is the default builder from there on
COMPOSE_MIN = (2, 24, 4)  # depends_on `required: false` (2.20.2), `!reset` and `!override` (2.24.4)
# Estimates: a CUDA image of vLLM unpacks to some 20 GB and lies beside its layers while it is pulled; the CPU image
# holds 3.4 GB of packages and is built here.
IMAGE_ROOM = 40 * GIB
CPU_IMAGE_ROOM = 12 * GIB
NOT_NEEDED = "the demo runs without Docker"


def checks(probes: Probes, subject: Subject) -> list[Check]:
    found = [engine(probes, subject), compose(probes, subject)]
    info = _info(probes)
    found += [nvidia_runtime(probes, info, subject), image_cuda(probes, subject), disk(probes, subject, info)]
    return found


def engine(probes: Probes, subject: Subject) -> Check:
    """Installed, reachable by this user, and new enough."""
    name, expected = "docker.engine", f"Docker Engine {_dotted(ENGINE_MIN)} or newer, reachable"
    ran = probes.run(["docker", "version", "--format", "{{json .}}"])
    if ran is None:
        if subject.purpose == "demo":
            return skip(name, expected, f"docker is not installed; {NOT_NEEDED}")
        return fail(name, expected, "docker is not installed", "install Docker Engine: docs.docker.com/engine/install")
    version = _json(ran.out).get("Server") or {}
    if ran.code != 0 or not version:
        return _unreachable(name, expected, ran, subject)
    found = str(version.get("Version", ""))
    parsed = _version(found)
    if parsed is None:
        return skip(name, expected, f"it answers, but says no version that can be read: {found!r}")
    return judged(parsed >= ENGINE_MIN, name, expected, found, "upgrade Docker Engine", _severity(subject))


def _unreachable(name: str, expected: str, ran: Ran, subject: Subject) -> Check:
    """Says which of the three usual reasons it is."""
    why = ran.why
    if "permission denied" in why.lower():
        fix = "let this user reach it: sudo usermod -aG docker $USER, then log in again"
    elif ran.code == 124:
        fix = "it hangs: sudo systemctl restart docker, and look at journalctl -u docker"
    else:
        fix = "start it: sudo systemctl start docker (or Docker Desktop); DOCKER_HOST must name it where it is set"
    if subject.purpose == "demo":
        return skip(name, expected, f"no Docker engine answers; {NOT_NEEDED}")
    return fail(name, expected, why, fix)


def compose(probes: Probes, subject: Subject) -> Check:
    name, expected = "docker.compose", f"Docker Compose {_dotted(COMPOSE_MIN)} or newer"
    ran = probes.run(["docker", "compose", "version", "--short"])
    if ran is None or ran.code != 0:
        if subject.purpose == "demo":
            return skip(name, expected, f"`docker compose` is not installed; {NOT_NEEDED}")
        return fail(name, expected, "`docker compose` does not work", "install the plugin: docker-compose-plugin")
    found = ran.out.strip()
    parsed = _version(found)
    if parsed is None:
        return skip(name, expected, f"its version can't be read: {found!r}")
    return judged(parsed >= COMPOSE_MIN, name, expected, found, "upgrade docker-compose-plugin", _severity(subject))


def nvidia_runtime(probes: Probes, info: Mapping[str, Any] | None, subject: Subject) -> Check:
    """The container toolkit: a registered runtime, or CDI devices."""
    name, expected = "docker.nvidia", "the NVIDIA container toolkit: runtime `nvidia` or CDI devices nvidia.com/gpu"
    if subject.on_cpu:
        return skip(name, expected, f"profile {subject.profile_path.stem} runs on the CPU")
    if info is None:
        return skip(name, expected, "no Docker engine answers")
    runtimes = sorted(info.get("Runtimes") or {})
    devices = [str(device.get("ID", "")) for device in info.get("DiscoveredDevices") or [] if isinstance(device, dict)]
    cards = [device for device in devices if device.startswith("nvidia.com/gpu")]
    if "nvidia" in runtimes:
        return ok(name, expected, "runtime nvidia")
    if cards:
        return ok(name, expected, f"CDI devices {', '.join(cards[:3])}")
    if probes.run(["nvidia-smi"]) is None:
        return skip(name, expected, "there is no NVIDIA driver it could hand on: gpu.driver")
    return fail(
        name,
        expected,
        f"runtimes {', '.join(runtimes) or 'none'}",
        "install nvidia-container-toolkit, then: sudo nvidia-ctk runtime configure --runtime=docker && "
        "sudo systemctl restart docker",
    )


def image_cuda(probes: Probes, subject: Subject) -> Check:
    """What the engine's image itself demands of the driver; gpu.driver compares with the pinned wheels' need."""
    name, expected = "docker.image", "a driver that the engine's image accepts (NVIDIA_REQUIRE_CUDA)"
    if subject.on_cpu:
        return skip(name, expected, f"profile {subject.profile_path.stem} runs on the CPU")
    image = engine_image(probes, subject)
    if image is None:
        return skip(name, expected, "compose names no engine image that could be asked")
    ran = probes.run(["docker", "image", "inspect", image, "--format", "{{json .Config.Env}}"])
    if ran is None or ran.code != 0:
        return skip(name, expected, f"{image} is not on this machine yet")
    required = _required_cuda(ran.out)
    if required is None:
        return skip(name, expected, f"{image} states no CUDA requirement")
    smi = probes.run(["nvidia-smi"])
    offered = re.search(r"CUDA Version:\s*(\d+\.\d+)", smi.out) if smi else None
    if offered is None:
        return skip(name, expected, f"{image} wants CUDA {_dotted(required)}; no driver here says what it offers")
    good = (_version(offered[1]) or ()) >= required
    expected = f"a driver for CUDA {_dotted(required)} ({image})"
    return judged(good, name, expected, f"CUDA {offered[1]}", "update the NVIDIA driver on the host")


def disk(probes: Probes, subject: Subject, info: Mapping[str, Any] | None) -> Check:
    room = CPU_IMAGE_ROOM if subject.on_cpu else IMAGE_ROOM
    name, expected = "docker.disk", f"{gib(room)} free for the engine's image"
    if subject.purpose == "demo":
        return skip(name, expected, NOT_NEEDED)
    if info is None:
        return skip(name, expected, "no Docker engine answers")
    root = Path(str(info.get("DockerRootDir") or "/var/lib/docker"))
    if not root.exists():
        return skip(name, expected, f"the Docker engine keeps its images at {root}, which is not on this host")
    image = engine_image(probes, subject)
    if image is not None:
        ran = probes.run(["docker", "image", "inspect", image, "--format", "{{.Id}}"])
        if ran is not None and ran.code == 0:
            return ok(name, "the engine's image is there", image)
    free = probes.disk_free(root)
    if free is None:
        return skip(name, expected, f"the disk of {root} does not say")
    fix = f"make room where {root} lies: docker system df, docker image prune"
    return judged(free >= room, name, expected, f"{gib(free)} at {root}", fix, "warn")


def compose_services(probes: Probes, subject: Subject, everything: bool = False) -> Mapping[str, Any]:
    """The services compose would start (`everything`: those of every profile too); empty where it can't be asked."""
    if not (probes.root / "compose.yaml").is_file():
        return {}
    scope = ["--profile", "*"] if everything else []
    ran = probes.run(["docker", "compose", *scope, "config", "--format", "json"], subject.environ)
    return _json(ran.out).get("services") or {} if ran is not None and ran.code == 0 else {}


def engine_image(probes: Probes, subject: Subject) -> str | None:
    """The image of compose's engine for this profile, None where compose names none."""
    service = compose_services(probes, subject, everything=True).get("engine-cpu" if subject.on_cpu else "engine")
    return (service or {}).get("image") or None


def _info(probes: Probes) -> Mapping[str, Any] | None:
    ran = probes.run(["docker", "info", "--format", "{{json .}}"])
    if ran is None or ran.code != 0:
        return None
    found = _json(ran.out)
    return found if found.get("ServerVersion") else None  # a client without a server still prints JSON


def _required_cuda(env_json: str) -> tuple[int, ...] | None:
    """The least CUDA of NVIDIA_REQUIRE_CUDA ("cuda>=13.0 brand=...": alternatives follow, for older drivers)."""
    try:
        pairs = dict(str(item).split("=", 1) for item in json.loads(env_json) if "=" in str(item))
    except (ValueError, TypeError):
        return None
    if found := re.match(r"\s*cuda>=(\d+\.\d+)", pairs.get("NVIDIA_REQUIRE_CUDA", "")):
        return _version(found[1])
    return _version(".".join(pairs.get("CUDA_VERSION", "").split(".")[:2]))


def _json(text: str) -> dict[str, Any]:
    """A JSON object; empty for anything else."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _version(text: str) -> tuple[int, ...] | None:
    found = re.match(r"v?(\d+(?:\.\d+)*)", text.strip())
    return tuple(int(part) for part in found[1].split(".")) if found else None


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


def _severity(subject: Subject) -> Status:
    """What an old Docker is worth: nothing that stops the demo."""
    return "warn" if subject.purpose == "demo" else "fail"
