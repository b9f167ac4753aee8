"""What `nvidia-smi` says, as data. Its XML report names every process on a card, a desktop's included."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import dataclass

from scripts.checks.probes import Probes
from scripts.planner.numbers import MIB


@dataclass(frozen=True)
class Holder:
    """A process on a card. used: bytes, None where the driver does not say (WSL, Windows, some containers)."""

    pid: int
    name: str
    used: int | None


@dataclass(frozen=True)
class Card:
    """total is what the driver prints; the engine sees 0.4 to 0.5 GiB less of a desktop card. sm: 89 means 8.9."""

    index: int
    name: str
    total: int
    used: int
    free: int
    holders: tuple[Holder, ...]
    sm: int | None
    mig: bool
    compute_mode: str


@dataclass(frozen=True)
class Smi:
    """cuda: the newest CUDA this driver runs. Versions are None where the report leaves them out."""

    driver: str | None
    cuda: str | None
    cards: tuple[Card, ...]


class SmiError(Exception):
    """nvidia-smi is there and of no use; the message is its own reason."""


def read_smi(probes: Probes) -> Smi | None:
    """None where there is no nvidia-smi; raises SmiError where it fails (no driver loaded, a mismatch, a lost card)."""
    report = probes.run(["nvidia-smi", "-q", "-x"])
    if report is None:
        return None
    if report.code != 0:
        raise SmiError(report.why)
    # Two reports, because the XML of older drivers has no compute capability, and their CSV refuses to say it.
    query = probes.run(["nvidia-smi", "--query-gpu=index,compute_cap", "--format=csv,noheader"])
    return parse_smi(report.out, query.out if query is not None and query.code == 0 else "")


def parse_smi(xml: str, capabilities: str) -> Smi:
    try:
        root = ET.fromstring(xml)  # noqa: S314 - the driver's own words, and no entities are expanded from outside
    except ET.ParseError as error:
        raise SmiError(f"its report is no XML: {error}") from None
    by_index = {
        int(match[1]): int(match[2]) * 10 + int(match[3])
        for match in re.finditer(r"^(\d+), (\d+)\.(\d+)", capabilities, re.MULTILINE)
    }
    cards = tuple(_card(index, gpu, by_index.get(index)) for index, gpu in enumerate(root.findall("gpu")))
    return Smi(_text(root, "driver_version"), _text(root, "cuda_version"), cards)


def _card(index: int, gpu: ET.Element, sm: int | None) -> Card:
    total, used, free = (_bytes(_text(gpu, f"fb_memory_usage/{field}")) for field in ("total", "used", "free"))
    if total is None or used is None or free is None:
        raise SmiError(f"card {index} does not report its memory")
    return Card(
        index=index,
        name=_text(gpu, "product_name") or "unnamed card",
        total=total,
        used=used,
        free=free,
        holders=tuple(_holder(process) for process in gpu.iterfind("processes/process_info")),
        sm=sm,
        mig=_text(gpu, "mig_mode/current_mig") == "Enabled",
        compute_mode=_text(gpu, "compute_mode") or "Default",
    )


def _holder(process: ET.Element) -> Holder:
    pid = _text(process, "pid") or ""
    name = (_text(process, "process_name") or "").replace("\\", "/")
    short = name if name.startswith("VLLM::") else name.rsplit("/", 1)[-1]
    return Holder(int(pid) if pid.isdecimal() else 0, short or "unnamed", _bytes(_text(process, "used_memory")))


def _text(element: ET.Element, path: str) -> str | None:
    text = (element.findtext(path) or "").strip()
    return None if text in ("", "N/A", "[N/A]") else text


def _bytes(text: str | None) -> int | None:
    found = re.match(r"(\d+) MiB", text or "")
    return int(found[1]) * MIB if found else None
