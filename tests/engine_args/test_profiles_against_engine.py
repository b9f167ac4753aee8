"""Every profile goes through the pinned engine's own parser, configuration and attention classes.

Field case D1: nothing that ships is unknown to the engine. Runs .venv-engine (`make test-engine-args`).
"""

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.planner.catalog import SHAPES, find_model
from scripts.planner.gpus import load_gpus
from scripts.planner.memory import attention_backend
from scripts.planner.numbers import human_int
from scripts.planner.settings import PROFILES, default_settings, read_profile
from tests.engine_args.engine import cpu_probe, cuda_probe

NAMES = sorted(path.stem for path in PROFILES.glob("*.yaml"))
GPU_NAMES = [name for name in NAMES if ".cpu" not in name]


def card_of(name: str) -> str:
    return next(part for part in name.split(".") if part in load_gpus())


def parse(*argv: str) -> dict[str, Any]:
    return cpu_probe().ask(ask="parse", argv=["serve", *argv])


def write(directory: Path, text: str) -> str:
    path = directory / "profile.yaml"
    path.write_text(text)
    return str(path)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes a directory with a config.json of a shape that ships: all that the engine's configuration needs."""

    def make(shape: str) -> str:
        directory = tmp_path_factory.mktemp(shape)
        found = json.loads((SHAPES / f"{shape}.json").read_text())
        kind = "qwen3" if found["architectures"] == ["Qwen3ForCausalLM"] else "llama"
        (directory / "config.json").write_text(json.dumps(found | {"model_type": kind, "rms_norm_eps": 1e-5}))
        return str(directory)

    return make


# -- the parser -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_value_of_a_profile_reaches_the_engine(name: str) -> None:
    """Not only accepted: each option is found changed, or at the default that the profile states."""
    answer = parse("--config", str(PROFILES / f"{name}.yaml"))
    assert answer["exit"] == 0, answer
    for key, value in read_profile(PROFILES / f"{name}.yaml").items():
        dest, wanted = key.removeprefix("no-").replace("-", "_"), not value if key.startswith("no-") else value
        if key == "gpu-memory-utilization" and value == 0.92:
            assert dest not in answer["changed"], "0.92 is the default the profile says it is"
            continue
        found = answer["changed"][dest]
        if isinstance(found, int) and isinstance(wanted, str):
            wanted = human_int(wanted, key)
        assert found in (wanted, [wanted]), key


def test_a_false_is_dropped_in_silence(tmp_path: Path) -> None:
    answer = parse("--config", write(tmp_path, "model: /m\nenable-prefix-caching: false\n"))
    assert answer == {"exit": 0, "changed": {"model": "/m"}}


def test_a_no_flag_says_what_false_does_not(tmp_path: Path) -> None:
    answer = parse("--config", write(tmp_path, "model: /m\nno-enable-prefix-caching: true\n"))
    assert answer["changed"] == {"model": "/m", "enable_prefix_caching": False}


def test_config_with_an_equals_sign_is_ignored_in_silence(tmp_path: Path) -> None:
    answer = parse("--config=" + write(tmp_path, "model: /m\nmax-model-len: 4096\n"))
    assert answer == {"exit": 0, "changed": {}}


@pytest.mark.parametrize(("written", "meant"), [("2k", 2000), ("2K", 2048), ("auto", -1)])
def test_a_small_k_is_a_thousand(written: str, meant: int, tmp_path: Path) -> None:
    answer = parse("--config", write(tmp_path, f"model: /m\nmax-model-len: {written}\n"))
    assert answer["changed"]["max_model_len"] == meant


def test_the_command_line_beats_the_file(tmp_path: Path) -> None:
    answer = parse("--config", write(tmp_path, "model: /m\nmax-model-len: 4096\n"), "--max-model-len", "1024")
    assert answer["changed"]["max_model_len"] == 1024


@pytest.mark.parametrize("line", ["swap-space: 4", "enable-paged-attn: true", "max-modle-len: 4096"])
def test_an_option_that_does_not_exist_stops_the_start(line: str, tmp_path: Path) -> None:
    answer = parse("--config", write(tmp_path, f"model: /m\n{line}\n"))
    assert answer["exit"] == 2
    assert "unrecognized arguments" in answer["error"]


