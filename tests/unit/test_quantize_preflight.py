"""What is said before a weight is loaded: expected, found, and the setting to change."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from scripts.checks import Check
from scripts.checks.nvidia import parse_smi
from scripts.checks.probes import Probes, Ran
from scripts.planner.numbers import GIB, MIB
from scripts.quantization import QuantizeError, config, estimate, preflight, source, vram
from scripts.quantization import plan as planning
from tests.fakes import checkpoint
from tests.unit.test_doctor_gpu import IDLE, report
from tests.unit.test_quantize_texts import Words

SHAPES = Path("scripts/planner/shapes")
LLAMA = json.loads((SHAPES / "llama3-8b.json").read_text()) | {"model_type": "llama"}
SMOL = json.loads((SHAPES / "smollm2-135m-instruct.json").read_text()) | {"model_type": "llama"}


def made(**change: Any) -> config.Config:
    """A configuration with one part replaced."""
    given: dict[str, Any] = {"name": "a", "source": {"model": "m"}, "calibration": {"source": "t"}}
    return config.parse(given | change, "c.yaml")


def failed(checks: Sequence[Check]) -> dict[str, Check]:
    return {check.name: check for check in preflight.refused(checks)}


@pytest.mark.parametrize(
    ("weights", "name", "fix"),
    [
        ({"w_bit": 3}, "weights.w_bit", "set weights.w_bit: 4"),
        ({"w_bit": 8}, "weights.w_bit", "set weights.w_bit: 4"),
        ({"zero_point": False}, "weights.zero_point", "set weights.zero_point: true"),
        ({"version": "GEMV"}, "weights.version", "set weights.version: GEMM"),
        ({"version": "marlin"}, "weights.version", "set weights.version: GEMM"),
        *(({"group_size": size}, "weights.group_size", "set weights.group_size: 128") for size in (96, 100, -1, 0, 16)),
    ],
)
def test_a_combination_the_engine_cannot_load_is_refused(weights: dict[str, Any], name: str, fix: str) -> None:
    (check,) = failed(preflight.rules(made(weights=weights))).values()
    assert check.name == name
    assert check.fix.startswith(fix)
    assert check.found == str(next(iter(weights.values()))).replace("False", "false")


@pytest.mark.parametrize("group", [32, 64, 128])
def test_groups_that_divide_llama_3s_widths_are_taken(group: int) -> None:
    wanted = made(weights={"group_size": group})
    assert not failed([*preflight.rules(wanted), *preflight.model(LLAMA, wanted)])


def test_a_group_that_does_not_divide_names_the_one_that_would() -> None:
    (check,) = failed(preflight.model(SMOL, made())).values()
    assert check.name == "weights.group_size"
    assert "does not divide hidden_size 576" in check.found
    assert check.fix == "set weights.group_size: 64"


def test_widths_that_no_group_divides_are_said_to_be_so() -> None:
    odd = LLAMA | {"intermediate_size": 14340}
    (check,) = failed(preflight.model(odd, made())).values()
    assert "no group the engine loads divides them" in check.fix


@pytest.mark.parametrize("kind", ["mixtral", "gpt_neox", "deepseek_v3", "llava"])
def test_an_unsupported_architecture_is_named_with_those_that_are(kind: str) -> None:
    check = failed(preflight.model(LLAMA | {"model_type": kind}, made()))["source.architecture"]
    assert check.found == kind
    assert "llama, mistral, phi3, qwen2, qwen3" in check.expected


@pytest.mark.parametrize(
    ("block_tokens", "more", "refused"),
    [
        (2048, {}, True),
        (2047, {}, False),
        (2048, {"producer": "llmcompressor"}, False),
    ],
)
def test_blocks_that_reach_beyond_a_sliding_window_are_refused_where_there_is_one_mask(
    block_tokens: int, more: dict[str, Any], refused: bool
) -> None:
    chosen = made(calibration={"source": "t", "block_tokens": block_tokens}, **more)
    sliding = LLAMA | {"model_type": "mistral", "sliding_window": 2048}
    assert ("calibration.block_tokens" in failed(preflight.model(sliding, chosen))) is refused
    for unused in ({"sliding_window": None}, {"use_sliding_window": False}):
        assert not failed(preflight.model(sliding | unused, chosen))


def test_a_quantized_source_is_refused() -> None:
    found = failed(preflight.model(LLAMA | {"quantization_config": {"quant_method": "gptq"}}, made()))
    assert "gptq" in found["source.precision"].found


def folder(tmp_path: Path, **change: bytes | None) -> Path:
    """A whole small model, with files replaced or left out (`None`); a key's `__` is a dot."""
    place = tmp_path / "model"
    place.mkdir()
    renamed = {name.replace("__", "."): content for name, content in change.items()}
    for name, content in {**checkpoint.files(), **renamed}.items():
        if content is not None:
            (place / name).write_bytes(content)
    return place


