"""Cards as nvidia-smi reports them: recorded on an H200, and the same report with other cards' figures put in."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.checks import Check, gpu
from scripts.checks.nvidia import SmiError, parse_smi, read_smi
from scripts.checks.probes import Probes, Ran
from scripts.checks.subject import decide
from scripts.planner.numbers import MIB

FIXTURES = Path(__file__).parents[1] / "fixtures" / "engines" / "nvidia-smi"
IDLE = (FIXTURES / "recorded-h200-580-idle.xml").read_text(encoding="utf-8")
BUSY = (FIXTURES / "recorded-h200-580-busy.xml").read_text(encoding="utf-8")
CAPABILITY = (FIXTURES / "recorded-h200-580-capability.csv").read_text(encoding="utf-8")
NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA "
    "driver is installed and running.\n"
)
MISMATCH = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.95\n"


def report(
    name: str, total: int, used: int, driver: str = "580.95.05", processes: Sequence[tuple[str, str]] = ()
) -> str:
    """The recorded report with another card's figures (MiB) and processes (name, memory) in it."""
    listed = "".join(
        f"<process_info><pid>{100 + i}</pid><type>G</type><process_name>{program}</process_name>"
        f"<used_memory>{memory}</used_memory></process_info>"
        for i, (program, memory) in enumerate(processes)
    )
    memory = f"<total>{total} MiB</total><reserved>400 MiB</reserved><used>{used} MiB</used>"
    memory = f"<fb_memory_usage>{memory}<free>{total - 400 - used} MiB</free></fb_memory_usage>"
    xml = re.sub(r"<fb_memory_usage>.*?</fb_memory_usage>", memory, IDLE, flags=re.DOTALL)
    xml = re.sub(r"<processes>.*?</processes>", lambda _: f"<processes>{listed}</processes>", xml, flags=re.DOTALL)
    return xml.replace("NVIDIA H200", name).replace("580.159.04", driver)


def look(root: Path, profile: str, xml: str | Ran | None, capability: str = "0, 8.9\n") -> dict[str, Check]:
    def run(command: Sequence[str], environ: Mapping[str, str] | None = None) -> Ran | None:
        if xml is None:
            return None
        if "-x" in command:
            return xml if isinstance(xml, Ran) else Ran(0, xml)
        return Ran(0, capability)

    eyes = Probes(run=run, environ={"MODELS_DIR": "/nowhere", "XDG_CACHE_HOME": str(root)}, root=root)
    return {check.name: check for check in gpu.checks(eyes, decide(eyes, "stack", profile, None))}


# -- the report -------------------------------------------------------------------------------------------------------


def test_a_real_report_is_read() -> None:
    smi = parse_smi(BUSY, CAPABILITY)
    (card,) = smi.cards
    assert (smi.driver, smi.cuda) == ("580.159.04", "13.0")
    assert (card.name, card.sm, card.mig, card.compute_mode) == ("NVIDIA H200", 90, False, "Default")
    assert (card.total, card.used, card.free) == (143771 * MIB, 3599 * MIB, 139558 * MIB)
    (holder,) = card.holders
    assert (holder.pid, holder.name, holder.used) == (423, "python3", 3590 * MIB)
    assert parse_smi(IDLE, CAPABILITY).cards[0].holders == ()


def test_an_older_driver_says_no_capability() -> None:
    assert parse_smi(IDLE, "").cards[0].sm is None


@pytest.mark.parametrize("xml", ["", "<html>", IDLE.replace("<total>143771 MiB</total>", "<total>N/A</total>")])
def test_a_report_that_is_none_is_refused(xml: str) -> None:
    with pytest.raises(SmiError):
        parse_smi(xml, CAPABILITY)


def test_on_this_machine_it_is_there_or_it_is_not() -> None:
    """Nothing is replaced here."""
    smi = read_smi(Probes())
    assert smi is None or smi.driver


# -- the checks -------------------------------------------------------------------------------------------------------


def test_a_cpu_profile_asks_nothing_of_a_card(tmp_path: Path) -> None:
    assert [check.status for check in look(tmp_path, "smollm2-135m.cpu", None).values()] == ["skip"]


@pytest.mark.parametrize(
    ("answer", "fix"),
    [
        (None, "install the NVIDIA driver"),
        (Ran(9, NO_DRIVER), "kernel module is not loaded"),
        (Ran(18, MISMATCH), "reboot"),
    ],
)
def test_a_driver_that_is_not_there_or_broken_fails_with_its_own_fix(
    answer: Ran | None, fix: str, tmp_path: Path
) -> None:
    found = look(tmp_path, "llama3-8b-awq.rtx4090", answer)
    assert list(found) == ["gpu.driver"]
    if answer is None:
        assert "=llama3-8b-awq.rtx4090 is for a GPU" in found["gpu.driver"].found
        assert "make up-cpu" in found["gpu.driver"].fix
    assert (found["gpu.driver"].status, fix in found["gpu.driver"].fix) == ("fail", True)


def test_an_h200_as_recorded_is_fit_for_its_profile(tmp_path: Path) -> None:
    found = look(tmp_path, "llama3-8b-awq.h200", IDLE, CAPABILITY)
    assert {name: check.status for name, check in found.items()} == dict.fromkeys(gpu._NAMES, "ok")
    assert "driver 580.159.04, CUDA up to 13.0" in found["gpu.driver"].found


