"""The card: driver, kind, and whether what is free now is enough for the plan; who holds the rest, by name."""

from __future__ import annotations

from collections.abc import Sequence

from scripts.checks import Check, fail, judged, ok, skip, warn
from scripts.checks import fit as planning
from scripts.checks.envfile import place, read_env
from scripts.checks.nvidia import Card, Holder, Smi, SmiError, read_smi
from scripts.checks.probes import Probes
from scripts.checks.subject import Subject
from scripts.planner import PlanError
from scripts.planner.gpus import Gpu, find_gpu, load_gpus
from scripts.planner.memory import CONTEXT_BYTES
from scripts.planner.numbers import MIB, gib

DRIVER_MIN = 580  # the branch CUDA 13 came with; the pinned wheels are built for CUDA 13
SM_MIN = 75  # CUDA 13 builds nothing for older cards
_ENGINE = "VLLM::"  # how vLLM's processes call themselves
_NAMES = ("gpu.driver", "gpu.card", "gpu.mode", "gpu.memory")


def checks(probes: Probes, subject: Subject) -> list[Check]:
    """Four checks for each card the profile could mean; one `skip` where the CPU is enough."""
    expected = f"an NVIDIA driver {DRIVER_MIN} or newer"
    if subject.on_cpu:
        return [skip("gpu", expected, f"profile {subject.profile_path.stem} runs on the CPU")]
    try:
        smi = read_smi(probes)
    except SmiError as error:
        return [fail("gpu.driver", expected, f"nvidia-smi: {error}", _smi_fix(str(error)))]
    if smi is None:
        where = place("ENGINE_PROFILE", read_env(probes.root), probes.environ)
        found = f"there is no nvidia-smi, and {where}={subject.profile_path.stem} is for a GPU"
        fix = "no NVIDIA card here: make up-cpu; else install the NVIDIA driver (under WSL 2: in Windows)"
        return [fail("gpu.driver", expected, found, fix)]
    if not smi.cards:
        return [driver(smi), fail("gpu.card", "one NVIDIA card", "the driver sees none", "check its seat and power")]
    card = chosen(smi.cards, subject)
    return [driver(smi), kind(card, smi.cards, subject), mode(card), memory(card, subject)]


def _smi_fix(why: str) -> str:
    if "Driver/library version mismatch" in why:
        return "the driver was updated while loaded: reboot"
    if "couldn't communicate" in why:
        return "the kernel module is not loaded: reinstall the driver, sign it where Secure Boot is on, reboot"
    return "reinstall the NVIDIA driver"


def chosen(cards: Sequence[Card], subject: Subject) -> Card:
    """The profile's card where there are several, else the first, which is the one an engine takes."""
    return next((card for card in cards if _key(card) == subject.card), cards[0])


def driver(smi: Smi) -> Check:
    name, expected = "gpu.driver", f"driver {DRIVER_MIN} or newer (the pinned wheels are built for CUDA 13)"
    branch = (smi.driver or "").split(".")[0]
    if not branch.isdecimal():
        return skip(name, expected, f"the driver's version can't be read: {smi.driver!r}")
    found = f"driver {smi.driver}" + (f", CUDA up to {smi.cuda}" if smi.cuda else "")
    fix = f"update the NVIDIA driver on the host to {DRIVER_MIN} or newer (under WSL 2: in Windows)"
    return judged(int(branch) >= DRIVER_MIN, name, expected, found, fix)


def kind(card: Card, cards: Sequence[Card], subject: Subject) -> Check:
    """Known to the plan, new enough, and the card the profile was made for."""
    name = "gpu.card"
    others = f" (one of {len(cards)} cards)" if len(cards) > 1 else ""
    found = f"card {card.index}: {card.name}, {card.total // MIB} MiB{others}"
    if card.sm is not None:
        found += f", sm {card.sm / 10}"
        if card.sm < SM_MIN:
            fix = "CUDA 13 has no kernels for it: take a newer card, or a .cpu profile"
            return fail(name, f"compute capability {SM_MIN / 10} or newer", found, fix)
    key = _key(card)
    if key is None:
        fix = "add it to configs/gpus.yaml with the total that the engine logs at start-up; no figure is guessed for it"
        return warn(name, "a card of configs/gpus.yaml", found, fix)
    if subject.card is None:
        expected = "a profile named <model>.<card>.yaml"
        return warn(name, expected, f"{subject.profile_path.name} names no known card; {found}", "rename the profile")
    fix = f"set ENGINE_PROFILE to a profile for {key}; gpu.memory below plans with the card that is here"
    return judged(key == subject.card, name, f"the profile's card, {subject.card}", found, fix, "warn")


def mode(card: Card) -> Check:
    name, expected = "gpu.mode", "the whole card, open to compute programs"
    if card.mig:
        fix = "the profiles and the plan are for whole cards: sudo nvidia-smi -mig 0, or plan with --total-gib"
        return warn(name, expected, "MIG is on: the engine would get a slice", fix)
    if card.compute_mode == "Prohibited":
        return fail(name, expected, "compute mode Prohibited", "sudo nvidia-smi -c DEFAULT")
    return ok(name, expected, f"MIG off, compute mode {card.compute_mode}")


def memory(card: Card, subject: Subject) -> Check:
    """Free memory against the plan with this profile on this card, and who holds the rest."""
    name, expected = "gpu.memory", "free memory for the plan"
    engines = [holder for holder in card.holders if holder.name.startswith(_ENGINE)]
    if engines:
        held = f"{gib(card.used)} used, by a vLLM engine that is running ({_named(engines)})"
        return skip(name, expected, f"{held}: the start it was checked for has happened")
    used = f"{gib(card.free)} of {gib(card.total)} free"
    if card.holders:
        used += f"; held by {_named(card.holders)}"
    elif card.used > 512 * MIB:
        used += f"; {gib(card.used)} held by processes that are not visible from here"
    key = _key(card)
    if key is None:
        return skip(name, expected, f"{used}; the plan does not know {card.name}, so nothing is judged")
    gpu: Gpu = load_gpus()[key]
    try:
        plan = planning.plan(subject, gpu, card.used)
    except PlanError as error:
        return skip(name, expected, f"{used}; no plan: {error}")
    need = plan.requested + CONTEXT_BYTES
    expected = f"{gib(need)} free for {subject.profile_path.stem} (its share {gib(plan.requested)} and a CUDA context)"
    if not plan.problems:
        return ok(name, expected, used)
    fix = f"{'; '.join(plan.problems)}. "
    fix += "Close what holds it (a desktop can run on the CPU's graphics), or: " if card.used > 256 * MIB else "See "
    fix += f"make plan PROFILE={subject.profile_path.stem}"
    if card.used > 256 * MIB:
        fix += f" ARGS='--used-gib {card.used / (1 << 30):.1f}'"
    return fail(name, expected, used, fix)


def _named(holders: Sequence[Holder]) -> str:
    """Largest first, each with its pid and its share where the driver tells it."""
    ordered = sorted(holders, key=lambda holder: holder.used or 0, reverse=True)
    shown = [f"{holder.name} (pid {holder.pid}, {_size(holder.used)})" for holder in ordered[:6]]
    return ", ".join([*shown, *([f"and {len(ordered) - 6} more"] if len(ordered) > 6 else [])])


def _size(used: int | None) -> str:
    return "size not told" if used is None else f"{used // MIB} MiB"


def _key(card: Card) -> str | None:
    """The card's key in configs/gpus.yaml; a name that is only similar is not it."""
    try:
        return find_gpu(card.name, load_gpus()).key
    except PlanError:
        return None