def test_a_whole_directory_passes(tmp_path: Path) -> None:
    assert not failed(preflight.directory(folder(tmp_path)))


@pytest.mark.parametrize(
    ("change", "name", "says"),
    [
        ({checkpoint.SHARDS[1]: None}, "source.weights", "1 of 2 shards are missing"),
        ({checkpoint.SHARDS[0]: b"version https://git-lfs.github.com/spec/v1\n"}, "source.weights", "Git LFS pointer"),
        ({checkpoint.SHARDS[0]: b"12345678"}, "source.weights", "not a whole safetensors file"),
        ({"tokenizer__json": None}, "model.tokenizer", "has no tokenizer files"),
        ({"tokenizer__json": b'{"cut'}, "model.tokenizer", "no JSON object"),
        ({"chat_template__jinja": None, "tokenizer_config__json": b"{}"}, "model.chat_template", "none"),
    ],
)
def test_what_a_directory_lacks_is_named(tmp_path: Path, change: dict[str, bytes | None], name: str, says: str) -> None:
    place = folder(tmp_path)
    for file, content in change.items():
        path = place / file.replace("__", ".")
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
    check = failed(preflight.directory(place))[name]
    assert says in check.found
    assert check.fix


def test_too_little_disk_memory_or_bound_is_refused_with_its_setting() -> None:
    need = estimate.Need(6 * GIB, ram=26 * GIB, vram=None, weights_before=16 * GIB, weights_after=6 * GIB, inputs=GIB)
    here = preflight.Machine(disk_free=7 * GIB, ram_free=20 * GIB)
    hub = source.Located("o/m", "main", None)
    local = source.Located("/m", "local", Path("/m"))
    bound = made(memory={"ram_gib": 24})
    found = failed(preflight.room(need, here, bound, Path("/models"), hub))
    assert list(found) == ["room.disk", "memory.ram", "memory.ram_gib"]
    assert found["room.disk"].expected == "22.00 GiB free in /models"  # with the download
    assert "set memory.ram_gib: 26" in found["memory.ram_gib"].fix
    assert list(failed(preflight.room(need, here, made(), Path("/models"), local))) == ["memory.ram"]


@pytest.mark.parametrize(("card_gib", "fit"), [(20, True), (16, False)])
def test_an_8bs_inputs_stay_on_a_card_of_24_gb_and_wait_in_host_memory_beside_one_of_16(
    card_gib: int, fit: bool
) -> None:
    need = estimate.need(estimate.shape(LLAMA), made(), "cuda", planning.CLIP_TOKENS["cuda"])
    assert need.vram is not None
    assert need.vram < card_gib * GIB  # either does the job
    assert need.inputs_fit(card_gib * GIB) == fit


def test_a_models_dir_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir(mode=0o555)
    found = preflight.writable(tmp_path / "m" / "new", "a")
    assert found.status == ("ok" if os.geteuid() == 0 else "fail")  # root may write anywhere


# -- one card, two jobs -----------------------------------------------------------------------------------------------

NEED = 11 * GIB
MIDDLE = "as long as this job takes"