# -- the configuration ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GPU_NAMES)
def test_a_profile_makes_a_whole_engine_configuration(name: str, model_dir: Any) -> None:
    """Option against option and against the model. The CPU build has no FlashInfer and no CUDA cache dtypes."""
    shape = name.split(f".{card_of(name)}")[0]
    argv = ["serve", model_dir(shape), "--skip-tokenizer-init", "--config", str(PROFILES / f"{name}.yaml")]
    if name.endswith(".fp8kv"):
        argv += ["--kv-cache-dtype", "auto"]
    answer = cpu_probe().ask(ask="config", argv=argv)
    profile = read_profile(PROFILES / f"{name}.yaml")
    assert "error" not in answer, answer
    assert answer["max_model_len"] == profile["max-model-len"]
    assert answer["utilization"] == profile["gpu-memory-utilization"]
    assert answer["policy"] == "priority"


def test_a_context_beyond_the_model_fails_once_and_clearly(model_dir: Any) -> None:
    """Field case D2: the planner's refusal is the engine's."""
    argv = ["serve", model_dir("llama3-8b-awq"), "--skip-tokenizer-init", "--max-model-len", "131072"]
    error = cpu_probe().ask(ask="config", argv=argv)["error"]
    assert "max_model_len (131072) is greater than the derived max_model_len" in error


# -- the attention backends -------------------------------------------------------------------------------------------


def backends(sm: int, kv_cache_dtype: str = "auto", **changes: Any) -> dict[str, Any]:
    request = {"head_size": 128, "dtype": "bfloat16", "block_size": None, "attention_backend": None} | changes
    return cuda_probe().ask(sm=sm, kv_cache_dtype=kv_cache_dtype, **request)


@pytest.mark.parametrize("name", GPU_NAMES)
def test_the_engine_finds_a_backend_for_a_profile_on_its_card(name: str) -> None:
    profile, gpu = read_profile(PROFILES / f"{name}.yaml"), load_gpus()[card_of(name)]
    model, _ = find_model(name.split(f".{gpu.key}")[0], {"MODELS_DIR": "/nowhere", "XDG_CACHE_HOME": "/nowhere"})
    answer = backends(
        gpu.sm,
        profile.get("kv-cache-dtype", "auto"),
        dtype=model.dtype,
        head_size=model.head_dim,
        block_size=profile.get("block-size"),
        attention_backend=profile.get("attention-backend"),
    )
    assert answer["refusal"] is None
    assert answer["chosen"] is not None


@pytest.mark.parametrize("card", list(load_gpus()))
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_the_planner_names_the_backend_that_the_engine_takes(card: str, kv_cache_dtype: str) -> None:
    gpu = load_gpus()[card]
    model, _ = find_model("llama3-8b", {"MODELS_DIR": "/nowhere", "XDG_CACHE_HOME": "/nowhere"})
    settings = default_settings(model, gpu)
    changed = type(settings)(**{**vars(settings), "kv_cache_dtype": kv_cache_dtype})
    assert backends(gpu.sm, kv_cache_dtype)["chosen"] == attention_backend(gpu.sm, changed)


@pytest.mark.parametrize(
    ("sm", "valid"),
    [(89, ["FLASHINFER", "TRITON_ATTN"]), (90, ["FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"])],
)
def test_which_backends_read_an_fp8_cache(sm: int, valid: list[str]) -> None:
    assert backends(sm, "fp8")["valid"] == valid


@pytest.mark.parametrize("sm", [80, 86])
def test_triton_refuses_fp8_below_sm89_though_the_selector_lists_it(sm: int) -> None:
    """Why the sm86 fp8 profiles name FLASHINFER."""
    assert "TRITON_ATTN" in backends(sm, "fp8")["valid"]
    assert "requires SM89+" in backends(sm, "fp8", attention_backend="TRITON_ATTN")["refusal"]


def test_flash_attention_refuses_fp8_on_a_4090() -> None:
    assert "is not valid" in backends(89, "fp8", attention_backend="FLASH_ATTN")["refusal"]


@pytest.mark.parametrize(("block_size", "refused"), [(16, False), (32, False), (256, False), (24, True), (8, True)])
def test_blocks_are_multiples_of_16(block_size: int, refused: bool) -> None:
    """Field case D4: large blocks start today, sizes off the grid find no backend."""
    assert (backends(89, block_size=block_size)["refusal"] is not None) == refused
