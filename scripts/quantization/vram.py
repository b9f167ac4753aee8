"""One card, two jobs: who holds its memory, what is left, and what to do about it. Decides; acts on nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Literal

from scripts.checks import Check, fail, ok, skip
from scripts.checks.nvidia import Card, Holder, SmiError, read_smi
from scripts.checks.probes import Probes
from scripts.planner.numbers import GIB, MIB, gib
from scripts.quantization import QuantizeError

ENGINE = "VLLM::"  # how vLLM's processes call themselves
MARGIN = 512 * MIB  # left to whoever else is on the card


@dataclass(frozen=True)
class Device:
    """kind: where the job runs. card: the card it uses, None on the CPU. limit: bytes of the card it may take."""

    kind: Literal["cpu", "cuda"]
    card: Card | None = None
    limit: int | None = None

    @property
    def name(self) -> str:
        return self.card.name if self.card else "CPU"


def choose(wanted: str, probes: Probes) -> tuple[Device, str]:
    """The device, and why it is that one. Raises QuantizeError where `cuda` is asked for and not to be had."""
    if wanted == "cpu":
        return Device("cpu"), "asked for"
    try:
        smi = read_smi(probes)
    except SmiError as error:
        if wanted == "cuda":
            raise QuantizeError(
                f"device: cuda is asked for, but nvidia-smi says: {error}; or take --device cpu"
            ) from None
        return Device("cpu"), f"nvidia-smi is no help: {error}"
    if smi is None or not smi.cards:
        if wanted == "cuda":
            raise QuantizeError("device: cuda is asked for, but no NVIDIA card is seen here: take --device cpu")
        return Device("cpu"), "no NVIDIA card is seen"
    if "+cpu" in _torch():
        if wanted == "cuda":
            raise QuantizeError(
                f"device: cuda is asked for, but this environment's torch {_torch()} is built for the CPU: "
                "use the job's image, or install the same torch with CUDA"
            )
        return Device("cpu"), f"there is a card, but torch {_torch()} is built for the CPU"
    card = _card(smi.cards, probes.environ)
    return Device("cuda", card), f"card {card.index}"


def _torch() -> str:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "none"


def _card(cards: tuple[Card, ...], environ: Mapping[str, str]) -> Card:
    """The card CUDA_VISIBLE_DEVICES puts first, else the one with most memory free: the job uses one card only."""
    first = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    for card in cards:
        if first.isdecimal() and card.index == int(first):
            return card
    return max(cards, key=lambda card: (card.free, -card.index))


def judge(device: Device, need: int, setting_gib: float | None, minutes: str) -> tuple[Check, Device]:
    """Whether the card has room for `need` bytes; the device with the limit that the job will keep to."""
    name = "memory.card"
    card = device.card
    if card is None:
        return skip(name, "room on the card", "the job runs on the CPU"), device
    expected = f"{gib(need)} free for this job"
    allowed = card.free - MARGIN
    if setting_gib is not None:
        allowed = min(allowed, round(setting_gib * GIB))
    found = f"{gib(card.free)} of {gib(card.total)} free on {card.name}"
    if setting_gib is not None:
        found += f", memory.vram_gib {setting_gib:g}"
    limited = Device(device.kind, card, max(allowed, 0))
    if need <= allowed:
        return ok(name, expected, found), limited
    if setting_gib is not None and need > setting_gib * GIB:
        fix = "raise memory.vram_gib, or lower calibration.blocks or clip_tokens, or --device cpu"
        return fail(name, expected, found, fix), limited
    held = _holders(card)
    if any(holder.name.startswith(ENGINE) for holder in card.holders):
        fix = (
            f"--stop-engine stops the engine for the job ({minutes}; until it is ready again the gateway answers 503), "
            "or --device cpu leaves it alone"
        )
    else:
        fix = "close what holds it, or --device cpu; --stop-engine where it is this stack's engine"
    return fail(name, expected, f"{found}; held by {held}", fix), limited


def _holders(card: Card) -> str:
    if not card.holders:
        return f"processes that are not visible from here ({gib(card.used)})"
    return ", ".join(map(_named, card.holders))


def _named(holder: Holder) -> str:
    kind = "the engine, " if holder.name.startswith(ENGINE) else ""
    size = f", {gib(holder.used)}" if holder.used is not None else ""
    return f"{kind}{holder.name} (pid {holder.pid}{size})"


def freed(device: Device) -> Device:
    """The card as it will be once this stack's engine has been stopped."""
    card = device.card
    if card is None:
        return device
    gone = [holder for holder in card.holders if holder.name.startswith(ENGINE)]
    size = sum(holder.used or 0 for holder in gone)
    kept = tuple(holder for holder in card.holders if holder not in gone)
    return Device(device.kind, replace(card, free=card.free + size, used=card.used - size, holders=kept))
