"""Which backend, which kernel, and why: explained where a rule is known, admitted where none is."""

from dataclasses import replace
from pathlib import Path

import pytest

from scripts.checks.proof import backend
from scripts.checks.proof.log import StartLog, parse_log
from scripts.planner.gpus import load_gpus
from scripts.planner.memory import attention_backend
from scripts.planner.settings import Settings

ENGINES = Path(__file__).parents[1] / "fixtures" / "engines"


def log(name: str) -> StartLog:
    return parse_log((ENGINES / f"{name}.log").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("name", "sm", "found"),
    [
        ("derived-0.6.3", 89, "FLASH_ATTN; this release announces every backend but FlashAttention"),
        ("derived-0.6.3-fp8kv", 89, "Cannot use FlashAttention-2 backend for FP8 KV cache."),
        ("derived-0.8.5", 89, "FLASH_ATTN; the default from sm 8.0 on"),
        ("derived-0.10.2", 89, "FLASHINFER; FlashAttention has no fp8 kernel on sm 8.9"),
        ("derived-0.26.0", 90, "FLASH_ATTN out of FLASH_ATTN, FLASHINFER, TRITON_ATTN, FLEX_ATTENTION; the default"),
        ("recorded-0.32.0-cpu", None, "CPU_ATTN; the CPU build's one backend"),
        ("derived-0.33.0", 89, "TRITON_ATTN out of TRITON_ATTN; FlashAttention has no fp8 kernel on sm 8.9"),
    ],
)
def test_the_backend_is_named_and_explained(name: str, sm: int | None, found: str) -> None:
    check = backend.attention(log(name), None, sm, "auto")
    assert check.status == "ok"
    assert found in check.found


@pytest.mark.parametrize("card", sorted(load_gpus()))
@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_every_card_of_the_table_has_its_choice_explained(card: str, dtype: str) -> None:
    sm = load_gpus()[card].sm
    chosen = attention_backend(sm, Settings(0.92, 8192, 256, 2048, 16, kv_cache_dtype=dtype))
    start = replace(log("derived-0.33.0"), backend=chosen, potential=(), kv_cache_dtype=dtype)
    assert "no rule is known" not in backend.attention(start, None, sm, dtype).found


@pytest.mark.parametrize(
    ("chosen", "sm", "dtype"), [("FLASHINFER", 90, "auto"), ("FLEX_ATTENTION", 89, "auto"), ("FLASHINFER", 110, "fp8")]
)
def test_a_choice_without_a_known_rule_is_not_explained_away(chosen: str, sm: int, dtype: str) -> None:
    start = replace(log("derived-0.33.0"), backend=chosen, potential=(), kv_cache_dtype=dtype)
    assert "no rule is known" in backend.attention(start, None, sm, dtype).found


def test_an_unknown_card_is_admitted() -> None:
    found = backend.attention(log("derived-0.33.0"), None, None, "fp8").found
    assert "compute capability is not known here" in found


def test_without_a_log_nothing_is_said_of_backend_and_kernel() -> None:
    assert backend.attention(None, "0.32.0", 89, "auto").status == "skip"
    assert backend.awq(None).status == "skip"


@pytest.mark.parametrize(
    ("name", "status", "found"),
    [
        ("derived-0.6.3", "ok", "awq_marlin"),
        ("derived-0.6.3-fp8kv", "warn", "forced it"),
        ("derived-0.10.2", "ok", "awq_marlin"),
        ("derived-0.26.0", "ok", "MacheteLinearKernel"),
        ("derived-0.33.0", "ok", "MarlinLinearKernel"),
        ("recorded-0.32.0-cpu", "skip", "not quantized"),
    ],
)
def test_the_awq_kernel_is_named_and_the_slow_one_marked(name: str, status: str, found: str) -> None:
    check = backend.awq(log(name))
    assert (check.status, found in check.found) == (status, True)


def test_a_kernel_nobody_called_fast_is_not_called_fast() -> None:
    check = backend.awq(replace(log("derived-0.26.0"), kernels=("TritonW4A16LinearKernel",)))
    assert check.status == "warn"
