"""Faults of the monitoring itself, of the host and of the (recorded) card."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from scripts.prove_observability.faults import Expected, Fault
from scripts.prove_observability.lab import Lab
from scripts.prove_observability.traffic import MIX, Front, load

MEMORY_CGROUP = Path("/sys/fs/cgroup/memory")


@contextlib.contextmanager
def nothing(lab: Lab) -> Iterator[None]:
    """For the alert that always fires."""
    yield


@contextlib.contextmanager
def exporter_stopped(lab: Lab) -> Iterator[None]:
    lab.kill("node")
    try:
        yield
    finally:
        lab.node()


@contextlib.contextmanager
def target_removed(lab: Lab) -> Iterator[None]:
    lab.target("node", None)
    try:
        yield
    finally:
        lab.target("node", lab.ports["node"])


@contextlib.contextmanager
def _as_before(lab: Lab) -> Iterator[None]:
    """Prometheus has its own configuration again at the end."""
    try:
        yield
    finally:
        lab.configure()
        lab.prometheus.reload()


@contextlib.contextmanager
def series_renamed(lab: Lab) -> Iterator[None]:
    """As an engine of another version would: the name is another, the value goes on."""
    made: dict[str, Any] = lab.configured()
    (job,) = (one for one in made["scrape_configs"] if one["job_name"] == "engine")
    rename = {
        "source_labels": ["__name__"],
        "regex": "vllm:num_requests_waiting",
        "target_label": "__name__",
        "replacement": "vllm:num_requests_pending",
    }
    job["metric_relabel_configs"] = [*job.get("metric_relabel_configs", []), rename]
    with _as_before(lab):
        lab.configure({"scrape_configs": made["scrape_configs"]})
        lab.prometheus.reload()
        yield


@contextlib.contextmanager
def rule_unevaluable(lab: Lab) -> Iterator[None]:
    """A rule that parses and can't be computed: many series on both sides."""
    rule = {"record": "broken", "expr": "scrape_duration_seconds * on () up"}
    path = lab.folder / "rules" / "zz-broken.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "broken", "rules": [rule]}]}), encoding="utf-8")
    lab.prometheus.reload()
    try:
        yield
    finally:
        path.unlink()
        lab.prometheus.reload()


@contextlib.contextmanager
def configuration_broken(lab: Lab) -> Iterator[None]:
    with _as_before(lab):
        (lab.folder / "prometheus.yml").write_text("scrape_configs: [{job_name: }]\n", encoding="utf-8")
        taken = lab.prometheus.reload()
        assert not taken, "Prometheus took a broken configuration"
        yield


@contextlib.contextmanager
def receiver_refuses(lab: Lab) -> Iterator[None]:
    """The pager's webhook says 403, as to an old token, while a card reports an error worth a page."""
    lab.receiver.refusing.add("page")
    try:
        with gpu(lab, DCGM_FI_DEV_XID_ERRORS=79):
            yield
    finally:
        lab.receiver.refusing.clear()


@contextlib.contextmanager
def gpu(lab: Lab, **fields: float) -> Iterator[None]:
    """The recorded card's page with some fields changed."""
    before = lab.gpu.text
    for name, value in fields.items():
        lab.gpu.text, count = re.subn(rf"(?m)^({name}\{{.*\}}) \S+$", rf"\g<1> {value:g}", lab.gpu.text)
        assert count, f"the recorded page has no {name}"
    try:
        yield
    finally:
        lab.gpu.text = before


@contextlib.contextmanager
def disk_filled(lab: Lab, share: float) -> Iterator[None]:
    """The file system that holds the usage ledger, with that share of it taken."""
    stat = os.statvfs(lab.disk)
    ballast = lab.disk / "ballast"
    wanted = int(stat.f_blocks * stat.f_frsize * share) - (stat.f_blocks - stat.f_bavail) * stat.f_frsize
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while wanted > 0:
            wanted -= file.write(bytes(min(wanted, 1 << 12)))
    try:
        yield
    finally:
        ballast.unlink()


@contextlib.contextmanager
def disk_full(lab: Lab) -> Iterator[None]:
    with disk_filled(lab, 1.0), load(Front(lab.url("gateway"), lab.keys["proof"]), *MIX, pace_s=0.5):
        yield