def test_an_idle_4090_is_fit_for_its_profile(tmp_path: Path) -> None:
    found = look(tmp_path, "llama3-8b-awq.rtx4090", report("NVIDIA GeForce RTX 4090", 24564, 2))
    assert {check.status for check in found.values()} == {"ok"}


@pytest.mark.parametrize(
    ("driver", "status"), [("515.48.07", "fail"), ("575.64.03", "fail"), ("580.65.06", "ok"), ("590.44.01", "ok")]
)
def test_the_driver_must_be_of_the_r580_branch_or_newer(driver: str, status: str, tmp_path: Path) -> None:
    found = look(tmp_path, "llama3-8b-awq.rtx4090", report("NVIDIA GeForce RTX 4090", 24564, 2, driver))
    assert found["gpu.driver"].status == status


def test_a_desktop_on_the_card_is_named_with_its_share(tmp_path: Path) -> None:
    desktop = [("/usr/lib/xorg/Xorg", "410 MiB"), ("/usr/bin/gnome-shell", "180 MiB"), ("firefox", "1120 MiB")]
    xml = report("NVIDIA GeForce RTX 4090", 24564, 1750, processes=desktop)
    check = look(tmp_path, "llama3-8b-awq.rtx4090", xml)["gpu.memory"]
    assert check.status == "fail"
    assert "firefox (pid 102, 1120 MiB), Xorg (pid 100, 410 MiB), gnome-shell (pid 101, 180 MiB)" in check.found
    assert "write at most 0." in check.fix or "lower gpu-memory-utilization" in check.fix
    assert "--used-gib 1.7" in check.fix


def test_a_program_whose_share_the_driver_hides_is_still_named(tmp_path: Path) -> None:
    """So it is under WSL, where Windows owns the card."""
    xml = report("NVIDIA GeForce RTX 4090", 24564, 2400, processes=[("C:\\Windows\\explorer.exe", "N/A")])
    check = look(tmp_path, "llama3-8b-awq.rtx4090", xml)["gpu.memory"]
    assert (check.status, "explorer.exe (pid 100, size not told)" in check.found) == ("fail", True)
    hidden = look(tmp_path, "llama3-8b-awq.rtx4090", report("NVIDIA GeForce RTX 4090", 24564, 2400))["gpu.memory"]
    assert "held by processes that are not visible from here" in hidden.found


def test_a_vllm_that_runs_is_no_stranger(tmp_path: Path) -> None:
    xml = report("NVIDIA GeForce RTX 4090", 24564, 22000, processes=[("VLLM::EngineCore", "21900 MiB")])
    check = look(tmp_path, "llama3-8b-awq.rtx4090", xml)["gpu.memory"]
    assert (check.status, "VLLM::EngineCore (pid 100" in check.found) == ("skip", True)


def test_a_card_nobody_knows_gets_no_figure(tmp_path: Path) -> None:
    xml = report("NVIDIA GeForce RTX 6090", 49152, 3000, processes=[("python3", "2900 MiB")])
    found = look(tmp_path, "llama3-8b-awq.rtx4090", xml, "0, 13.0\n")
    assert (found["gpu.card"].status, "no figure is guessed" in found["gpu.card"].fix) == ("warn", True)
    assert (found["gpu.memory"].status, "nothing is judged" in found["gpu.memory"].found) == ("skip", True)


def test_a_similar_name_is_not_the_same_card(tmp_path: Path) -> None:
    found = look(tmp_path, "llama3-8b-awq.rtx4090", report("NVIDIA GeForce RTX 4090 Laptop GPU", 16376, 2))
    assert found["gpu.card"].expected == "a card of configs/gpus.yaml"


def test_another_card_than_the_profiles_is_told_and_planned_for(tmp_path: Path) -> None:
    found = look(tmp_path, "llama3-8b-awq.rtx4090", report("NVIDIA GeForce RTX 3060", 12288, 2), "0, 8.6\n")
    assert (found["gpu.card"].status, found["gpu.card"].expected) == ("warn", "the profile's card, rtx4090")
    smaller = look(tmp_path, "llama3-8b.rtx4090", report("NVIDIA GeForce RTX 3060", 12288, 2), "0, 8.6\n")
    assert (smaller["gpu.memory"].status, "no room for a KV cache" in smaller["gpu.memory"].fix) == ("fail", True)


def test_a_card_too_old_for_cuda_13_fails(tmp_path: Path) -> None:
    found = look(tmp_path, "llama3-8b-awq.rtx4090", report("Tesla V100-SXM2-16GB", 16384, 2), "0, 7.0\n")
    assert (found["gpu.card"].status, "CUDA 13" in found["gpu.card"].fix) == ("fail", True)


def test_slices_and_prohibited_cards_are_told() -> None:
    (card,) = parse_smi(IDLE, CAPABILITY).cards
    assert gpu.mode(replace(card, mig=True)).status == "warn"
    assert gpu.mode(replace(card, compute_mode="Prohibited")).status == "fail"
    assert gpu.mode(replace(card, compute_mode="Exclusive_Process")).status == "ok"


def test_of_several_cards_the_profiles_own_is_looked_at(tmp_path: Path) -> None:
    one = re.search(r"\t<gpu id=.*</gpu>\n", IDLE, re.DOTALL)
    assert one is not None
    xml = IDLE.replace(one[0], one[0].replace("NVIDIA H200", "NVIDIA L4") + one[0])
    found = look(tmp_path, "llama3-8b-awq.h200", xml, "0, 8.9\n1, 9.0\n")
    assert "card 1: NVIDIA H200" in found["gpu.card"].found
    assert "one of 2 cards" in found["gpu.card"].found