def eyes(xml: str | Ran | None, **environ: str) -> Probes:
    def run(command: Sequence[str], environ: Mapping[str, str] | None = None) -> Ran | None:
        if xml is None:
            return None
        if "-x" in command:
            return xml if isinstance(xml, Ran) else Ran(0, xml)
        return Ran(0, "0, 8.9\n")

    return Probes(run=run, environ=environ)


def card(xml: str) -> vram.Device:
    return vram.Device("cuda", parse_smi(xml, "0, 8.9\n").cards[0])


SERVING = report("NVIDIA GeForce RTX 4090", 24564, 22100, processes=[("VLLM::EngineCore", "21900 MiB")])


def test_an_engine_on_the_card_is_named_with_both_ways_out() -> None:
    check, _ = vram.judge(card(SERVING), NEED, None, MIDDLE)
    assert check.status == "fail"
    assert "held by the engine, VLLM::EngineCore (pid 100, 21.39 GiB)" in check.found
    assert check.fix.startswith("--stop-engine stops the engine for the job (as long as this job takes")
    assert "--device cpu leaves it alone" in check.fix


def test_with_the_engine_stopped_the_card_has_room_and_a_limit_below_what_is_free() -> None:
    check, device = vram.judge(vram.freed(card(SERVING)), NEED, None, MIDDLE)
    assert check.status == "ok"
    assert device.limit == (24564 - 400 - 22100 + 21900) * MIB - vram.MARGIN


def test_other_programs_are_named_too() -> None:
    xml = report("NVIDIA GeForce RTX 4090", 24564, 15000, processes=[("C:\\x\\game.exe", "14000 MiB"), ("Xorg", "N/A")])
    check, _ = vram.judge(card(xml), NEED, None, MIDDLE)
    assert "held by game.exe (pid 100, 13.67 GiB), Xorg (pid 101)" in check.found


def test_a_holder_out_of_sight_is_said_to_be_so() -> None:
    check, _ = vram.judge(card(report("NVIDIA L4", 23034, 20000)), NEED, None, MIDDLE)
    assert "processes that are not visible from here (19.53 GiB)" in check.found


def test_beside_an_engine_that_leaves_room_the_job_keeps_to_what_is_free() -> None:
    xml = report("NVIDIA A100", 81920, 60000, processes=[("VLLM::EngineCore", "59000 MiB")])
    check, device = vram.judge(card(xml), NEED, None, MIDDLE)
    assert check.status == "ok"
    assert device.limit == (81920 - 400 - 60000) * MIB - vram.MARGIN


def test_a_bound_below_the_need_is_refused_naming_the_bound() -> None:
    check, device = vram.judge(card(IDLE), NEED, 8, MIDDLE)
    assert "raise memory.vram_gib" in check.fix
    assert device.limit == 8 * GIB
    assert vram.judge(card(IDLE), NEED, 20, MIDDLE)[1].limit == 20 * GIB


def test_cuda_asked_for_and_not_there_is_refused() -> None:
    with pytest.raises(QuantizeError, match="no NVIDIA card is seen here: take --device cpu"):
        vram.choose("cuda", eyes(None))
    with pytest.raises(QuantizeError, match="nvidia-smi says: Failed to initialize NVML"):
        vram.choose("cuda", eyes(Ran(18, "", "Failed to initialize NVML: Driver/library version mismatch\n")))


def test_auto_takes_the_cpu_where_no_card_is_seen_and_says_so() -> None:
    assert vram.choose("auto", eyes(None)) == (vram.Device("cpu"), "no NVIDIA card is seen")


def test_a_torch_for_the_cpu_does_not_use_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vram, "_torch", lambda: "2.13.0+cpu")
    assert vram.choose("auto", eyes(IDLE))[0].kind == "cpu"
    with pytest.raises(QuantizeError, match=r"torch 2\.13\.0\+cpu is built for the CPU"):
        vram.choose("cuda", eyes(IDLE))


