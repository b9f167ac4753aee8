"""What the start-up logs of eight releases say, and logs that say nothing."""

from pathlib import Path

import pytest

from scripts.checks.proof import ProofError
from scripts.checks.proof.log import parse_log

ENGINES = Path(__file__).parents[1] / "fixtures" / "engines"


def text(name: str) -> str:
    return (ENGINES / f"{name}.log").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "version", "engine", "blocks", "tokens", "concurrency"),
    [
        ("derived-0.6.3", "0.6.3", "V0", 7615, None, 14.87),
        ("derived-0.6.3-fp8kv", "0.6.3", "V0", 15230, None, 29.75),
        ("derived-0.7.3", "0.7.3", "V0", 2508, None, 4.90),
        ("derived-0.8.5", "0.8.5", "V1", None, 40128, 4.90),
        ("derived-0.10.2", "0.10.2", "V1", None, 244112, 29.80),
        ("derived-0.26.0", "0.26.0", "V1", None, 1000256, 122.10),
        ("recorded-0.32.0-cpu", "0.32.0", "V1", None, 23296, 11.38),
        ("derived-0.33.0", "0.33.0", "V1", None, 247408, 30.20),
    ],
)
def test_the_kv_cache_is_read_in_every_form_it_was_ever_written(
    name: str, version: str, engine: str, blocks: int | None, tokens: int | None, concurrency: float
) -> None:
    log = parse_log(text(name))
    assert (log.version, log.engine, log.blocks, log.tokens) == (version, engine, blocks, tokens)
    assert log.concurrency == concurrency
    assert log.concurrency_length == (2048 if "cpu" in name else 8192)
    assert log.whole
    assert log.kv_line


@pytest.mark.parametrize(
    ("name", "device", "backend", "potential", "cache_dtype"),
    [
        ("derived-0.6.3", "cuda", None, (), "auto"),
        ("derived-0.6.3-fp8kv", "cuda", "XFORMERS", (), "fp8"),
        ("derived-0.7.3", "cuda", "FLASH_ATTN", (), "auto"),
        ("derived-0.8.5", "cuda", "FLASH_ATTN", (), "auto"),
        ("derived-0.10.2", "cuda", "FLASHINFER", (), "fp8"),
        ("derived-0.26.0", "cuda", "FLASH_ATTN", ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION"), "auto"),
        ("recorded-0.32.0-cpu", "cpu", None, (), "auto"),
        ("derived-0.33.0", "cuda", "TRITON_ATTN", ("TRITON_ATTN",), "fp8"),
    ],
)
def test_the_backend_has_its_present_name_in_every_release(
    name: str, device: str, backend: str | None, potential: tuple[str, ...], cache_dtype: str
) -> None:
    log = parse_log(text(name))
    assert (log.device, log.backend, log.potential, log.kv_cache_dtype) == (device, backend, potential, cache_dtype)


def test_the_reason_for_another_backend_is_kept_in_the_engines_words() -> None:
    log = parse_log(text("derived-0.6.3-fp8kv"))
    assert log.refusals == ("Cannot use FlashAttention-2 backend for FP8 KV cache.",)


@pytest.mark.parametrize(
    ("name", "quantization", "kernels", "forced", "convertible"),
    [
        ("derived-0.6.3", "awq_marlin", (), None, "awq_marlin"),
        ("derived-0.6.3-fp8kv", "awq", (), "awq", None),
        ("derived-0.26.0", "auto_awq", ("MacheteLinearKernel",), None, None),
        ("derived-0.33.0", "auto_awq", ("MarlinLinearKernel",), None, None),
        ("recorded-0.32.0-cpu", "None", (), None, None),
    ],
)
def test_the_quantization_and_its_kernel_are_read(
    name: str, quantization: str, kernels: tuple[str, ...], forced: str | None, convertible: str | None
) -> None:
    log = parse_log(text(name))
    assert (log.quantization, log.kernels, log.forced, log.convertible) == (quantization, kernels, forced, convertible)


def test_the_pool_is_read_where_the_log_states_its_bytes() -> None:
    found = {
        name: parse_log(text(name)).pool_gib for name in ("derived-0.7.3", "derived-0.26.0", "recorded-0.32.0-cpu")
    }
    assert found == {"derived-0.7.3": 4.90, "derived-0.26.0": 122.1, "recorded-0.32.0-cpu": 0.5}


def test_compose_prefixes_change_nothing() -> None:
    plain = text("derived-0.26.0")
    prefixed = "".join(f"engine-1  | {line}\n" for line in plain.splitlines())
    assert parse_log(prefixed).tokens == parse_log(plain).tokens
    assert parse_log(prefixed).backend == "FLASH_ATTN"


def test_of_several_starts_in_one_log_the_last_counts() -> None:
    log = parse_log(text("derived-0.10.2") + text("recorded-0.32.0-cpu"))
    assert (log.version, log.tokens, log.backend, log.pid) == ("0.32.0", 23296, None, 15955)
    log = parse_log(text("recorded-0.32.0-cpu") + text("derived-0.10.2"))
    assert (log.version, log.tokens, log.backend) == ("0.10.2", 244112, "FLASHINFER")


def test_a_log_that_is_cut_off_says_how_far_it_came() -> None:
    whole = text("derived-0.26.0")
    before_kv = parse_log(whole[: whole.index("Available KV cache")])
    assert (before_kv.tokens, before_kv.kv_line, before_kv.whole) == (None, "", False)
    assert before_kv.backend == "FLASH_ATTN"
    before_up = parse_log(whole[: whole.index("(APIServer pid=1) INFO 07-20 09:00:58")])
    assert (before_up.tokens, before_up.whole) == (1000256, False)


@pytest.mark.parametrize("other", ["", "INFO:     Uvicorn running on http://0.0.0.0:8080\n", '{"level": "INFO"}\n'])
def test_another_programs_log_is_refused(other: str) -> None:
    with pytest.raises(ProofError, match="no start of a vLLM"):
        parse_log(other)