@contextlib.contextmanager
def memory_short(lab: Lab) -> Iterator[None]:
    """The exporter reads a copy of /proc in which 1 % of the memory is left: to take the rest would harm neighbours."""
    copy = lab.folder / "proc"
    shutil.rmtree(copy, ignore_errors=True)
    (copy / "1").mkdir(parents=True)
    for name in ("meminfo", "vmstat", "stat", "loadavg", "1/mounts", "1/mountinfo"):
        (copy / name).write_bytes(Path("/proc", name).read_bytes())
    text = (copy / "meminfo").read_text()
    total = int(re.search(r"MemTotal:\s+(\d+)", text)[1])  # type: ignore[index]
    (copy / "meminfo").write_text(re.sub(r"(MemAvailable:\s+)\d+", rf"\g<1>{total // 100}", text))
    lab.stop("node")
    lab.node(procfs=copy)
    try:
        yield
    finally:
        lab.stop("node")
        lab.node()


@contextlib.contextmanager
def process_out_of_memory(lab: Lab) -> Iterator[None]:
    """A control group of 50 MB, and a program in it that wants 200: the kernel kills it for real."""
    group = MEMORY_CGROUP / f"proof-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text("50M")
        inside = f"open('{group}/cgroup.procs', 'w').write('0'); bytearray(200 << 20)"
        code = subprocess.run((sys.executable, "-c", inside), capture_output=True, check=False).returncode
        assert code == -9, f"the kernel did not kill it ({code})"
        yield
    finally:
        group.rmdir()


FAULTS = (
    Fault("nothing", "none: it always fires", (Expected("Watchdog", clears=False),), nothing, ci=True),
    Fault(
        "exporter killed",
        "SIGKILL to the node exporter",
        (Expected("ScrapeTargetDown", job="node-exporter"),),
        exporter_stopped,
        ci=True,
    ),
    Fault(
        "target removed",
        "the exporter's target is taken away",
        (Expected("ScrapeTargetGone", job="node-exporter"),),
        target_removed,
        ci=True,
    ),
    Fault(
        "series renamed",
        "metric_relabel_configs renames vllm:num_requests_waiting",
        (Expected("MetricsRenamed"),),
        series_renamed,
        ci=True,
    ),
    Fault(
        "rule fails", "a rule file with a many-to-many match", (Expected("PrometheusRulesFailing"),), rule_unevaluable
    ),
    Fault(
        "bad configuration",
        "a broken prometheus.yml, and a reload",
        (Expected("ConfigReloadFailed", job="prometheus"),),
        configuration_broken,
        ci=True,
    ),
    Fault(
        "receiver refuses",
        "the page receiver answers 403 to a page",
        (Expected("AlertsNotDelivered"),),
        receiver_refuses,
    ),
    Fault("card hot", "recorded page: 93 °C", (Expected("GpuTooHot"),), partial(gpu, DCGM_FI_DEV_GPU_TEMP=93), ci=True),
    Fault(
        "card fails", "recorded page: Xid 79", (Expected("GpuXid"),), partial(gpu, DCGM_FI_DEV_XID_ERRORS=79), ci=True
    ),
    Fault(
        "card full",
        "recorded page: 24,200 of 24,300 MiB used",
        (Expected("GpuMemoryFull"),),
        partial(gpu, DCGM_FI_DEV_FB_USED=24200, DCGM_FI_DEV_FB_FREE=100),
        ci=True,
    ),
    Fault(
        "disk filling",
        "94 % of a small file system written",
        (Expected("HostDiskFilling"),),
        partial(disk_filled, share=0.94),
        ci=True,
    ),
    Fault(
        "disk full",
        "the small file system with the usage ledger written full",
        (Expected("HostDiskFull"), Expected("HostDiskFilling", inhibited=True), Expected("GatewayLedgerFailing")),
        disk_full,
        ci=True,
    ),
    Fault(
        "memory short", "node exporter on a copy of /proc: 1 % available", (Expected("HostMemoryLow"),), memory_short
    ),
    Fault(
        "out of memory",
        "the kernel kills a program in a 50 MB control group",
        (Expected("HostOomKill"),),
        process_out_of_memory,
    ),
)