def test_of_two_cards_the_named_one_is_taken_else_the_emptier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vram, "_torch", lambda: "2.13.0")
    one = report("NVIDIA GeForce RTX 4090", 24564, 20000)
    two = re.search(r"<gpu .*?</gpu>", report("NVIDIA GeForce RTX 4090", 24564, 100), re.DOTALL)
    assert two
    both = one.replace("</nvidia_smi_log>", two[0] + "</nvidia_smi_log>")
    chosen, _ = vram.choose("auto", eyes(both))
    assert chosen.card and chosen.card.index == 1
    chosen, _ = vram.choose("auto", eyes(both, CUDA_VISIBLE_DEVICES="0"))
    assert chosen.card and chosen.card.index == 0


# -- the whole look ---------------------------------------------------------------------------------------------------


def test_a_wrong_setting_is_found_before_anything_is_read(tmp_path: Path) -> None:
    """The calibration file is not even there."""
    place = folder(tmp_path)
    wanted = made(source={"model": str(place)}, weights={"w_bit": 3, "group_size": 64})
    found = planning.look(planning.Ask(wanted, tmp_path), eyes(None, XDG_CACHE_HOME=str(tmp_path)), print)
    assert list(failed(found.checks)) == ["weights.w_bit"]


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("./nowhere", "is no directory"),
        ("no-such-model", "`make model` brings the small one"),
        ("a/b/c", "is no directory"),
    ],
)
def test_a_source_that_is_not_there_says_what_to_give(tmp_path: Path, model: str, says: str) -> None:
    with pytest.raises(QuantizeError, match=says):
        source.locate(model, "main", tmp_path, {"XDG_CACHE_HOME": str(tmp_path)})


def test_without_a_way_to_the_hub_one_line_says_what_to_check(tmp_path: Path) -> None:
    code = (
        "from scripts.quantization import QuantizeError, source\n"
        "try: source.download(source.Located('o/m', 'main', None), print, weights=False)\n"
        "except QuantizeError as error: print(error)"
    )
    nowhere = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    ran = subprocess.run([sys.executable, "-c", code], env=nowhere, capture_output=True, text=True, check=False)
    assert ran.stdout.startswith("source.model: o/m can't be downloaded ("), ran.stderr
    assert "check the network" in ran.stdout


def test_a_missing_calibration_file_is_found_before_weights(tmp_path: Path) -> None:
    place = folder(tmp_path)
    wanted = made(source={"model": str(place)}, weights={"group_size": 64}, calibration={"source": "none.jsonl"})
    with pytest.raises(QuantizeError, match=r"calibration\.source: none\.jsonl does not exist"):
        planning.look(planning.Ask(wanted, tmp_path), eyes(None, XDG_CACHE_HOME=str(tmp_path)), print)


def test_the_digest_follows_texts_files_and_settings_but_not_device_or_memory(tmp_path: Path) -> None:
    place = folder(tmp_path)
    lines = tmp_path / "t.txt"
    few, other = (
        "\n\n".join(f"text {n} " + "w " * 40 for n in range(80)),
        "\n\n".join(f"t {n} " * 40 for n in range(80)),
    )
    lines.write_text(few)
    texts = {"source": str(lines), "blocks": 4, "block_tokens": 32, "held_out_tokens": 1024}

    def look(**change: Any) -> planning.Plan:
        whole = {"source": {"model": str(place)}, "weights": {"group_size": 64}, "calibration": texts, "device": "cpu"}
        asked = planning.Ask(made(**whole | change), tmp_path / "models")
        return planning.look(asked, eyes(None, XDG_CACHE_HOME=str(tmp_path)), print, lambda _: Words())

    first = look()
    assert not first.refused
    assert first.prepared and first.prepared.calibration.blocks == 4
    assert first.end_of_turn == 7
    assert look().digest == first.digest
    assert look(device="auto", memory={"parallel_blocks": 2}).digest == first.digest
    assert look(weights={"group_size": 32}).digest != first.digest
    assert look(calibration=texts | {"seed": 1}).digest != first.digest
    lines.write_text(other)
    assert look().digest != first.digest
    lines.write_text(few)
    assert look().digest == first.digest
    (place / "generation_config.json").write_text("{}")
    assert look().digest != first.digest
