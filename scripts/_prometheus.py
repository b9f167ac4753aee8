"""Prometheus for the demo: find the program, point the project's own configuration at other addresses, ask it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import yaml

CONFIG = Path("configs/prometheus/prometheus.yml")


class MissingError(Exception):
    """Prometheus cannot be had here; the message says why."""


def find(cache: Path) -> Path:
    """The program: on PATH, unpacked by an earlier run, or unpacked now. Raises MissingError.

    Debian's package is unpacked and not installed: that needs no root, and starts no service on port 9090.
    """
    if found := shutil.which("prometheus"):
        return Path(found)
    target = cache / "prometheus-deb"
    binary = target / "usr" / "bin" / "prometheus"
    if binary.exists():
        return binary
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise MissingError("it is not installed, and there is no apt-get to get it with")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".prometheus-") as name:
        staging = Path(name)
        _download(staging)
        deb = next(staging.glob("*.deb"))
        done = subprocess.run(
            ["dpkg-deb", "-x", str(deb), str(staging / "out")], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise MissingError(f"its package could not be unpacked: {done.stderr.strip().splitlines()[-1]}")
        shutil.rmtree(target, ignore_errors=True)
        (staging / "out").rename(target)
    return binary


def _download(folder: Path) -> None:
    def apt(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["apt-get", "-qq", *arguments], cwd=folder, capture_output=True, text=True, check=False, timeout=180
            )
        except subprocess.TimeoutExpired:
            return "apt-get did not finish in 180 s"
        if done.returncode == 0:
            return None
        lines = [line for line in done.stderr.splitlines() if line.startswith("E:")]
        return lines[-1].removeprefix("E: ") if lines else "apt-get failed"

    why = apt("download", "prometheus")
    if why and os.geteuid() == 0:  # a fresh container has no package lists, and only root may fetch them
        why = apt("update") or apt("download", "prometheus")
    if why:
        raise MissingError(f"it is not installed, and apt-get says: {why}")


def configuration(source: Mapping[str, Any], targets: Mapping[str, str], interval: str) -> dict[str, Any]:
    """The project's configuration with `targets` (job: host:port) put in, and a shorter interval for a short run.

    The rules are the committed files; who would be told of an alert is left out.
    """
    filled = {key: value for key, value in source.items() if key != "alerting"}
    filled["rule_files"] = [str(CONFIG.parent.absolute() / pattern) for pattern in source.get("rule_files", ())]
    filled["global"] = {**source["global"], "scrape_interval": interval, "scrape_timeout": interval}
    filled["scrape_configs"] = [
        {**job, "static_configs": [{"targets": [targets[job["job_name"]]]}]}
        for job in source["scrape_configs"]
        if job["job_name"] in targets
    ]
    return filled


def write_configuration(path: Path, targets: Mapping[str, str], interval: str = "1s") -> None:
    """Writes `configuration` of configs/prometheus/prometheus.yml to `path`."""
    source = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    path.write_text(yaml.safe_dump(configuration(source, targets, interval)), encoding="utf-8")


def query(client: httpx.Client, url: str, expression: str) -> float | None:
    """The value of an instant query with one series; None where there is none. Raises httpx.HTTPError."""
    answer = client.get(f"{url}/api/v1/query", params={"query": expression})
    answer.raise_for_status()
    result = answer.json()["data"]["result"]
    return float(result[0]["value"][1]) if result else None
